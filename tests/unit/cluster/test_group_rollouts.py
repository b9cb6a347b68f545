"""A batch in parts, one engine each: their order, how many run at a time, what ends them, and what stays on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.group_rollouts import GroupRollouts
from skyrl_train.cluster.rollouts import Part
from skyrl_train.errors import SaveError, SkyrlTrainError
from skyrl_train.types import RolloutBatch, SamplingParams, Trajectory
from tests.support.fakes_trainer import failed_trajectory, make_prompts, make_trajectory, make_turn


@dataclass
class Engines:
    """Two engines that make samples whose rewards say which they are; the parts asked first are answered last."""

    fail: Callable[[Part, int], bool] = lambda *_: False
    raises: Exception | None = None
    weight_version: int = 7
    group: Any = field(default_factory=lambda: SimpleNamespace(actors=["a", "b"]))
    asked: list[Part] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def roll_out(self, part: Part) -> list[Trajectory]:
        self.asked.append(part)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.05 / len(self.asked))
        self.running -= 1
        if self.raises is not None and part.places[0].number >= 6:
            raise self.raises
        return [
            failed_trajectory(sample=sample)
            if self.fail(part, place.number)
            else make_trajectory(make_turn(reward=float(10 * place.number + sample)), sample=sample)
            for place in part.places
            for sample in range(part.n_samples_per_prompt)
        ]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., GroupRollouts]]:
    opened: list[GroupRollouts] = []

    def make(engines: Engines, **settings: Any) -> GroupRollouts:
        opened.append(GroupRollouts(engines, tmp_path / "segments", **{"max_failed_fraction": 0.5, **settings}))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def roll_out(rollouts: GroupRollouts, *, prompts: int = 10, step: int = 1) -> RolloutBatch:
    return rollouts.generate(
        make_prompts(prompts),
        n_samples_per_prompt=3,
        sampling=SamplingParams(),
        global_step=step,
        purpose="train",
    )


def test_samples_come_in_the_order_of_prompts_whoever_is_first(made: Any) -> None:
    engines, heard = Engines(), list[tuple[int, int]]()
    rollouts = made(engines)
    rollouts.on_progress = lambda done, total: heard.append((done, total))
    found = roll_out(rollouts)
    assert [each.turns[0].reward for each in found.trajectories] == [10 * n + s for n in range(10) for s in range(3)]
    assert sorted(part.name for part in engines.asked) == [f"train-1-{first:06d}" for first in range(0, 10, 2)]
    assert {part.weight_version for part in engines.asked} == {7}
    assert engines.most_running == 4, "two of each engine"
    assert heard == [(6 * n, 30) for n in range(1, 6)]


def test_a_prompt_less_than_there_are_parts_is_a_part_by_itself(made: Any) -> None:
    engines = Engines()
    assert len(roll_out(made(engines), prompts=1).trajectories) == 3
    assert [len(part.prompts) for part in engines.asked] == [1]


def test_failures_are_counted_over_the_whole_batch(made: Any) -> None:
    found = roll_out(made(Engines(fail=lambda _, number: number < 4)))
    assert sum(each.failed for each in found.trajectories) == 12
    with pytest.raises(SkyrlTrainError, match="18 of 30 trajectories failed") as raised:
        roll_out(made(Engines(fail=lambda _, number: number < 6)))
    assert {prompt.uid for prompt, _ in raised.value.trajectories} >= {"p0", "p5"}


def test_an_error_of_one_part_ends_the_others_and_keeps_what_was_made(made: Any) -> None:
    engines = Engines(raises=SaveError("no space"))
    with pytest.raises(SaveError, match="no space") as raised:
        roll_out(made(engines))
    assert all(prompt.uid in ("p0", "p1", "p2", "p3", "p4", "p5") for prompt, _ in raised.value.trajectories)
    engines.raises = None
    assert len(roll_out(made(engines)).trajectories) == 30


def test_segments_of_other_steps_are_removed(made: Any, tmp_path: Path) -> None:
    def write(step: int) -> None:
        folder = tmp_path / "segments" / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train-1-000000-0.safetensors").touch()

    def there() -> list[str]:
        return sorted(each.name for each in (tmp_path / "segments").iterdir())

    write(3)
    rollouts = made(Engines())
    assert there() == [], "of a run before"
    write(3)
    roll_out(rollouts, step=3)
    assert there() == ["step_000003"], "an evaluation or a further batch of the step that runs"
    write(4)
    roll_out(rollouts, step=4)
    assert there() == ["step_000004"]
    rollouts.close()
    assert there() == []
