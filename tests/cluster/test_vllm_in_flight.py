"""A real vLLM engine that takes new weights under running requests, whose keys and values it keeps or computes again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.support.command_runs import RAY, exported, records, relative_difference, run_command
from tests.support.stream_checks import check_each_prompt_once, check_versions, journal
from tests.support.vllm_apart import CONFIG, endless, moved, settings_apart
from tests.support.weight_cases import in_buckets

pytestmark = pytest.mark.cluster

Cache = Literal["recompute", "keep"]
PROMPT = tuple(5 + index % 50 for index in range(200))
"""More than one block of the prefix cache (128 tokens)."""
NUM_REQUESTS, NUM_TOKENS = 3, 300
TOLERANCE = 2e-4
__all__ = ["endless"]


@pytest.fixture(scope="module", params=[pytest.param("recompute", marks=pytest.mark.nightly), "keep"])
def cache(request: pytest.FixtureRequest) -> Cache:
    chosen: Cache = request.param
    return chosen


@pytest.fixture(scope="module")
def engine(cache: Cache) -> Iterator[VLLMEngine]:
    opened = VLLMEngine(replace(settings_apart(), in_flight_cache=cache, awaits_weights=True))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Of versions 0, 1, ..."""
    made = [load_causal_lm(CONFIG.model, "cpu") for _ in range(4)]
    first = {name: parameter.detach().clone() for name, parameter in made[0].named_parameters()}
    for version, model in enumerate(made):
        model.load_state_dict(moved(first, version), strict=False)
        model.tie_weights()
    return made


def sync(engine: VLLMEngine, version: int, models: Sequence[PreTrainedModel]) -> None:
    weights = dict(models[version].named_parameters())
    engine.begin_update()
    for bucket in in_buckets((name, tensor.detach()) for name, tensor in weights.items()):
        engine.update(bucket)
    assert engine.finish_update(version, len(weights)) == version


def asked(name: str, seed: int, num_tokens: int = NUM_TOKENS) -> GenerationRequest:
    sampling = SamplingParams(max_generate_length=num_tokens)
    return GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, seed=seed)


def wait_for_tokens(engine: VLLMEngine, number: int) -> None:
    """Until all requests run, and have so many."""
    ends = time.monotonic() + 120
    while sum(len(each.token_ids) >= number for each in list(engine._thread.core._requests.values())) < NUM_REQUESTS:
        assert time.monotonic() < ends
        time.sleep(0.005)


def versions_of(output: GenerationOutput) -> list[int]:
    ends = [*(run.start for run in output.weight_versions[1:]), len(output.token_ids)]
    return [run.version for run, end in zip(output.weight_versions, ends) for _ in range(run.start, end)]


@torch.inference_mode()
def recomputed(models: Sequence[PreTrainedModel], output: GenerationOutput) -> list[float]:
    """By one forward of each version over the whole sequence."""
    ids = torch.tensor([[*PROMPT, *output.token_ids]])
    scores = {version: models[version](ids).logits[0].log_softmax(-1) for version in set(versions_of(output))}
    first = len(PROMPT) - 1
    return [
        float(scores[version][first + index, token])
        for index, (version, token) in enumerate(zip(versions_of(output), output.token_ids))
    ]


@torch.inference_mode()
def kept(models: Sequence[PreTrainedModel], output: GenerationOutput) -> list[float]:
    """Token by token, each by its version, with the keys and values that the versions before it left."""
    cache, found, fresh = DynamicCache(), [], list(PROMPT)
    for version, token in zip(versions_of(output), output.token_ids):
        logits = models[version](torch.tensor([fresh]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(float(logits.log_softmax(-1)[token]))
        fresh = [token]
    return found


def difference(output: GenerationOutput, expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(output.logprobs, expected, strict=True))


def test_running_requests_go_on_and_further_ones_find_nothing_of_older_weights(
    engine: VLLMEngine, endless: None, cache: Cache, models: list[PreTrainedModel]
) -> None:
    early = engine.submit(asked("before-there-are-weights", 9, 4))
    time.sleep(0.5)
    assert not early.done()
    sync(engine, 0, models)
    assert early.result(60).weight_versions == ((0, 0),)
    futures = [engine.submit(asked(f"long-{seed}", seed)) for seed in range(NUM_REQUESTS)]
    for version in (1, 2):
        wait_for_tokens(engine, 80 * version)
        sync(engine, version, models)
    late = engine.submit(asked("late", 3, 40)).result(120)
    assert not any(future.done() for future in futures), "they run beside the one that begins with the same prompt"
    outputs = [future.result(120) for future in futures]
    reference, other = (recomputed, kept) if cache == "recompute" else (kept, recomputed)
    for output in outputs:
        assert [run.version for run in output.weight_versions] == [0, 1, 2]
        assert len(output.token_ids) == NUM_TOKENS
        assert difference(output, reference(models, output)) < TOLERANCE
        assert difference(output, other(models, output)) > 0.01
    assert late.weight_versions == ((0, 2),)
    assert difference(late, recomputed(models, late)) < TOLERANCE


def test_the_prefix_cache_serves_requests_of_one_version(
    engine: VLLMEngine, endless: None, models: list[PreTrainedModel]
) -> None:
    sync(engine, 3, models)
    first, second = (engine.submit(asked(f"same-{seed}", seed, 4)).result(60) for seed in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)


@pytest.mark.nightly
def test_a_request_that_waits_for_its_turn_is_of_the_weights_that_it_begins_with(
    endless: None, models: list[PreTrainedModel]
) -> None:
    """Its prompt is that of a request whose blocks are kept, and which was there when it came."""
    settings = settings_apart()
    vllm = replace(settings.generator.vllm, max_num_seqs=1)
    generator = replace(settings.generator, vllm=vllm)
    one_at_a_time = replace(settings, in_flight_cache="keep", generator=generator)
    engine = VLLMEngine(one_at_a_time)
    try:
        sync(engine, 0, models)
        running, waiting = engine.submit(asked("running", 0, 100)), engine.submit(asked("waiting", 1, 20))
        while not any(each.token_ids for each in list(engine._thread.core._requests.values())):
            time.sleep(0.005)
        sync(engine, 1, models)
        assert [run.version for run in running.result(60).weight_versions] == [0, 1]
        output = waiting.result(60)
        assert output.weight_versions == ((0, 1),)
        assert difference(output, recomputed(models, output)) < TOLERANCE
    finally:
        engine.close()


RUN = (
    *("+experiment=gsm8k_multiturn", "platform=cpu", "generator=vllm", "data.validation=[]"),
    *("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "trainer.critic_mini_batch_size=8"),
    *("generator.n_samples_per_prompt=4", "trainer.policy.optimizer.lr=1e-3"),
)
IN_FLIGHT = ("trainer.max_staleness=1", "trainer.in_flight_updates=true", "generator.vllm.max_num_seqs=2")
"""An engine that computes two responses at a time has some under way at each sync."""


def check_shares(folder: Path) -> list[float]:
    """Some trained tokens are behind an update of their turn. Return the largest distance to the trainer, of each step."""
    found = [record for record in records(folder) if record["step"]]
    shares = [record.get("off_policy/in_flight/share", 0.0) for record in found]
    distances = [record.get("off_policy/in_flight/cache_distance_max", 0.0) for record in found]
    print(f"\nshares {shares}, distances {distances}", end=" ")
    assert max(shares) > 0
    return distances


@pytest.mark.nightly
@pytest.mark.parametrize("placement", ["inline", "ray"])
def test_a_run_trains_on_responses_of_several_versions(tmp_path: Path, placement: str) -> None:
    """Where their keys and values are computed again, the engine's log-probabilities are those of the versions that it
    names."""
    where = RAY if placement == "ray" else ("placement=inline",)
    run_command(tmp_path, *RUN, *IN_FLIGHT, "trainer.total_steps=4", *where)
    assert max(check_shares(tmp_path)) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("placement", ["inline", "ray"])
def test_a_whole_run_goes_on_with_kept_keys_and_values_and_is_replayed_to_the_bit(
    tmp_path: Path, placement: str
) -> None:
    folder, steps = tmp_path / "run", 6
    where = RAY if placement == "ray" else ("placement=inline",)
    sizes = (f"trainer.total_steps={steps}", "trainer.ckpt_interval=0")
    run_command(folder, *RUN, *IN_FLIGHT, *sizes, "trainer.in_flight_cache=keep", *where)
    assert max(check_shares(folder)) > TOLERANCE, "what is sampled with older keys and values is of no model alone"
    check_each_prompt_once(folder, num_steps=steps)
    check_versions(folder, max_staleness=1)
    runs = [len(line["versions"]) for line in journal(folder) if "turn" in line]
    print(f"{sum(count > 1 for count in runs)} of {len(runs)} turns of several versions", end=" ")
    replayed = tmp_path / "replayed"
    recording = ("generator=replay", f"generator.replay_path={folder / 'rollouts'}")
    run_command(replayed, *RUN, *sizes, *recording)
    assert relative_difference(exported(replayed), exported(folder)) == 0.0
