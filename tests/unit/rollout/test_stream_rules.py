"""What a stream discards and why: equal rewards, failures, what is too many; and samples beside those of a group."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms import SamplingState, sample_dynamically
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig
from skyrl_train.config.data import CurriculumConfig, EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.data import Curriculum
from skyrl_train.errors import DataError, EngineError
from skyrl_train.rollout.admission import ConsumedPrompts
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.stream.replay import ReplayGenerator
from skyrl_train.rollout.stream.stream import RolloutStream, Taken, distinct, rollouts_of
from skyrl_train.types import GenerationRequest, Prompt, SamplingParams
from tests.support.fake_environments import FakeEnvironment, done_with
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer
from tests.support.fakes_trainer import make_trajectory, make_turn

TOKENIZER = make_tokenizer()
BATCH, SAMPLES = 2, 2
FILTER = FilterConfig(dynamic_sampling="filter", dynamic_sampling_max_batches=4)
REPLACE = FilterConfig(dynamic_sampling="replace", dynamic_sampling_max_batches=4, replace_min_share=0.5)


class GradedEnvironment(FakeEnvironment):
    """The reward is the number that the answer ends with."""

    def step(self, action: str) -> Any:
        return done_with(float(action.split()[-1]))


def says(number: int) -> list[int]:
    return [*TOKENIZER.encode(f"#### {number}"), 3]


def place(request: GenerationRequest) -> tuple[int, int]:
    """The prompt's ordinal and the sample's number."""
    _, ordinal, _, sample, _ = request.request_id.split("-")
    return int(ordinal), int(sample)


@pytest.fixture(autouse=True)
def fresh_environments() -> Iterator[None]:
    FakeEnvironment.reset()
    yield
    FakeEnvironment.release.set()


Answer = Callable[[GenerationRequest], Any]
Start = Callable[..., tuple[RolloutStream, FakeEngine]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A stream that has begun at `version`, and its engine. All of a test's share one journal."""
    made: list[tuple[RolloutStream, RolloutGenerator]] = []

    def begin(answer: Answer, *, version: int = 0, prompts: list[Prompt] | None = None, **changes: Any) -> Any:
        for stream, _ in made:
            stream.close()
        engine = FakeEngine(answer)
        environment = EnvironmentConfig(
            env_class="test_stream_rules:GradedEnvironment", step_timeout_s=5.0, isolation="thread"
        )
        generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(), environment, 0)
        curriculum, settled = changes.pop("curriculum", None), changes.pop("settled", None) or ConsumedPrompts()
        max_failed_fraction = changes.pop("max_failed_fraction", 0.0)
        of_algorithm = {name: changes.pop(name) for name in ("filters", "advantage_estimator") if name in changes}
        algorithm = AlgorithmConfig(**of_algorithm)
        known = make_prompts(100) if prompts is None else prompts
        journal = Journal(tmp_path / "journal.jsonl", prompts="p")
        stream = RolloutStream(
            generator,
            lambda position: known[position * BATCH : (position + 1) * BATCH],
            TrainerConfig(train_batch_size=BATCH, max_staleness=1, algorithm=algorithm, **changes),
            journal,
            total_batches=3,
            n_samples_per_prompt=SAMPLES,
            sampling=SamplingParams(),
            max_failed_fraction=max_failed_fraction,
            curriculum=curriculum,
        )
        made.append((stream, generator))
        stream.begin(version=version, settled=settled)
        return stream, engine

    yield begin
    for stream, generator in made:
        stream.close()
        generator.close()


def take_all(stream: RolloutStream, *, version: int = 0) -> list[Taken]:
    found = []
    for number in range(version, 3):
        found.append(stream.take())
        stream.publish(number + 1)
    return found


def uids(taken: Taken) -> list[str]:
    return [prompt.uid for prompt in taken.rollouts.prompts]


def odd_ones_differ(request: GenerationRequest) -> list[int]:
    """The samples of prompts 0, 2, 4, ... have equal rewards."""
    ordinal, sample = place(request)
    return says(sample if ordinal % 2 else 1)


def test_a_group_of_equal_rewards_is_dropped_and_another_begins_in_its_place(start: Start) -> None:
    taken = take_all(start(odd_ones_differ, filters=FILTER)[0])
    trained = [uid for batch in taken for uid in uids(batch)]
    assert len(set(trained)) == 3 * BATCH
    assert all(int(uid[1:]) % 2 for uid in trained)
    settled = taken[-1].settled
    assert {f"p{ordinal}" for ordinal in (*range(settled.watermark), *settled.beyond)} >= {*trained}
    everything = Counter(prompt.uid for batch in taken for prompt in batch.everything.prompts)
    assert set(everything.values()) == {1}
    assert len(everything) == settled.watermark + len(settled.beyond)
    dropped = sum(batch.metrics.get("stream/dropped_filtered", 0.0) for batch in taken)
    assert dropped == len(everything) - 3 * BATCH > 0


def test_rewards_are_compared_as_they_are_trained_on(start: Start) -> None:
    """1 and 2 are one reward where rewards end at 1."""
    filters = replace(FILTER, reward_clip_high=1.0)

    def answer(request: GenerationRequest) -> list[int]:
        ordinal, sample = place(request)
        return says(sample + (1 if ordinal < 4 else 0))

    taken = start(answer, filters=filters)[0].take()
    assert all(int(uid[1:]) >= 4 for uid in uids(taken))


def test_where_every_group_is_filtered_the_run_ends_and_does_not_wait(start: Start) -> None:
    stream, engine = start(lambda _: says(1), filters=FILTER)
    with pytest.raises(
        DataError, match=r"of (8|9|1[01]) prompts that were sampled for a batch, 0 .* where 2 are needed"
    ):
        stream.take()
    assert len({place(request)[0] for request in engine.requests}) < 8 + 4


def test_an_engine_that_always_fails_ends_the_run_and_is_not_asked_for_ever(start: Start) -> None:
    stream, _ = start(lambda _: EngineError("no memory"), filters=FILTER)
    with pytest.raises(EngineError, match=r"no memory"):
        stream.take()


def test_a_group_that_failed_is_told_from_one_of_equal_rewards(start: Start) -> None:
    def answer(request: GenerationRequest) -> Any:
        ordinal, sample = place(request)
        return EngineError("no memory") if ordinal == 0 else says(sample)

    taken = take_all(start(answer, filters=FILTER, max_failed_fraction=0.9)[0])
    assert sum(batch.metrics.get("stream/dropped_failed", 0.0) for batch in taken) == 1.0
    assert sum(trajectory.failed for batch in taken for trajectory in batch.everything.trajectories) == SAMPLES


def three_differ_of_eight(request: GenerationRequest) -> list[int]:
    """Only the samples of prompts 3, 4, 5, 11, 12, 13, ... have different rewards: with batches of two, 0 and 1 are
    rejected, and 3 has a copy in the place of 2."""
    ordinal, sample = place(request)
    return says(sample if ordinal % 8 in (3, 4, 5) else 1)


def test_copies_stand_where_the_serial_loop_has_them(start: Start) -> None:
    """Of the same groups: batches that the serial loop rejects are rejected, and the others have the same trajectories."""
    taken = take_all(start(three_differ_of_eight, filters=REPLACE, take_groups="in_order")[0])
    made = {}
    for batch in taken:
        every = batch.everything
        for index, prompt in enumerate(every.prompts):
            made[int(prompt.uid[1:])] = prompt, every.trajectories[index * SAMPLES : (index + 1) * SAMPLES]
    assert sorted(made) == list(range(12)), "each prompt once, in batches of two that were rejected or not"
    serial, state = [], SamplingState()
    for first in range(0, 12, BATCH):
        generated = rollouts_of([made[ordinal] for ordinal in range(first, first + BATCH)], SAMPLES)
        sampled = sample_dynamically(state, generated, num_prompts=BATCH, config=REPLACE)
        state = sampled.state
        serial += [] if sampled.rollouts is None else [sampled.rollouts]
    assert [[one.turns for one in batch.rollouts.trajectories] for batch in taken] == [
        [one.turns for one in batch.trajectories] for batch in serial
    ]
    assert [sorted(uids(batch)) for batch in taken] == [["p3", "p3#copy1"], ["p4", "p5"], ["p11", "p11#copy1"]]
    assert [batch.metrics.get("stream/copies") for batch in taken] == [1.0, None, 1.0]
    assert [batch.metrics.get("stream/dropped_filtered") for batch in taken] == [3.0, None, 5.0]
    assert {trajectory.prompt_uid for trajectory in taken[0].rollouts.trajectories} == {"p3", "p3#copy1"}


def test_where_too_few_differ_in_each_batch_the_run_ends_and_names_the_share(start: Start) -> None:
    stream, engine = start(lambda _: says(1), filters=REPLACE)
    with pytest.raises(DataError, match=r"4 times 2 prompts sampled .* fewer than .*replace_min_share=0\.5 of them"):
        stream.take()
    assert len({place(request)[0] for request in engine.requests}) <= 8 + 2


def test_a_group_all_of_whose_samples_failed_has_a_copy_in_its_place(start: Start) -> None:
    def answer(request: GenerationRequest) -> Any:
        ordinal, sample = place(request)
        return EngineError("no memory") if ordinal == 0 else says(sample)

    taken = take_all(start(answer, filters=REPLACE, take_groups="in_order", max_failed_fraction=0.9)[0])
    assert sorted(uids(taken[0])) == ["p1", "p1#copy1"]
    assert taken[0].metrics["stream/dropped_failed"] == 1.0
    assert not any(one.failed for one in taken[0].rollouts.trajectories)


def test_what_was_rejected_before_a_kill_is_not_made_again(start: Start, tmp_path: Path) -> None:
    """The journal ends before the first batch: with the groups of a batch that was rejected."""
    path = tmp_path / "journal.jsonl"
    stream, _ = start(three_differ_of_eight, filters=REPLACE)
    first = take_all(stream)
    stream.close()
    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if line.startswith(b'{"batch": 0'))
    path.write_bytes(b"".join(lines[:cut]))
    known = {json.loads(line)["turn"] for line in lines[:cut] if line.startswith(b'{"turn"')}
    stream, after = start(three_differ_of_eight, filters=REPLACE)
    again = take_all(stream)
    assert known
    assert not known & {request.request_id for request in after.requests}
    for taken in (first, again):
        everything = Counter(prompt.uid for batch in taken for prompt in batch.everything.prompts)
        assert set(everything.values()) == {1}
        settled = taken[-1].settled
        assert sorted(everything) == sorted(f"p{each}" for each in (*range(settled.watermark), *settled.beyond))
        trained = [uid for batch in taken for uid in uids(batch)]
        assert len(set(trained)) == 3 * BATCH
        assert {int(uid[1:].partition("#")[0]) % 8 for uid in trained} <= {3, 4, 5}


def test_a_journal_with_copies_is_replayed_as_it_was_trained_on(start: Start, tmp_path: Path) -> None:
    stream, _ = start(three_differ_of_eight, filters=REPLACE)
    taken = take_all(stream)
    stream.close()
    recorded = ReplayGenerator(tmp_path / "journal.jsonl")
    for step, batch in enumerate(taken, start=1):
        prompts = recorded.prompts_for_step(step)
        found = recorded.generate(
            prompts, n_samples_per_prompt=SAMPLES, sampling=SamplingParams(), global_step=step, purpose="train"
        )
        assert [prompt.uid for prompt in prompts] == uids(batch)
        assert found.trajectories == batch.rollouts.trajectories


def test_what_was_discarded_is_not_made_again_and_is_told_the_same(start: Start, tmp_path: Path) -> None:
    stream, _ = start(odd_ones_differ, filters=FILTER)
    first = [stream.take()]
    stream.publish(1)
    first.append(stream.take())
    stream.close()
    known = set(re.findall(r'\{"turn": "([^"]+)"', (tmp_path / "journal.jsonl").read_text()))
    stream, after = start(odd_ones_differ, filters=FILTER)
    again = take_all(stream)
    for one, other in zip(first, again):
        assert other.rollouts == one.rollouts
        assert other.everything == one.everything
        assert other.settled == one.settled
    assert known
    assert not known & {request.request_id for request in after.requests}
    assert len({uid for batch in again for uid in uids(batch)}) == 3 * BATCH


def test_a_greedy_sample_of_each_prompt_is_its_groups_baseline(start: Start) -> None:
    def answer(request: GenerationRequest) -> list[int]:
        return says(place(request)[1] if request.sampling.temperature else 5)

    stream, engine = start(answer, advantage_estimator="remax", filters=FilterConfig(reward_clip_high=4.0))
    taken = stream.take()
    assert [one.reward for one in taken.rollouts.trajectories] == [0.0, 1.0] * BATCH
    # Shaped as the others will be: 5 is bounded by 4.
    assert [one.greedy_reward for one in taken.rollouts.trajectories] == [4.0] * SAMPLES * BATCH
    stream.close()
    greedy = [request for request in engine.requests if request.sampling.temperature == 0]
    assert len(greedy) == len({place(request)[0] for request in engine.requests})
    stream, engine = start(answer, advantage_estimator="remax", filters=FilterConfig(reward_clip_high=4.0))
    assert stream.take().rollouts == taken.rollouts
    assert not {place(request)[0] for request in engine.requests} & {0, 1, 2, 3}


def test_where_the_greedy_sample_fails_its_group_does(start: Start) -> None:
    def answer(request: GenerationRequest) -> Any:
        return says(1) if request.sampling.temperature else EngineError("no memory")

    stream, _ = start(answer, advantage_estimator="remax")
    with pytest.raises(EngineError, match=r"4 of 4 .*\n.*the greedy sample of its prompt failed: .*no memory"):
        stream.take()


def test_long_answers_are_surplus_where_the_first_to_finish_are_taken(start: Start) -> None:
    """Prompts 0 and 1 hang until the second batch closes; 2, 3, ... are short."""
    prompts = make_prompts(100)
    for index in (0, 1):
        prompts[index] = replace(prompts[index], extras={"hang_in": "init"})
    stream, _ = start(lambda _: says(1), oversample=1.5, stale_groups="drop", prompts=prompts)
    taken = [stream.take()]
    stream.publish(1)
    taken.append(stream.take())
    metrics = taken[1].metrics
    assert metrics["stream/dropped_stale"] == 2.0
    assert metrics["timing/group/dropped"] > 0
    assert metrics["timing/group/taken"] > 0
    assert not {"p0", "p1"} & {uid for batch in taken for uid in uids(batch)}


def test_what_is_too_many_is_told_with_its_length(start: Start) -> None:
    def answer(request: GenerationRequest) -> list[int]:
        return says(1)[:-1] * (1 if place(request)[0] < 4 else 3) + [3]

    stream, engine = start(answer, oversample=2.0, take_groups="in_order")
    taken = [stream.take()]
    while len(engine.requests) < 8 * SAMPLES:
        FakeEnvironment.release.wait(0.01)
    stream.publish(1)
    taken.append(stream.take())
    assert [uids(batch) for batch in taken] == [["p0", "p1"], ["p2", "p3"]]
    length = len(says(1))
    dropped = {name: value for name, value in taken[1].metrics.items() if "dropped" in name and "stream" in name}
    assert sum(dropped.values()) == 4.0
    assert taken[1].metrics["stream/response_length/taken"] == length
    assert taken[1].metrics["stream/response_length/surplus"] == 3 * length - 2


RULES: dict[str, dict[str, Any]] = {
    "filtered, with greedy samples": {"filters": FILTER, "advantage_estimator": "remax"},
    "oversampled": {"oversample": 2.0, "stale_groups": "drop"},
    "replaced": {"filters": REPLACE},
    "replaced, in order, with greedy samples": {
        "filters": REPLACE,
        "take_groups": "in_order",
        "advantage_estimator": "remax",
    },
    "oversampled in order and filtered": {"oversample": 2.0, "take_groups": "in_order", "filters": FILTER},
}


def check_crash_at(cut: int, rules: dict[str, Any], before: list[Taken], path: Path, start: Start) -> None:
    """A run finds a prefix of the journal and goes on from a checkpoint that it can have had."""
    content = path.read_bytes()[:cut]
    lines = [json.loads(line) for line in content.split(b"\n")[:-1]]
    num_batches = sum("batch" in line for line in lines)
    version = random.Random(cut).randint(0, num_batches)
    path.write_bytes(content)
    settled = before[version - 1].settled if version else ConsumedPrompts()
    stream, engine = start(odd_ones_differ, version=version, settled=settled, **rules)
    after = take_all(stream, version=version)
    stream.close()
    for number in range(version, num_batches):
        again, first = after[number - version], before[number]
        assert (again.rollouts, again.everything, again.settled) == (first.rollouts, first.everything, first.settled)
    asked = [request.request_id for request in engine.requests]
    assert len(set(asked)) == len(asked)
    assert not set(asked) & {line["turn"] for line in lines if "turn" in line}, "a turn that finished is made again"
    trained = Counter(uid for batch in (*before[:version], *after) for uid in uids(batch))
    assert len(trained) == sum(trained.values()) == 3 * BATCH
    dropped = [
        f"p{ordinal}" for line in map(json.loads, path.read_bytes().splitlines()) for ordinal in line.get("dropped", {})
    ]
    last = after[-1].settled if after else settled
    known = [f"p{ordinal}" for ordinal in (*range(last.watermark), *last.beyond)]
    assert sorted([*(uid for uid in trained if "#copy" not in uid), *dropped]) == sorted(known), (
        "each prompt is trained on or dropped, once"
    )


def crash(rules: dict[str, Any], folder: Path, start: Start, count: int) -> None:
    stream, _ = start(odd_ones_differ, **rules)
    before, path = take_all(stream), folder / "journal.jsonl"
    stream.close()
    content = path.read_bytes()
    for cut in random.Random(0).sample(range(len(content) + 1), count):
        path.write_bytes(content)
        check_crash_at(cut, rules, before, path, start)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_what_is_discarded_is_settled_once_wherever_a_run_is_killed(
    start: Start, tmp_path: Path, rules: dict[str, Any]
) -> None:
    crash(rules, tmp_path, start, 6)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_100_crash_points_of_each_rule(start: Start, tmp_path: Path, rules: dict[str, Any]) -> None:
    crash(rules, tmp_path, start, 100)


def make_curriculum(count: int) -> Curriculum:
    """Half of each batch is drawn from the prompts that were tried, of which those nearest to 0.5 come first."""
    config = CurriculumConfig(enabled=True, exploration=0.5, rest_steps=0)
    return Curriculum(datasets=[make_prompts(count)], slots=lambda _: [0] * BATCH, seed=0, config=config)


def test_a_curriculum_chooses_by_what_is_known_when_a_batch_begins(start: Start) -> None:
    stream, _ = start(lambda _: says(1), curriculum=make_curriculum(40), take_groups="in_order")
    taken = [stream.take()]
    stream.learn({"p0": (0.5, 1), "p1": (0.0, 1)})
    stream.publish(1)
    taken.append(stream.take())
    stream.publish(2)
    taken.append(stream.take())
    found = sorted(uid for batch in taken for uid in uids(batch))
    # The first two positions were chosen before anything was known; no prompt is in flight twice.
    assert sorted(set(found)) == ["p0", "p1", "p2", "p3", "p4"]
    assert found.count("p0") == 2


def test_what_a_curriculum_chose_is_kept_whatever_is_known_later(start: Start, tmp_path: Path) -> None:
    stream, _ = start(lambda _: says(1), curriculum=make_curriculum(40), take_groups="in_order")
    first = [stream.take()]
    stream.learn({"p0": (0.5, 1), "p1": (0.0, 1)})
    stream.publish(1)
    first.append(stream.take())
    stream.close()
    known = set(re.findall(r'\{"turn": "([^"]+)"', (tmp_path / "journal.jsonl").read_text()))
    stream, after = start(lambda _: says(1), curriculum=make_curriculum(40), take_groups="in_order")
    stream.learn({"p2": (0.5, 1), "p3": (0.5, 1)})
    again = take_all(stream)
    assert [batch.rollouts for batch in again[:2]] == [batch.rollouts for batch in first]
    assert again[1].settled == first[1].settled
    assert known
    assert not known & {request.request_id for request in after.requests}
    assert sorted(uids(again[2])) == ["p0", "p4"]


def test_a_prompt_that_comes_again_in_a_batch_is_a_group_of_its_own() -> None:
    groups = [
        (prompt, (make_trajectory(make_turn(reward=reward), uid=prompt.uid),))
        for prompt, reward in zip([*make_prompts(2), *make_prompts(1)], (0.0, 1.0, 2.0))
    ]
    found = distinct(groups)
    assert [prompt.uid for prompt, _ in found] == ["p0", "p1", "p0#copy1"]
    assert [(one.prompt_uid, one.reward) for _, (one,) in found] == [("p0", 0.0), ("p1", 1.0), ("p0#copy1", 2.0)]


def test_messages_name_the_setting_to_change(start: Start) -> None:
    stream, _ = start(lambda _: says(1), filters=FILTER)
    with pytest.raises(DataError) as raised:
        stream.take()
    assert re.search(r"trainer\.algorithm\.filters\.dynamic_sampling=none$", str(raised.value))
