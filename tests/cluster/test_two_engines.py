"""Rollouts over two real vLLM engines: routing by prefixes, and one of the two killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor

from skyrl_train.cluster.engine_group import EngineGroup, GroupEngine
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, VLLMConfig
from skyrl_train.data import load_prompts
from skyrl_train.inference import PrefixRouter
from skyrl_train.model import load_causal_lm, load_tokenizer
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationOutput, GenerationRequest, RolloutBatch, SamplingParams, Trajectory
from skyrl_train.weight_sync import DeviceSharing, RouteContext, SyncRecords, WeightSync
from skyrl_train.weight_sync.transports import auto
from skyrl_train.weights import stored_weights
from tests.support.ray_learners import SLOT, make_config
from tests.support.vllm_apart import moved

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

NUM_PROMPTS, NUM_SAMPLES = 8, 4
VERSION = 3


@dataclass
class Recording:
    """A router that remembers which engine it chose for which prompt."""

    router: PrefixRouter
    choices: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def choose(self, token_ids: Sequence[int], load: Sequence[int], alive: Collection[int]) -> int:
        engine = self.router.choose(token_ids, load, alive)
        self.choices.append((tuple(token_ids), engine))
        return engine

    def forget(self) -> None:
        self.router.forget()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Two engines with weights, behind a generator."""

    pool: GroupEngine
    generator: RolloutGenerator
    router: Recording
    updates: WeightSync
    sharing: DeviceSharing
    weights: Mapping[str, Tensor]
    """Of `VERSION`."""

    def make(self) -> RolloutBatch:
        """The same trajectories on every call: seeds are derived."""
        self.router.choices.clear()
        self.router.forget()
        return self.generator.generate(
            load_prompts(["builtin:word_problems/train"], limit=NUM_PROMPTS),
            n_samples_per_prompt=NUM_SAMPLES,
            sampling=SamplingParams(max_generate_length=64),
            global_step=1,
            purpose="train",
        )


@pytest.fixture(scope="module")
def rollouts(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    folder = tmp_path_factory.mktemp("engines")
    config: Config = replace(
        make_config(Path("unused")),
        model=Config().model,
        generator=GeneratorConfig(backend="vllm", vllm=VLLMConfig(num_engines=2)),
        output_dir=str(folder),
    )
    group = EngineGroup(
        "vllm", engine_settings(config), config.placement, session, [SLOT] * 2, num_threads=1, max_restarts=1
    )
    sharing = DeviceSharing(group.living, wait_ready=group.wait_ready)
    settings = RouteContext(files=folder / "weights", node_folder=folder, timeout_s=60.0)
    updates = WeightSync(group.for_update, auto, settings, sharing, SyncRecords(folder / "sync.jsonl"))
    pool = GroupEngine(group, sharing, updates, silence_timeout_s=60.0)
    weights = {name: each.detach() for name, each in load_causal_lm(config.model, "cpu").named_parameters()}
    updates.sync(stored_weights(weights), VERSION)
    pool._router = router = Recording(PrefixRouter(max_lead=32))  # type: ignore[assignment]
    generator = RolloutGenerator(pool, load_tokenizer(config.model), config.generator, EnvironmentConfig(), config.seed)
    yield Rollouts(pool=pool, generator=generator, router=router, updates=updates, sharing=sharing, weights=weights)
    generator.close()
    pool.close()


@pytest.fixture(scope="module")
def undisturbed(rollouts: Rollouts) -> tuple[RolloutBatch, list[tuple[tuple[int, ...], int]]]:
    """A batch, and which engine answered what."""
    batch = rollouts.make()
    return batch, list(rollouts.router.choices)


def test_samples_of_a_prompt_share_an_engine_and_prompts_share_both(
    undisturbed: tuple[RolloutBatch, list[tuple[tuple[int, ...], int]]],
) -> None:
    batch, choices = undisturbed
    firsts = {tuple(trajectory.prompt_token_ids(0).tolist()) for trajectory in batch.trajectories}
    engines_of = {first: {engine for prompt, engine in choices if prompt == first} for first in firsts}
    assert all(len(engines) == 1 for engines in engines_of.values())
    assert set().union(*engines_of.values()) == {0, 1}
    later = [
        engine in engines_of[first]
        for prompt, engine in choices
        for first in firsts
        if prompt != first and prompt[: len(first)] == first
    ]
    print(f"\n{sum(later)} of {len(later)} later turns went where their first was computed")
    assert sum(later) > 0.75 * len(later) > 0, (
        "blocks of 32 tokens: prompts that differ in their last tokens look alike"
    )


def responses(trajectory: Trajectory) -> list[list[int]]:
    return [turn.response_token_ids.tolist() for turn in trajectory.turns]


def test_one_of_two_engines_dies_and_every_trajectory_is_there_once_as_if_it_had_not(
    rollouts: Rollouts, undisturbed: tuple[RolloutBatch, list[tuple[tuple[int, ...], int]]]
) -> None:
    group = rollouts.pool.group
    victim = group.actors[0].identity
    assert victim is not None
    in_flight: list[int] = []

    def kill_it(done: int, total: int) -> None:
        if done >= 2 and not in_flight:
            in_flight.append(len(rollouts.pool._in_flight[0]))
            os.kill(victim.pid, signal.SIGKILL)

    rollouts.generator.on_progress = kill_it
    batch = rollouts.make()
    rollouts.generator.on_progress = None
    expected, before = undisturbed
    assert in_flight[0] > 0, "it should die over requests"
    print(
        f"\n{in_flight[0]} requests in flight on the engine that was killed; {len(rollouts.router.choices)} asked in all"
    )
    assert len(rollouts.router.choices) > len(before), "requests were asked again"
    keys = [(trajectory.prompt_uid, trajectory.sample_index) for trajectory in batch.trajectories]
    assert len(set(keys)) == NUM_PROMPTS * NUM_SAMPLES
    assert not any(trajectory.failed for trajectory in batch.trajectories)
    for found, wanted in zip(batch.trajectories, expected.trajectories):
        assert responses(found) == responses(wanted)
        assert {turn.weight_versions for turn in found.turns} == {((0, VERSION),)}
    deadline = time.monotonic() + 400
    while not all(group.alive) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert group.alive == [True, True], "it is started again, with the current weights"
    assert group.actors[0].identity != victim
    again = rollouts.make()
    assert {engine for _, engine in rollouts.router.choices} == {0, 1}
    assert [responses(t)[0] for t in again.trajectories] == [responses(t)[0] for t in expected.trajectories]
    assert {turn.weight_versions for t in again.trajectories for turn in t.turns} == {((0, VERSION),)}


def answers(rollouts: Rollouts, index: int, name: str) -> GenerationOutput:
    """What one engine says, asked by itself."""
    group = rollouts.pool.group
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(range(5, 45)),
        sampling=SamplingParams(max_generate_length=24),
        seed=7,
    )
    asked = group.workers([group.actors[index]]).begin_asking(EngineWorker.generate, "generate", request)
    (output,) = asked.wait()
    return output


def test_an_engine_whose_place_was_taken_while_the_policy_trained_joins_with_the_next_weights(
    rollouts: Rollouts,
) -> None:
    """It gets the weights before any request: until then the other engine serves alone, and from then on both say the
    same, of the next version."""
    group, updates = rollouts.pool.group, rollouts.updates
    victim = group.actors[1].identity
    assert victim is not None
    rollouts.sharing.models("policy", trains=True)
    before = answers(rollouts, 0, "before")
    rollouts.generator.on_progress = lambda done, _: os.kill(victim.pid, signal.SIGKILL) if done == 2 else None
    batch = rollouts.make()
    rollouts.generator.on_progress = None
    assert not any(trajectory.failed for trajectory in batch.trajectories)
    deadline = time.monotonic() + 400
    while not group.has_late and time.monotonic() < deadline:
        time.sleep(0.5)
    assert group.has_late, "it is started again, and waits: the weights of the last sync are nowhere any more"
    assert group.alive == [True, False]
    rollouts.make()
    assert {engine for _, engine in rollouts.router.choices} == {0}
    updates.sync(stored_weights(moved(rollouts.weights, 1)), VERSION + 1)
    assert group.alive == [True, True]
    assert group.actors[1].identity != victim
    first, second = (answers(rollouts, index, f"after-{index}") for index in (0, 1))
    assert first.weight_versions == second.weight_versions == ((0, VERSION + 1),)
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)
    assert (first.token_ids, first.logprobs) != (before.token_ids, before.logprobs), "the weights are others"
    again = rollouts.make()
    assert {engine for _, engine in rollouts.router.choices} == {0, 1}
    assert {turn.weight_versions for t in again.trajectories for turn in t.turns} == {((0, VERSION + 1),)}
    served = rollouts.pool.take_metrics()
    print(f"\nbalance of the two: {served['engines/balance']:.2f}")
    assert served["engines/serving"] == 2.0
