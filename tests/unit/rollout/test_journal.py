"""A stream that is killed anywhere, by prefixes of its journal, and goes on from any checkpoint that it can have had."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.errors import DataError, EngineError, SaveError
from skyrl_train.rollout.admission import AdmissionSettings, Closed, Settled
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.loop_thread import LoopThread
from skyrl_train.rollout.stream import RolloutStream, StreamSettings, Taken
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams
from tests.fakes import (
    FAKE_ENVIRONMENT,
    FakeEngine,
    FakeEnvironment,
    done_with,
    go_on_with,
    make_output,
    make_prompts,
    make_tokenizer,
)
from tests.fakes_trainer import make_trajectory
from tests.file_limits import file_size_limit

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
BATCH, SAMPLES, STEPS, STALENESS = 2, 2, 4, 2
STREAM_PROMPTS = make_prompts(BATCH * STEPS, steps=[go_on_with("Try again"), done_with(1.0)])


class VersionedEngine(FakeEngine):
    """Two turns a sample, whose log-probabilities tell the version that sampled them."""

    def __init__(self, version: int) -> None:
        super().__init__(self._versioned)
        self.weight_version = version

    def _versioned(self, _: GenerationRequest) -> GenerationOutput:
        logprobs = (-0.5 - self.weight_version,) * len(ANSWER)
        return make_output(ANSWER, logprobs=logprobs, weight_version=self.weight_version)


@dataclass(frozen=True)
class Run:
    """What one process did."""

    taken: dict[int, Taken]
    """By version."""
    requests: list[str]


def run(path: Path, *, version: int = 0, settled: Settled | None = None) -> Run:
    """Takes all batches from `version` on, as a learner would."""
    FakeEnvironment.reset()
    engine = VersionedEngine(version)
    environment = EnvironmentConfig(env_class=FAKE_ENVIRONMENT, step_timeout_s=5.0, isolation="thread", num_workers=4)
    generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=2), environment, 0)
    settings = StreamSettings(
        admission=AdmissionSettings(
            batch_size=BATCH, max_staleness=STALENESS, stale_groups="wait", total_batches=STEPS
        ),
        n_samples_per_prompt=SAMPLES,
        sampling=SamplingParams(),
        max_failed_fraction=0.0,
    )
    stream = RolloutStream(generator, batch_at, settings, Journal(path, prompts="p"))
    taken = {}
    try:
        stream.begin(version=version, settled=settled or Settled())
        for number in range(version, STEPS):
            taken[number] = stream.take()
            engine.weight_version = number + 1
            stream.publish(number + 1)
    finally:
        stream.close()
        generator.close()
    return Run(taken=taken, requests=[request.request_id for request in engine.requests])


def batch_at(position: int) -> Sequence[Prompt]:
    return STREAM_PROMPTS[position * BATCH : (position + 1) * BATCH]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, bytes]:
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    return run(path), path.read_bytes()


def check_crash_at(cut: int, whole: tuple[Run, bytes], folder: Path, draw: random.Random) -> None:
    before, content = whole
    prefix = content[:cut]
    lines = [json.loads(line) for line in prefix.split(b"\n")[:-1]]
    kept = {line["turn"] for line in lines if "turn" in line}
    num_batches = sum("batch" in line for line in lines)
    # A checkpoint of step `version` follows the update of batch `version - 1`, which was in the journal before.
    version = draw.randint(0, num_batches)
    path = folder / f"cut_{cut}.jsonl"
    path.write_bytes(prefix)
    after = run(path, version=version, settled=before.taken[version - 1].settled if version else None)
    trained = Counter(
        prompt.uid
        for number in range(STEPS)
        for prompt in (before if number < version else after).taken[number].rollouts.prompts
    )
    assert trained == Counter(prompt.uid for prompt in STREAM_PROMPTS), "each prompt is trained on once"
    for number in range(version, num_batches):
        assert after.taken[number].rollouts == before.taken[number].rollouts, "a batch that was trained on is the same"
    assert not kept & set(after.requests), "no turn that finished is generated again"
    assert len(set(after.requests)) == len(after.requests)
    for number, taken in after.taken.items():
        ages = [
            number - one.version
            for trajectory in taken.rollouts.trajectories
            for turn in trajectory.turns
            for one in turn.weight_versions
        ]
        assert min(ages) >= 0
        assert max(ages) <= STALENESS


def test_a_run_that_was_killed_anywhere_goes_on_where_it_was(whole: tuple[Run, bytes], tmp_path: Path) -> None:
    draw = random.Random(0)
    for cut in sorted(draw.sample(range(len(whole[1]) + 1), 40)):
        check_crash_at(cut, whole, tmp_path, draw)


@pytest.mark.slow
def test_500_crash_points(whole: tuple[Run, bytes], tmp_path: Path) -> None:
    draw = random.Random(1)
    ends = [index + 1 for index, byte in enumerate(whole[1]) if byte == ord("\n")]
    cuts = [0, *ends, *(draw.randrange(len(whole[1])) for _ in range(499 - len(ends)))]
    assert len(cuts) == 500
    for cut in cuts:
        check_crash_at(cut, whole, tmp_path, draw)


def test_everything_is_in_the_journal_before_it_is_used(whole: tuple[Run, bytes]) -> None:
    lines = [json.loads(line) for line in whole[1].splitlines()]
    place: dict[str, int] = {}
    for index, line in enumerate(lines):
        kind = next(iter(line))
        place[f"{kind} {line[kind]}"] = index
    assert lines[0] == {"prompts": "p"}
    assert len(place) == len(lines) == 1 + BATCH * STEPS * (2 + 2 * SAMPLES) + STEPS
    for version in range(STEPS):
        batch = lines[place[f"batch {version}"]]
        for ordinal in batch["groups"]:
            group = place[f"group {ordinal}"]
            turns = [index for name, index in place.items() if name.startswith(f"turn stream-{ordinal}-")]
            assert place[f"start {ordinal}"] < min(turns) <= max(turns) < group < place[f"batch {version}"]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


def request(**changes: Any) -> GenerationRequest:
    first = GenerationRequest(
        request_id="stream-0-000000-0000-000", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=3
    )
    return replace(first, **changes)


def keep(journal: Journal, loop: LoopThread, output: GenerationOutput) -> None:
    loop.run(journal.keep_turn(request(), output))


def test_an_answer_is_read_back_for_the_same_request_alone(tmp_path: Path, loop: LoopThread) -> None:
    output = make_output([3, 4], logprobs=(-0.1, -1e-9), weight_version=2)
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    keep(journal, loop, output)
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", prompts="p")
    assert again.turn(request()) == output
    others: list[dict[str, Any]] = [
        {"prompt_token_ids": (1, 3)},
        {"seed": 4},
        {"request_id": "stream-0-000000-0001-000"},
    ]
    assert [again.turn(request(**changes)) for changes in others] == [None, None, None]
    again.close()


def test_a_group_and_a_batch_are_read_back(tmp_path: Path, loop: LoopThread) -> None:
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    prompt, trajectory, closed = make_prompts(1)[0], make_trajectory(), Closed(ordinals=(0, 2), dropped={1: "stale"})
    journal.begin(0, 5)
    loop.run(journal.keep_group(0, prompt, (trajectory,)))
    loop.run(journal.keep_batch(5, closed))
    journal.close()
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", prompts="p")
    assert again.group(0) == (trajectory,)
    assert (again.started, again.batches) == ({0: 5}, {5: closed})
    again.forget(Settled(frontier=1))
    assert (again.group(0), again.started) == (None, {})
    again.close()


def test_a_line_that_is_cut_short_is_removed(tmp_path: Path, loop: LoopThread) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, prompts="p")
    journal.begin(0, 0)
    keep(journal, loop, make_output([3]))
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    again = Journal(path, prompts="p")
    assert again.started == {0: 0}
    assert again.turn(request()) is None
    keep(again, loop, make_output([3]))
    again.close()
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", ["[]", "{}", '{"turn": 3}', '{"turn": "x"}', "nonsense", '{"batch": 0, "groups": 1}'])
def test_a_file_that_is_no_journal_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"start": 0, "version": 0}}\n{line}\n')
    with pytest.raises(DataError, match=r"journal.jsonl, line 2: not a line of a journal"):
        Journal(path, prompts="p")


def test_a_journal_of_other_prompts_is_refused(whole: tuple[Run, bytes], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(whole[1])
    with pytest.raises(DataError, match=r"line 1: .* the training prompts were others.*resume_mode=none"):
        Journal(path, prompts="q")


def test_a_disk_that_is_full_is_named(tmp_path: Path, loop: LoopThread) -> None:
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    with file_size_limit(64), pytest.raises(SaveError, match=r"journal.jsonl could not be written"):
        keep(journal, loop, make_output([3] * 100))


def test_a_journal_that_lacks_a_batch_is_refused_rather_than_waited_for(
    whole: tuple[Run, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(line for line in whole[1].splitlines(keepends=True) if not line.startswith(b'{"batch"')))
    with pytest.raises(DataError, match=r"journal.jsonl: the groups in it are none of this run at version 0"):
        run(path)


def test_a_group_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(VersionedEngine, "_versioned", lambda *_: EngineError("no memory"))
        with pytest.raises(EngineError, match="no memory"):
            run(path)
    assert b'"batch"' not in path.read_bytes()
    after = run(path)
    assert len(after.requests) == BATCH * STEPS * SAMPLES * 2
