"""Time of a weight sync against the size of the model: learners on Ray, vLLM engines on Ray, models with random weights.

    python scripts/bench_weight_sync.py                           # 4, 100 and 500 MB; two FSDP2 ranks, one engine
    python scripts/bench_weight_sync.py --megabytes 4 --ranks 1 --syncs 3

Prints a row per size: the first sync, and the median and the longest of the later ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from skyrl_train.config.generation import GeneratorConfig, VLLMConfig
from skyrl_train.config.schema import Config, ModelConfig, PlacementConfig, StrategyConfig, TrainerConfig

VOCABULARY = 4096
_WIDTHS = {4: 128, 100: 640, 500: 1280}
"""Megabytes of float32 to hidden size; other sizes take the nearest width and as many layers as it needs."""


def save_model(folder: Path, megabytes: int) -> int:
    """A Qwen2 with random weights of about that size, with a tokenizer; returns its bytes."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    width = _WIDTHS[min(_WIDTHS, key=lambda known: abs(known - megabytes))]
    hidden = 4 * width
    bytes_per_layer = 4 * (3 * width * hidden + 2 * width * width + width * width)
    layers = max(1, round((megabytes * 1e6 - 4 * VOCABULARY * width) / bytes_per_layer))
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 128),
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", eos_token="w2", pad_token="w0").save_pretrained(
        folder
    )
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def measure(folder: Path, *, ranks: int, engines: int, syncs: int, transport: str) -> list[float]:
    """Seconds of each sync of the model in `folder`."""
    from skyrl_train.batch.plan import plan_batches
    from skyrl_train.cluster.build import Cluster

    output = folder / "run"
    output.mkdir()
    vllm = VLLMConfig(num_engines=engines, weight_transport=transport)  # type: ignore[arg-type]
    config = Config(
        output_dir=str(output),
        model=ModelConfig(path=str(folder)),
        trainer=TrainerConfig(total_steps=1),
        strategy=StrategyConfig(name="fsdp2" if ranks > 1 else "single"),
        placement=PlacementConfig(backend="ray", policy_num_workers=ranks, start_timeout_s=900.0),
        generator=GeneratorConfig(backend="vllm", max_context_length=256, vllm=vllm),
    )
    with ExitStack() as stack:
        cluster = Cluster(config, stack)
        _, carrier = cluster.build_engine(stack)
        policy = cluster.build_learners(plan_batches(config, num_train_prompts=64), stack).policy
        for version in range(syncs):
            carrier.sync(policy.weights(), version)
    lines = (output / "weight_sync.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["seconds"] for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=list(_WIDTHS))
    parser.add_argument("--ranks", type=int, default=2, help="of the policy: FSDP2 where more than one")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--transport", default="auto", help="generator.vllm.weight_transport")
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"{args.ranks} ranks, {args.engines} engines; seconds")
    print("| megabytes | first sync | median of the others | longest of the others | MB/s |\n|---|---|---|---|---|")
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as scratch:
            num_bytes = save_model(Path(scratch), megabytes)
            first, *others = measure(
                Path(scratch), ranks=args.ranks, engines=args.engines, syncs=args.syncs, transport=args.transport
            )
            others = others or [first]
            middle = statistics.median(others)
            row = f"{num_bytes / 1e6:.0f} | {first:.2f} | {middle:.2f} | {max(others):.2f} | {num_bytes / 1e6 / middle:.0f}"
            print(f"| {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
