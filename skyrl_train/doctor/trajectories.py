"""Trajectories as rules see them, and how a run's files of rollouts are read.

A run of a thousand steps has a million rows, so that texts and tokens are read of at most `MAX_STEPS` steps: the first, the
last and evenly between. Of the others there is who was asked what in which step, and what it was worth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.telemetry.reading import RolloutFile, first_line, rows_of
from skyrl_train.telemetry.records import read_columns

MAX_STEPS = 40
"""Steps whose texts and tokens are read, and as many evaluations at the most as a quarter of it."""
_MAX_ROWS = 512
"""Turns of one step's file whose texts and tokens are read: whole prompts, the first ones."""
FACTS = ("global_step", "uid", "sample", "turn", "trajectory_reward", "failure_kind")
_TEXTS = (
    *("purpose", "outcome", "failure_message", "env_class", "dataset", "num_turns", "prompt", "extras", "metrics"),
    *("rewards", "observations", "tool_calls", "text", "stop_reason", "error", "tools"),
)
_TOKENS = ("added_token_ids", "response_token_ids", "logprobs", "loss_mask", "advantages", "policy_logprobs")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TRUTHS = ("ground_truth", "answer", "solution", "target", "label", "gts")

Floats = NDArray[np.float64]
Cells = Callable[[int], NDArray[Any] | None]
"""From a row to what a column of lists has there."""


@dataclass(kw_only=True)
class Turn:
    """One turn of a trajectory. What was not recorded is None."""

    text: str
    stop_reason: str | None = None
    has_tool_calls: bool = False
    added_token_ids: NDArray[Any] | None = None
    """What the turn's prompt adds to the turn before, `[tokens]`."""
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


class RolloutReader:
    """Reads files of rollouts. Of what cannot be read nothing is there, and `problems` says so."""

    def __init__(self, files: Sequence[RolloutFile], problems: list[str]) -> None:
        self.files, self._problems = files, problems

    def of(self, *purposes: str) -> list[RolloutFile]:
        """Return the files of some purposes, by purpose and step."""
        return [file for purpose in purposes for file in self.files if file.purpose == purpose]

    def sampled(self, files: Sequence[RolloutFile], most: int) -> list[Trajectory]:
        """Return the trajectories of at most `most` files: evenly spread, the first two and the last two among them."""
        if len(files) > most:
            even = {round(index * (len(files) - 1) / (most - 3)) for index in range(most - 2)}
            files = [files[index] for index in sorted(even | {1, len(files) - 2})]
        return [each for file in files for each in self.trajectories(file)]

    def trajectories(self, file: RolloutFile, most: int = _MAX_ROWS) -> list[Trajectory]:
        """Return the trajectories of about so many first rows."""
        table, tokens = self.read(file, (*FACTS, *_TEXTS), _TOKENS) or ({"uid": []}, {})
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

    def of_step(self, step: int) -> list[Trajectory]:
        """Return all trajectories of one training step."""
        files = [file for file in self.of("train") if file.step == step]
        return [each for file in files for each in self.trajectories(file, most=2**31)]

    def failed_steps(self) -> list[tuple[int, str]]:
        """Return the steps that ended the run, and by which error."""
        found = []
        for file in self.of("failed"):
            table, _ = self.read(file, ("error",)) or ({"error": []}, {})
            found.append((file.step, str(next((each for each in table["error"] if each), ""))))
        return found

    def read(
        self, file: RolloutFile, names: Sequence[str], tokens: Sequence[str] = ()
    ) -> tuple[dict[str, list[Any]], dict[str, Cells]] | None:
        """Return columns of a file as lists, and columns of tokens, which only our own Parquet has; None where it cannot be
        read."""
        try:
            if file.kind != "parquet":
                rows = list(rows_of(file))
                return {name: [row.get(name) for row in rows] for name in names}, {}
            columns = _columns(file.path, (*names, *tokens))
            return {name: columns[name].to_pylist() for name in names}, {name: _cells(columns[name]) for name in tokens}
        except Exception as error:  # a file of another program, or a torn one, may hold anything
            self._problems.append(f"{file.path} cannot be read: {first_line(error)}")
            return None


def _columns(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return columns of a Parquet file as `pyarrow.Array`s; nulls for one that the file has not."""
    import pyarrow as pa

    table = read_columns(path, names)
    there = {name: table.column(name).combine_chunks() for name in names if name in table.column_names}
    return {name: there.get(name, pa.nulls(len(table))) for name in names}


def _cells(column: Any) -> Cells:
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
        truth=_truth_of(extras),
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


def _truth_of(extras: Mapping[str, Any]) -> str | None:
    """Return what a row calls the right answer: `reward_spec.ground_truth`, or a column of one of the usual names."""
    for owner in (extras.get("reward_spec"), extras):
        for name in _TRUTHS:
            value = owner.get(name) if isinstance(owner, Mapping) else None
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value)
    return None


def last_number(text: str) -> str:
    """Return the last number of a text, as rewards of numbers read it; empty where there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".0").rstrip(".") if found else ""


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
