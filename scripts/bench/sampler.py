"""What a seed on each request costs vLLM: tokens per second with our sampler, with generators of vLLM's, and without seeds.

    python scripts/bench/sampler.py [--requests 256] [--tokens 32] [--vocabulary 32000] [--top-p 1.0] [--device cpu|cuda]

One engine with a random Qwen2 of two small layers, so that sampling is most of a step; prints a table. On a GPU vLLM's
runner V2 samples by seed and position itself, so that the first two rows are the same there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import harness
from update_work import ModelSize, save_model

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlatformConfig, VLLMConfig
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams

_REPETITIONS = 5


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as folder:
        # Its end-of-sequence token is as unlikely as any other.
        save_model(folder, ModelSize(64, 2, 2, 2, 128, arguments.vocabulary), max_position_embeddings=1024)
        table = harness.Table("seeds", "tokens per second, median", "slowest and fastest")
        for row in ("one a request, our sampler", "one a request, vLLM's generators", "none"):
            speeds = sorted(measure(row, folder, arguments))
            table.row(row, f"{statistics.median(speeds):.0f}", f"{speeds[0]:.0f} to {speeds[-1]:.0f}")


def measure(seeds: str, folder: str, arguments: argparse.Namespace) -> list[float]:
    """Tokens per second of each repetition; the first, which warms up, is left out."""
    config = replace(
        Config(),
        model=ModelConfig(path=folder, tokenizer_path=Config().model.path),
        platform=PlatformConfig(name="cpu" if arguments.device == "cpu" else "gpu", device=arguments.device),
        generator=GeneratorConfig(
            backend="vllm",
            max_context_length=256,
            seeds="engine" if seeds == "none" else "request",
            vllm=VLLMConfig(max_num_seqs=arguments.requests),
        ),
    )
    engine = VLLMEngine(engine_settings(config))
    if seeds.endswith("generators"):
        engine._thread.call(lambda core: setattr(core, "_is_keyed", False))
    sampling = SamplingParams(max_generate_length=arguments.tokens, top_p=arguments.top_p)
    speeds = []
    for repetition in range(_REPETITIONS + 1):
        started = time.perf_counter()
        futures = [
            engine.submit(
                GenerationRequest(
                    request_id=f"{repetition}-{n}",
                    prompt_token_ids=tuple(range(10, 42)),
                    sampling=sampling,
                    seed=repetition * arguments.requests + n,
                )
            )
            for n in range(arguments.requests)
        ]
        num_tokens = sum(len(future.result().token_ids) for future in futures)
        speeds.append(num_tokens / (time.perf_counter() - started))
    engine.close()
    return speeds[1:]


if __name__ == "__main__":
    harness.run(main)
