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
from dataclasses import replace
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlatformConfig, VLLMConfig
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams

_REPETITIONS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as folder:
        save_model(Path(folder), arguments.vocabulary)
        print("| seeds | tokens per second, median | slowest and fastest |\n|---|---|---|")
        for row in ("one a request, our sampler", "one a request, vLLM's generators", "none"):
            speeds = sorted(measure(row, Path(folder), arguments))
            print(f"| {row} | {statistics.median(speeds):.0f} | {speeds[0]:.0f} to {speeds[-1]:.0f} |", flush=True)


def save_model(folder: Path, vocabulary: int) -> None:
    """A random model whose end-of-sequence token is as unlikely as any other."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def measure(seeds: str, folder: Path, arguments: argparse.Namespace) -> list[float]:
    """Tokens per second of each repetition; the first, which warms up, is left out."""
    config = replace(
        Config(),
        model=ModelConfig(path=str(folder), tokenizer_path=Config().model.path),
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
    main()
