"""Tokens a CPU second of rollouts: this package's engine, `transformers.generate` and vLLM, on the same prompts and lengths.

    python scripts/bench/rollouts.py
    python scripts/bench/rollouts.py --models tiny --engines ours,transformers --rounds 3
    python scripts/bench/rollouts.py --models builtin:tiny_qwen2,FOLDER --shapes bound --engines ours --turns 1

A wave is some prompts of several samples each. A response's length is drawn beforehand, long-tailed, and no engine may stop
sooner, so that all make the same tokens; only those are counted. `transformers.generate` gets the wave as one batch with
padding on the left, as TRL calls it, and computes each row until the longest ends. With two turns each response is followed
by an observation and a second response: this package's engine keeps what the first turn computed, vLLM looks it up in its
prefix cache, `transformers.generate` begins again.

Each measurement is a process of its own on one thread; engines take turns, and medians of CPU seconds are quoted after one
wave that is not counted. Of the first turn the share of the least time is told (`rollouts_bound.py`); one above 1 is an
error and the exit status 1. `--shapes bound` are the eight shapes that shares were agreed on before anything was tuned. An
engine that is not installed is left out with the reason.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product

import core_rates
import harness
from rollouts_bound import cache_bytes, least_s
from update_work import EOS, FIRST_TOKEN, PAD, build_model, size_of

Wave = list[tuple[list[int], int]]
"""(prompt, tokens of its response)."""
Engine = Callable[[Wave], list[list[int]]]
"""The responses of a wave."""

SINGLE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""One process, one thread."""
SHAPES = {
    # name: prompts, samples, tokens of a prompt, median and most tokens of a response
    "short": (32, 8, (50, 90), 30, 120),
    "long answers": (8, 8, (50, 90), 250, 600),
    "long prompts": (8, 8, (500, 800), 60, 200),
}
BOUND_SHAPES = {
    f"{prompts}x{samples}, p{prompt}, a{answer}": (prompts, samples, (prompt, prompt), answer, answer)
    for (prompts, samples), prompt, answer in product(((4, 8), (1, 16)), (100, 700), (40, 500))
}
"""Shapes that shares of the bound are told of; answers are long-tailed and at most so long."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", default="tiny,mid")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--engines", default="ours,transformers,vllm")
    parser.add_argument("--turns", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help="JSON of one measurement, which is printed as JSON")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    engines, above = args.engines.split(","), list[str]()
    shapes = list(BOUND_SHAPES) if args.shapes == "bound" else args.shapes.split(";" if ";" in args.shapes else ",")
    rates = core_rates.measured_now()
    print(f"core now: {rates.line()}; load {os.getloadavg()[0]:.1f}", flush=True)
    table = harness.Table("model", "shape", "turns", *engines)
    for model, shape, turns in product(args.models.split(","), shapes, map(int, args.turns.split(","))):
        spec = {"model": model, "shape": shape, "turns": turns}

        def rate(engine: str, _: int, spec: dict[str, object] = spec) -> float:
            words = [__file__, "--one", json.dumps({**spec, "engine": engine})]
            one = harness.answer(harness.apart(words, deadline_s=1800.0, **SINGLE))
            return float(one["tokens"] / one["seconds"])

        found, failed = harness.in_turns(engines, range(args.rounds), rate)
        speeds = {name: statistics.median(values) for name, values in found.items()}
        first = speeds.get(engines[0])
        times = {name: f" {first / each:.1f}x" if first else "" for name, each in speeds.items()}
        wave, rates = first_wave(model, shape), core_rates.measured_now()
        least = least_s(wave, size_of(model), rates, cache_bytes())
        most = sum(wanted for _, wanted in wave) / least
        shares = {name: f", {each / most:.0%} of the bound" if turns == 1 else "" for name, each in speeds.items()}
        above += [f"{model}, {shape}, {name}" for name, each in speeds.items() if turns == 1 and each > most]
        cells = [
            failed[name][:24] if name in failed else f"{speeds[name]:,.0f} tokens/s{times[name]}{shares[name]}"
            for name in engines
        ]
        table.row(model, shape, turns, *cells)
    if above:
        raise SystemExit(f"above the bound, so that the count or the rates are wrong: {'; '.join(above)}")


def measure(*, model: str, shape: str, turns: int, engine: str) -> dict[str, float]:
    """CPU seconds of a wave of every turn, after one that is not counted, and the tokens that were asked for."""
    import torch

    torch.set_num_threads(1)
    first = first_wave(model, shape)
    generate = {"ours": _ours, "transformers": _transformers, "vllm": _vllm}[engine](model, first)
    for _ in range(2):
        rng, wave, tokens = random.Random(1), first, 0
        start = time.process_time()
        for turn in range(turns):
            responses = generate(wave)
            tokens += sum(map(len, responses))
            if turn + 1 < turns:
                wave = [
                    (prompt + response + _ids(rng, 12, size_of(model).vocabulary), wanted)
                    for (prompt, wanted), response in zip(wave, responses)
                ]
        seconds = time.process_time() - start
    assert tokens == turns * sum(wanted for _, wanted in first), "an engine ended a response early"
    return {"seconds": seconds, "tokens": tokens}


def first_wave(model: str, shape: str) -> Wave:
    """Return what is asked in the first turn; the same in every process."""
    prompts, samples, prompt_tokens, median, most = {**SHAPES, **BOUND_SHAPES}[shape]
    rng = random.Random(0)
    first: Wave = []
    for _ in range(prompts):
        prompt = _ids(rng, rng.randint(*prompt_tokens), size_of(model).vocabulary)
        first += [(prompt, min(most, max(8, round(median * rng.lognormvariate(0, 0.7))))) for _ in range(samples)]
    return first


def _ours(model: str, first: Wave) -> Engine:
    """This package's engine, as `generator=hf` runs it: sorted, in batches of at most 256."""
    from skyrl_train.inference import Decoder, use_grouped_attention
    from skyrl_train.types import GenerationRequest, SamplingParams

    loaded = build_model(size_of(model)).eval().requires_grad_(False)
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

    loaded = build_model(size_of(model)).eval().requires_grad_(False)

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
        build_model(size_of(model)).save_pretrained(folder)
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
    harness.run(main)
