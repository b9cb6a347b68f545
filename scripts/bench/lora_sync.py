"""What an adapter costs to send and to generate with: merged into the weights, or shipped to the engine as an adapter.

    python scripts/bench/lora_sync.py                            # 4 and 100 MB, rank 16, one vLLM engine in this process
    python scripts/bench/lora_sync.py --megabytes 4 --rank 8

Models have random weights. Both ways take turns on engines of their own; CPU seconds of this process, medians of syncs.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import harness
from weight_sync import save_model

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, LoraConfig, ModelConfig, VLLMConfig
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import adapter_tensors, add_adapter, as_they_are, merged_weights
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weights import stored_weights

WAYS = ("merged", "adapter")
PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS, DEADLINE_S = 64, 64, 16, 600.0


class Cost(NamedTuple):
    """Of one way."""

    num_bytes: int
    """A sync carries."""
    sync_s: float
    tokens_per_s: float
    """Generated; both in CPU seconds."""


def measure(folder: Path, way: str, *, rank: int, syncs: int) -> Cost:
    """Starts an engine on the model in `folder`, sends it an adapter `syncs` times, and generates."""
    config = Config(
        model=ModelConfig(path=str(folder), lora=LoraConfig(rank=rank)),
        generator=GeneratorConfig(backend="vllm", max_context_length=256, vllm=VLLMConfig(lora_sync=way)),  # type: ignore[arg-type]
    )
    model = load_causal_lm(config.model, "cpu")
    add_adapter(model, config.model.lora, seed=0)
    engine = VLLMEngine(engine_settings(config))
    try:
        seconds = list[float]()
        num_bytes = 0
        for version in range(syncs):
            began, num_bytes, names = time.process_time(), 0, 0
            weights = merged_weights(model, as_they_are) if way == "merged" else adapter_tensors(model).items()
            engine.begin_update()
            stored = stored_weights({name: tensor.detach() for name, tensor in weights})
            for pending in stored.handed_over(stored.buckets()):
                bucket = pending.passed_on()
                engine.update(bucket)
                num_bytes += bucket.num_bytes
                names += len(bucket.names)
            engine.finish_update(version, names)
            seconds.append(time.process_time() - began)
        began = time.process_time()
        waiting = [engine.submit(request(number)) for number in range(NUM_REQUESTS)]
        generated = sum(len(each.result(DEADLINE_S).token_ids) for each in waiting)
        return Cost(num_bytes, statistics.median(seconds), generated / (time.process_time() - began))
    finally:
        engine.close()


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=tuple(range(5, 5 + PROMPT_TOKENS)),
        sampling=SamplingParams(temperature=1.0, max_generate_length=NEW_TOKENS),
        seed=number,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 100], help="of the model's weights")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--syncs", type=int, default=5)
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    table = harness.Table("megabytes", "way", "MB a sync", "CPU s a sync", "tokens a CPU s")
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="bench-lora-sync-") as scratch:
            num_bytes = save_model(Path(scratch), megabytes)
            for way in WAYS:
                cost = measure(Path(scratch), way, rank=args.rank, syncs=args.syncs)
                sent = (f"{num_bytes / 1e6:.0f}", way, f"{cost.num_bytes / 1e6:.2f}")
                table.row(*sent, f"{cost.sync_s:.3f}", f"{cost.tokens_per_s:.0f}")


if __name__ == "__main__":
    harness.run(main)
