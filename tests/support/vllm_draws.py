"""The draws of a vLLM engine held to the probabilities that they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, VLLMConfig
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams

ARGUMENTS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}
"""With generators of its own vLLM breaks here ("CPU Generator does not use offset")."""
CONFIG = replace(Config(), generator=GeneratorConfig(vllm=VLLMConfig(max_num_seqs=64, engine_args=ARGUMENTS)))
PROMPT = tuple(5 + index % 50 for index in range(200))


def ask(engine: VLLMEngine, seeds: list[int], sampling: SamplingParams, *, name: str) -> list[GenerationOutput]:
    """One request a seed, all at once."""
    asked = [
        GenerationRequest(request_id=f"{name}-{n}", prompt_token_ids=PROMPT, sampling=sampling, seed=seed)
        for n, seed in enumerate(seeds)
    ]
    return [future.result(120) for future in [engine.submit(each) for each in asked]]


def check_draws(engine: VLLMEngine, truncation: dict[str, float], *, tolerance: float) -> None:
    """Chi-square of 3,000 first tokens, each with a seed of its own, against the trainer's model; `tolerance` is of a
    log-probability."""
    number, temperature = 3000, 2.0
    sampling = SamplingParams(max_generate_length=1, temperature=temperature, **truncation)  # type: ignore[arg-type]
    outputs = ask(engine, list(range(number)), sampling, name=f"draw-{truncation}")
    with torch.no_grad():
        logits = load_causal_lm(CONFIG.model, "cpu")(input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    probabilities, order = (logits / temperature).softmax(0).sort(descending=True)
    keeps = (probabilities.cumsum(0) - probabilities < truncation.get("top_p", 1.0)) & (
        probabilities >= truncation.get("min_p", 0.0) * probabilities[0]
    )
    keeps[int(truncation.get("top_k", len(keeps))) :] = False
    kept, expected = order[keeps], number * probabilities[keeps] / probabilities[keeps].sum()
    counts = torch.bincount(torch.tensor([output.token_ids[0] for output in outputs]), minlength=len(logits))[kept]
    assert counts.sum() == number, "nothing that is cut off is drawn"
    common = expected >= 5
    assert common.sum() > 4
    chi_square = float(((counts[common] - expected[common]) ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    print(f"\n{truncation}: chi-square {chi_square:.1f} at {freedom} degrees of freedom")
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    reported = logits.log_softmax(0)
    for output in outputs[:50]:
        assert output.logprobs[0] == pytest.approx(float(reported[output.token_ids[0]]), abs=tolerance), (
            "without the noise"
        )


def check_repetition(engine: VLLMEngine, later: Config) -> None:
    """Closes the engine; `later` is that of the one that is started after it."""
    sampling, seeds = SamplingParams(max_generate_length=24), list(range(30))
    together = [output.token_ids for output in ask(engine, seeds, sampling, name="together")]
    alone = [ask(engine, [seed], sampling, name=f"alone-{seed}")[0].token_ids for seed in seeds]
    assert together == alone
    assert len(set(together)) > len(seeds) / 2
    engine.close()
    resumed = VLLMEngine(engine_settings(later))
    try:
        assert [output.token_ids for output in ask(resumed, seeds[::-1], sampling, name="resumed")] == together[::-1]
    finally:
        resumed.close()
