"""What rules read of a run: its metrics as series, its trajectories as rows, its settings. Files are only read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.doctor.trajectories import FACTS, MAX_STEPS, Floats, RolloutReader, Trajectory
from skyrl_train.errors import DataError
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.reading import Run, first_line, read_object, settings_of


@dataclass(frozen=True)
class Series:
    """One metric over the steps that have it."""

    name: str
    steps: NDArray[np.int64]
    """`[num_steps]`, rising."""
    values: Floats
    """`[num_steps]`, finite."""

    def __len__(self) -> int:
        return len(self.values)

    def first(self, count: int = 5) -> float:
        """Return the median of the first values; NaN where there is none."""
        return _median(self.values[:count])

    def last(self, count: int = 5) -> float:
        """Return the median of the last values; NaN where there is none."""
        return _median(self.values[-count:])

    def since(self, holds: Callable[[Floats], NDArray[np.bool_]]) -> int | None:
        """Return the step from which on a condition holds to the end; None where the last value does not meet it."""
        wrong = np.flatnonzero(~holds(self.values))
        begin = int(wrong[-1]) + 1 if len(wrong) else 0
        return int(self.steps[begin]) if begin < len(self) else None

    def at(self, steps: NDArray[np.int64]) -> Floats:
        """Return the values at some steps, NaN where there is none."""
        by_step = dict(zip(self.steps.tolist(), self.values.tolist()))
        return np.array([by_step.get(step, np.nan) for step in steps.tolist()])

    def shown(self, *, digits: int = 3) -> str:
        """Return a few of its values in words, as evidence."""
        chosen = sorted({0, len(self) // 3, 2 * len(self) // 3, len(self) - 1}) if len(self) else []
        told = ", ".join(f"{self.values[index]:.{digits}g} at step {self.steps[index]}" for index in chosen)
        return f"{self.name}: {told}"


@dataclass(frozen=True)
class Facts:
    """Every trajectory of every training step, without texts: columns of equal length, in order of the steps."""

    step: NDArray[np.int64]
    uid: NDArray[Any]
    """Numbers in place of the names, as they came: equal names have equal numbers."""
    reward: Floats
    """NaN where it failed."""
    names: Sequence[str]
    """Of the uids, by their numbers."""

    def uids_by_step(self) -> dict[int, tuple[int, ...]]:
        """Return the prompts of each step, each once, in the order of the file."""
        found: dict[int, dict[int, None]] = defaultdict(dict)
        for step, uid in zip(self.step.tolist(), self.uid.tolist()):
            found[step][uid] = None
        return {step: tuple(uids) for step, uids in found.items()}


class Tables:
    """One run, read when asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.problems: list[str] = []
        """What could not be read."""
        self.rollouts = RolloutReader(run.rollout_files(), self.problems)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """By their dotted names; empty where the run recorded none."""
        return settings_of(self.run, self.problems) if self.run.kind == "skyrl" else {}

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """The sizes that the run derived; empty where it recorded none."""
        return read_object(self.run.folder.plan_file, self.problems)

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        try:
            by_step = {record["step"]: record for record in read_metrics(self.run.folder.metrics_file)}
        except (DataError, OSError) as error:
            self.problems.append(first_line(error))
            return []
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def names(self) -> Sequence[str]:
        """The metrics that any step has."""
        return sorted({name for record in self._records for name in record} - {"step"})

    @cached_property
    def is_supervised(self) -> bool:
        """True of supervised training."""
        return "train/loss" in self.names

    @cached_property
    def last_step(self) -> int:
        """The last that was finished or whose rollouts are there; 0 before the first."""
        steps = [record["step"] for record in self._records] + [file.step for file in self.rollouts.files]
        return max(steps, default=0)

    def series(self, name: str) -> Series:
        """Return a metric over training steps; an empty one where no step has it. Dumps of other trainers have what follows
        from their rows."""
        rows = [
            (record["step"], record[name])
            for record in self._records
            if isinstance(record.get(name), (int, float)) and (record["step"] > 0 or name.startswith("eval/"))
        ]
        if not rows and not self._records:
            rows = _derived(self.facts, name)
        steps, values = zip(*rows) if rows else ((), ())
        return Series(name, np.array(steps, np.int64), np.array(values, np.float64))

    def non_finite(self) -> list[tuple[int, str]]:
        """Return the steps and names of values that were no finite numbers."""
        return [(record["step"], name) for record in self._records for name in record if record[name] is None]

    @cached_property
    def facts(self) -> Facts:
        """Who was asked what, in all training steps."""
        return _facts_of(self.rollouts)

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """Those of training, of at most `MAX_STEPS` steps, with their texts and tokens."""
        return self.rollouts.sampled(self.rollouts.of("train"), MAX_STEPS)

    @cached_property
    def evaluations(self) -> list[Trajectory]:
        """Those of evaluations, and answers of a supervised run."""
        return self.rollouts.sampled(self.rollouts.of("eval", "sample"), MAX_STEPS // 4)

    @cached_property
    def least_reward(self) -> float:
        """The lowest of all trajectories; 0 where none has one."""
        return float(np.nanmin(self.facts.reward)) if np.isfinite(self.facts.reward).any() else 0.0

    @cached_property
    def largest_reward(self) -> float:
        """The highest of all trajectories; 0 where none has one."""
        return float(np.nanmax(self.facts.reward)) if np.isfinite(self.facts.reward).any() else 0.0

    @cached_property
    def early(self) -> list[Trajectory]:
        """Those of the first tenth of the steps whose texts were read: of at least two."""
        steps = sorted({each.step for each in self.trajectories})
        chosen = steps[: max(2, len(steps) // 10)]
        return [each for each in self.trajectories if each.step in chosen]

    @cached_property
    def late(self) -> list[Trajectory]:
        """Those of the last tenth."""
        steps = sorted({each.step for each in self.trajectories})
        chosen = steps[-max(2, len(steps) // 10) :]
        return [each for each in self.trajectories if each.step in chosen]

    def groups(self, among: Sequence[Trajectory] | None = None) -> Iterator[list[Trajectory]]:
        """Yield the samples of each prompt of each step that was read, those that failed left out, where there are two."""
        found: dict[tuple[int, str], list[Trajectory]] = defaultdict(list)
        for each in self.trajectories if among is None else among:
            if each.failure is None and each.reward is not None:
                found[each.step, each.uid].append(each)
        yield from (group for group in found.values() if len(group) > 1)


def _facts_of(rollouts: RolloutReader) -> Facts:
    steps, rewards, uids = [], [], []
    numbers: dict[str, int] = {}
    for file in rollouts.of("train"):
        table, _ = rollouts.read(file, FACTS) or ({name: [] for name in FACTS}, {})
        for uid, turn, reward, failure in zip(
            table["uid"], table["turn"], table["trajectory_reward"], table["failure_kind"]
        ):
            if not turn:  # the first; null of one that failed at once
                steps.append(file.step)
                uids.append(numbers.setdefault(str(uid), len(numbers)))
                rewards.append(np.nan if reward is None or failure is not None else reward)
    columns = np.array(steps, np.int64), np.array(uids, np.int64), np.array(rewards, np.float64)
    return Facts(step=columns[0], uid=columns[1], reward=columns[2], names=list(numbers))


def _derived(facts: Facts, name: str) -> list[tuple[int, float]]:
    """Return what the rows of another trainer's dump say of its steps, by the name of our metric."""
    measures: dict[str, Callable[[list[list[float]]], float]] = {
        "reward/mean": lambda groups: float(np.mean(np.concatenate(groups))),
        "reward/std": lambda groups: float(np.std(np.concatenate(groups))),
        "group/zero_variance": lambda groups: float(np.mean([max(group) == min(group) for group in groups])),
    }
    by_step: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, uid, reward in zip(facts.step.tolist(), facts.uid.tolist(), facts.reward.tolist()):
        if np.isfinite(reward):
            by_step[step][uid].append(reward)
    of_several = name == "group/zero_variance"
    chosen = {step: [each for each in groups.values() if len(each) > of_several] for step, groups in by_step.items()}
    return [(step, measures[name](groups)) for step, groups in sorted(chosen.items()) if groups and name in measures]


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else float("nan")
