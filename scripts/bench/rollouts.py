"""Tokens a CPU second of rollouts: this package's engine, `transformers.generate` and vLLM, on the same prompts and lengths.

    python scripts/bench/rollouts.py
    python scripts/bench/rollouts.py --models tiny --engines ours,transformers --rounds 3

A wave is some prompts of several samples each. A response's length is drawn beforehand, long-tailed, and no engine may stop
sooner, so that all make the same tokens; only those are counted. `transformers.generate` gets the wave as one batch with
padding on the left, as TRL calls it, and computes each row until the longest ends. With two turns each response is followed
by an observation and a second response: this package's engine keeps what the first turn computed, vLLM looks it up in its
prefix cache, `transformers.generate` begins again.

Each measurement is a process of its own on one thread; engines take turns, and medians of CPU seconds are quoted after one
wave that is not counted. An engine that is not installed is left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from update_work import EOS, FIRST_TOKEN, PAD, SIZES, build_model  # noqa: E402

Wave = list[tuple[list[int], int]]
"""(prompt, tokens of its response)."""
Engine = Callable[[Wave], list[list[int]]]
"""The responses of a wave."""

SHAPES = {
    # name: prompts, samples, tokens of a prompt, median and most tokens of a response
    "short": (32, 8, (50, 90), 30, 120),
    "long answers": (8, 8, (50, 90), 250, 600),
    "long prompts": (8, 8, (500, 800), 60, 200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,mid")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--engines", default="ours,transformers,vllm")
    parser.add_argument("--turns", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help="JSON of one measurement, which is printed as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    engines = args.engines.split(",")
    print(f"{'model':6} {'shape':14} turns  " + "  ".join(f"{name:>24}" for name in engines))
    for model in args.models.split(","):
        for shape in args.shapes.split(","):
            for turns in map(int, args.turns.split(",")):
                _compare(engines, args.rounds, {"model": model, "shape": shape, "turns": turns})


def _compare(engines: Sequence[str], rounds: int, spec: dict[str, Any]) -> None:
    """Print one line of the table: tokens a CPU second, and how often the first engine makes as many."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    reasons: dict[str, str] = {}
    for _ in range(rounds):
        for name in engines:
            if name not in reasons:
                outcome = _apart({**spec, "engine": name})
                if isinstance(outcome, str):
                    reasons[name] = outcome
                else:
                    found[name].append(outcome["tokens"] / outcome["seconds"])
    rates = {name: statistics.median(values) for name, values in found.items() if values}
    first = rates.get(engines[0])
    cells = [
        reasons[name][:24]
        if name in reasons
        else f"{rates[name]:,.0f} tokens/s {first / rates[name]:5.1f}x"
        if first
        else f"{rates[name]:,.0f} tokens/s"
        for name in engines
    ]
    print(
        f"{spec['model']:6} {spec['shape']:14} {spec['turns']:5}  " + "  ".join(f"{cell:>24}" for cell in cells),
        flush=True,
    )


def _apart(spec: dict[str, Any]) -> dict[str, float] | str:
    """Measure in a process of its own, or say why it cannot be."""
    single = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **single, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, __file__, "--one", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    outcome: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcome


def measure(*, model: str, shape: str, turns: int, engine: str) -> dict[str, float]:
    """CPU seconds of a wave of every turn, after one that is not counted, and the tokens that were asked for."""
    import torch

    torch.set_num_threads(1)
    prompts, samples, prompt_tokens, median, most = SHAPES[shape]
    rng = random.Random(0)
    first: Wave = []
    for _ in range(prompts):
        prompt = _ids(rng, rng.randint(*prompt_tokens), SIZES[model].vocabulary)
        first += [(prompt, min(most, max(8, round(median * rng.lognormvariate(0, 0.7))))) for _ in range(samples)]
    generate = {"ours": _ours, "transformers": _transformers, "vllm": _vllm}[engine](model, first)
    for _ in range(2):
        rng, wave, tokens = random.Random(1), first, 0
        start = time.process_time()
        for turn in range(turns):
            responses = generate(wave)
            tokens += sum(map(len, responses))
            if turn + 1 < turns:
                wave = [
                    (prompt + response + _ids(rng, 12, SIZES[model].vocabulary), wanted)
                    for (prompt, wanted), response in zip(wave, responses)
                ]
        seconds = time.process_time() - start
    assert tokens == turns * sum(wanted for _, wanted in first), "an engine ended a response early"
    return {"seconds": seconds, "tokens": tokens}


def _ours(model: str, first: Wave) -> Engine:
    """This package's engine, as `generator=hf` runs it: sorted, in batches of at most 256."""
    from skyrl_train.inference import Decoder, use_grouped_attention
    from skyrl_train.types import GenerationRequest, SamplingParams

    loaded = build_model(SIZES[model]).eval().requires_grad_(False)
    use_grouped_attention(loaded)
    decoder = Decoder(loaded, eos_token_ids=frozenset(), pad_token_id=PAD, decode_text=lambda _: "")

    def generate(wave: Wave) -> list[list[int]]:
        if wave is first:
            decoder.forget()
        decoder.start_wave()
        found: list[list[int]] = [[] for _ in wave]
        places = sorted(range(len(wave)), key=lambda place: (len(wave[place][0]), place))
        for begin in range(0, len(places), 256):
            batch = places[begin : begin + 256]
            requests = [
                GenerationRequest(
                    request_id=str(place),
                    prompt_token_ids=tuple(wave[place][0]),
                    sampling=SamplingParams(temperature=1.0, max_generate_length=wave[place][1]),
                    seed=place,
                )
                for place in batch
            ]
            for place, response in zip(batch, decoder.run(requests)):
                found[place] = list(response.token_ids)
        return found

    return generate


def _transformers(model: str, first: Wave) -> Engine:  # noqa: ARG001
    import torch

    loaded = build_model(SIZES[model]).eval().requires_grad_(False)

    def generate(wave: Wave) -> list[list[int]]:
        width, longest = max(len(prompt) for prompt, _ in wave), max(wanted for _, wanted in wave)
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt, _ in wave])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in wave])
        with torch.inference_mode():
            out = loaded.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=PAD,
                eos_token_id=EOS,
            )
        return [row[:wanted] for row, (_, wanted) in zip(out[:, width:].tolist(), wave)]

    return generate


def _vllm(model: str, first: Wave) -> Engine:  # noqa: ARG001
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        build_model(SIZES[model]).save_pretrained(folder)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=256,
            enable_prefix_caching=True,
            enforce_eager=True,
            kv_cache_memory_bytes=4 * 2**30,
            disable_log_stats=True,
        )

    def generate(wave: Wave) -> list[list[int]]:
        sampling = [
            SamplingParams(max_tokens=wanted, ignore_eos=True, detokenize=False, logprobs=0) for _, wanted in wave
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in wave]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]

    return generate


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]


if __name__ == "__main__":
    main()
