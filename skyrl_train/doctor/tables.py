"""What rules read of a run: its metrics as series, its trajectories as rows, its settings. Files are only read.

A run of a thousand steps has a million rows, so that texts and tokens are read of at most `MAX_STEPS` steps: the first, the
last and evenly between. Of the others there is who was asked what in which step, and what it was worth.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import DataError
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.reading import RolloutFile, Run, first_line, read_object, rows_of, settings_of

MAX_STEPS = 40
"""Steps whose texts and tokens are read, and as many evaluations at the most as a quarter of it."""
MAX_ROWS = 512
"""Turns of one step's file whose texts and tokens are read: whole prompts, the first ones."""
FACTS = ("global_step", "uid", "sample", "turn", "trajectory_reward", "failure_kind")
_TEXTS = (
    *("purpose", "outcome", "failure_message", "env_class", "dataset", "num_turns", "prompt", "extras", "metrics"),
    *("rewards", "observations", "tool_calls", "text", "stop_reason", "error", "tools"),
)
_TOKENS = ("response_token_ids", "logprobs", "loss_mask", "advantages", "policy_logprobs")
_TRUTHS = ("ground_truth", "answer", "solution", "target", "label", "gts")

Floats = NDArray[np.float64]


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


@dataclass(kw_only=True)
class Turn:
    """One turn of a trajectory. What was not recorded is None."""

    text: str
    stop_reason: str | None = None
    has_tool_calls: bool = False
    token_ids: NDArray[Any] | None = None
    """`[tokens]`"""
    logprobs: NDArray[Any] | None = None
    """The engine's, `[tokens]`."""
    policy_logprobs: NDArray[Any] | None = None
    advantages: NDArray[Any] | None = None
    loss_mask: NDArray[Any] | None = None


@dataclass(kw_only=True)
class Trajectory:
    """One sample of a prompt."""

    purpose: str
    step: int
    uid: str
    sample: int
    reward: float | None
    prompt: str = ""
    """The text of its last message."""
    truth: str | None = None
    """What the row calls its right answer, where it has one."""
    failure: str | None = None
    failure_message: str = ""
    outcome: str | None = None
    environment: str | None = None
    num_turns: int = 1
    solved: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    has_tools: bool = False
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How the viewer and the command line name it."""
        return f"{self.purpose} step {self.step} {self.uid}/{self.sample}"

    @property
    def text(self) -> str:
        """All that was sampled."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled; characters where no tokens were recorded."""
        known = [turn.token_ids for turn in self.turns if turn.token_ids is not None]
        return sum(map(len, known)) if known else len(self.text)

    def column(self, name: str) -> Floats | None:
        """Return a column of all turns' tokens; None where it was not recorded."""
        found = [getattr(turn, name) for turn in self.turns]
        whole = [each for each in found if each is not None and len(each)]
        return np.concatenate(whole).astype(np.float64) if whole and len(whole) == len(found) else None


@dataclass(frozen=True)
class Facts:
    """Every trajectory of every training step, without texts: columns of equal length, in order of the steps."""

    step: NDArray[np.int64]
    uid: NDArray[Any]
    """Numbers in place of the names, as they came: equal names have equal numbers."""
    reward: Floats
    """NaN where it failed."""
    failed: NDArray[np.bool_]
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
        self._files = run.rollout_files()

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
        steps = [record["step"] for record in self._records] + [file.step for file in self._files]
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
            rows = self._derived.get(name, [])
        steps, values = zip(*rows) if rows else ((), ())
        return Series(name, np.array(steps, np.int64), np.array(values, np.float64))

    def non_finite(self) -> list[tuple[int, str]]:
        """Return the steps and names of values that were no finite numbers."""
        return [(record["step"], name) for record in self._records for name in record if record[name] is None]

    @cached_property
    def facts(self) -> Facts:
        """Who was asked what, in all training steps."""
        steps: list[NDArray[Any]] = []
        rewards: list[NDArray[Any]] = []
        failed: list[NDArray[Any]] = []
        uids: list[int] = []
        numbers: dict[str, int] = {}
        for file in self._of("train"):
            table = self._read(file, FACTS)
            if table is None:
                continue
            is_first = np.array([not turn for turn in table["turn"]], bool)  # null of one that failed at once
            for uid, kept in zip(table["uid"], is_first):
                if kept:
                    uids.append(numbers.setdefault(str(uid), len(numbers)))
            reward = np.array([np.nan if each is None else each for each in table["trajectory_reward"]], np.float64)
            broken = np.array([each is not None for each in table["failure_kind"]], bool)
            steps.append(np.full(int(is_first.sum()), file.step))
            rewards.append(np.where(broken, np.nan, reward)[is_first])
            failed.append(broken[is_first])
        return Facts(
            step=np.concatenate(steps).astype(np.int64) if steps else np.zeros(0, np.int64),
            uid=np.array(uids, np.int64),
            reward=np.concatenate(rewards) if rewards else np.zeros(0),
            failed=np.concatenate(failed) if failed else np.zeros(0, bool),
            names=list(numbers),
        )

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """Those of training, of at most `MAX_STEPS` steps, with their texts and tokens."""
        return [each for file in _spread(self._of("train"), MAX_STEPS) for each in self._trajectories_of(file)]

    @cached_property
    def evaluations(self) -> list[Trajectory]:
        """Those of evaluations, and answers of a supervised run."""
        files = self._of("eval") + self._of("sample")
        return [each for file in _spread(files, MAX_STEPS // 4) for each in self._trajectories_of(file)]

    @cached_property
    def failed_steps(self) -> list[tuple[int, str]]:
        """Steps that ended the run, and by which error."""
        found = []
        for file in self._of("failed"):
            table = self._read(file, ("error",))
            found.append((file.step, str(next((each for each in table["error"] if each), "")) if table else ""))
        return found

    def of_step(self, step: int) -> list[Trajectory]:
        """Return all trajectories of one training step."""
        files = [file for file in self._of("train") if file.step == step]
        return [each for file in files for each in self._trajectories_of(file, most=2**31)]

    def groups(self) -> Iterator[list[Trajectory]]:
        """Yield the samples of each prompt of each step that was read, those that failed left out, where there are two."""
        found: dict[tuple[int, str], list[Trajectory]] = defaultdict(list)
        for each in self.trajectories:
            if each.failure is None and each.reward is not None:
                found[each.step, each.uid].append(each)
        yield from (group for group in found.values() if len(group) > 1)

    @cached_property
    def first_steps(self) -> frozenset[int]:
        """The first tenth of the steps whose texts were read: at least two."""
        steps = sorted({each.step for each in self.trajectories})
        return frozenset(steps[: max(2, len(steps) // 10)])

    @cached_property
    def last_steps(self) -> frozenset[int]:
        """The last tenth of them: at least two."""
        steps = sorted({each.step for each in self.trajectories})
        return frozenset(steps[-max(2, len(steps) // 10) :])

    def _of(self, purpose: str) -> list[RolloutFile]:
        return [file for file in self._files if file.purpose == purpose]

    @cached_property
    def _derived(self) -> dict[str, list[tuple[int, float]]]:
        """What other trainers' rows say of a step, by the names of our metrics."""
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        by_step: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step, uid, reward in zip(self.facts.step.tolist(), self.facts.uid.tolist(), self.facts.reward.tolist()):
            if np.isfinite(reward):
                by_step[step][uid].append(reward)
        for step, groups in sorted(by_step.items()):
            rewards = [reward for group in groups.values() for reward in group]
            found["reward/mean"].append((step, float(np.mean(rewards))))
            found["reward/std"].append((step, float(np.std(rewards))))
            if several := [group for group in groups.values() if len(group) > 1]:
                share = float(np.mean([max(group) == min(group) for group in several]))
                found["group/zero_variance"].append((step, share))
        return found

    def _read(self, file: RolloutFile, names: Sequence[str]) -> dict[str, list[Any]] | None:
        """Return columns of a file as lists, or None with a problem where it cannot be read."""
        try:
            if file.kind != "parquet":
                rows = list(rows_of(file))
                return {name: [row.get(name) for row in rows] for name in names}
            return {name: column.to_pylist() for name, column in _columns(file.path, names).items()}
        except Exception as error:  # a file of another program, or a torn one, may hold anything
            self.problems.append(f"{file.path} cannot be read: {first_line(error)}")
            return None

    def _trajectories_of(self, file: RolloutFile, most: int = MAX_ROWS) -> list[Trajectory]:
        table = self._read(file, (*FACTS, *_TEXTS))
        if table is None:
            return []
        tokens = self._tokens_of(file)
        found: dict[tuple[str, int], Trajectory] = {}
        for index in range(_whole_prompts(table["uid"], most)):
            row = {name: column[index] for name, column in table.items()}
            key = str(row["uid"]), int(row["sample"] or 0)
            own = found.get(key) or found.setdefault(key, _trajectory(file, row))
            if row["turn"] is not None:
                columns = {name.replace("response_", ""): column(index) for name, column in tokens.items()}
                called = bool(row["tool_calls"] and row["tool_calls"] != "[]")
                text, reason = str(row["text"] or ""), row["stop_reason"]
                own.turns.append(Turn(text=text, stop_reason=reason, has_tool_calls=called, **columns))
        return list(found.values())

    def _tokens_of(self, file: RolloutFile) -> dict[str, Callable[[int], NDArray[Any] | None]]:
        """Return for each column of tokens a function from a row to its values; none for what has no tokens."""
        if file.kind != "parquet":
            return {}
        try:
            columns = _columns(file.path, _TOKENS)
        except Exception as error:
            self.problems.append(f"{file.path} cannot be read: {first_line(error)}")
            return {}
        return {name: _rows(column) for name, column in columns.items()}


def _columns(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return columns of a Parquet file as `pyarrow.Array`s; nulls for one that the file has not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        present = [name for name in names if name in opened.schema_arrow.names]
        table = opened.read(columns=present)
        length = opened.metadata.num_rows
    columns = {name: table.column(name).combine_chunks() for name in present}
    return {name: columns.get(name, pa.nulls(length)) for name in names}


def _rows(column: Any) -> Callable[[int], NDArray[Any] | None]:
    """Return a function from a row to its part of a list column, without a copy of the whole as Python numbers."""
    if column.null_count == len(column):
        return lambda _: None
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    values = column.values.to_numpy(zero_copy_only=False)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return lambda index: values[offsets[index] : offsets[index + 1]] if valid[index] else None


def _whole_prompts(uids: Sequence[object], most: int) -> int:
    """Return how many of the first rows are read: up to the end of a prompt's rows."""
    end = min(len(uids), most)
    while 0 < end < len(uids) and uids[end] == uids[end - 1]:
        end += 1
    return end


def _trajectory(file: RolloutFile, row: Mapping[str, Any]) -> Trajectory:
    extras, metrics = _object(row["extras"]), _object(row["metrics"])
    reward, solved = row["trajectory_reward"], metrics.get("solved")
    return Trajectory(
        purpose=file.purpose,
        step=file.step,
        uid=str(row["uid"]),
        sample=int(row["sample"] or 0),
        reward=None if reward is None else float(reward),
        prompt=_last_text(row["prompt"]),
        truth=truth_of(extras),
        failure=row["failure_kind"],
        failure_message=str(row["failure_message"] or ""),
        outcome=row["outcome"],
        environment=row["env_class"],
        num_turns=int(row["num_turns"] or 0),
        solved=float(solved) if isinstance(solved, (int, float)) else None,
        extras=extras,
        rewards={name: value for name, value in _object(row["rewards"]).items() if isinstance(value, (int, float))},
        has_tools=bool(row["tools"] and row["tools"] != "[]"),
    )


def truth_of(extras: Mapping[str, Any]) -> str | None:
    """Return what a row calls the right answer: `reward_spec.ground_truth`, or a column of one of the usual names."""
    for owner in (extras.get("reward_spec"), extras):
        for name in _TRUTHS:
            value = owner.get(name) if isinstance(owner, Mapping) else None
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value)
    return None


def _object(text: object) -> dict[str, Any]:
    """Return a JSON object from a text; an empty one for what is none."""
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _last_text(prompt: object) -> str:
    try:
        messages = json.loads(prompt) if isinstance(prompt, str) else []
    except ValueError:
        return str(prompt)
    content = messages[-1].get("content") if isinstance(messages, list) and messages else messages
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _spread(files: Sequence[RolloutFile], most: int) -> list[RolloutFile]:
    """Return at most `most` of the files: evenly spread, the first two and the last two among them."""
    if len(files) <= most:
        return list(files)
    even = {round(index * (len(files) - 1) / (most - 3)) for index in range(most - 2)}
    return [files[index] for index in sorted(even | {1, len(files) - 2})]


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else float("nan")
