"""What a run's folder holds beside its rollouts: metrics, timeline, plan, memory, settings, log. Everything is optional, may
be half written, and is only read; what is wrong with a file is appended to `problems`."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyrl_train.telemetry import phase_seconds
from skyrl_train.telemetry.logs import redact
from skyrl_train.telemetry.reading import RolloutFile, Run, read_object
from skyrl_train.telemetry.records import kind_of

Json = dict[str, Any]
_LAST_STEPS = 5000
_LAST_LINES_OF_TIMELINE = 50
_DEFAULT_SERIES = (
    "reward/mean",
    "train/loss",
    "eval/accuracy",
    "eval/loss",
    "env/solved",
    "loss/policy",
    "loss/total",
    "loss/mean",
    "policy/entropy",
    "policy/grad_norm",
    "response_length/mean",
    "response_length/characters",
    "kl/reference",
    "off_policy/age/mean",
    "tools/failed",
    "serve/loss_sum",
    "serve/samples",
    "serve/requests_open",
)
"""What a run of any kind shows first, as far as it has it: supervised training its losses, a teacher its KL, rollouts beside
updates their age, a served model its passes."""
_OF_PARTS = ("/accuracy", "/loss")
"""Of each kind of held-out rows: on which of them it learnt."""
_MOST_OF_PARTS = 4
_OF_A_REWARD = re.compile("reward/.+/mean")
_MOST_REWARDS = 4
_OF_ENVIRONMENTS = "env/"
_MOST_OF_ENVIRONMENTS = 3
_WAIT = "timing/wait/"
_SHARES = ("environments_alone",)
"""What stands among the waits of a record and is no number of seconds."""
_MEASURED = {
    "total_steps": "step",
    "total_optimizer_steps": "total/optimizer_steps",
    "optimizer_steps_per_batch": "total/optimizer_steps",
    "num_samples_per_batch": "total/trajectories",
    "num_prompts_per_batch": "total/prompts",
}
"""Entries of the plan, and what counted the same while the run went on; those of a batch are divided by its steps."""


def metric_series(records: Sequence[Json], names: Sequence[str], max_points: int) -> Json:
    """Return the series of a run's metrics, aligned with its steps; of a step that was done again, the last line."""
    by_step = {record["step"]: record for record in records}
    lines = [by_step[step] for step in sorted(by_step)]
    tokens = _sums(lines, "batch/tokens")
    seconds = _sums(lines, "timing/step")
    kept = _thinned(lines, max_points)
    found = dict.fromkeys(name for index in kept for name in lines[index] if name != "step")
    wanted = sorted(name for name in found if not names or name in names)
    series = {name: [_number(lines[index].get(name)) for index in kept] for name in wanted}
    return {
        "steps": [lines[index]["step"] for index in kept],
        "tokens": [tokens[index] for index in kept],
        "seconds": [seconds[index] for index in kept],
        "series": series,
        "default": _default_series(series),
    }


def _default_series(series: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Return the curves that are shown first: none that is empty, repeats another or is 0 throughout but for a reward."""
    of_parts = [
        name for name in series if name.startswith("eval/") and name.endswith(_OF_PARTS) and name.count("/") > 1
    ]
    of_environments = [name for name in series if name.startswith(_OF_ENVIRONMENTS) and name not in _DEFAULT_SERIES]
    of_rewards = [name for name in series if _OF_A_REWARD.fullmatch(name)]
    chosen: dict[tuple[float | None, ...], str] = {}
    for name in (
        *_DEFAULT_SERIES,
        *of_rewards[:_MOST_REWARDS],
        *of_parts[:_MOST_OF_PARTS],
        *of_environments[:_MOST_OF_ENVIRONMENTS],
    ):
        values = tuple(series.get(name, ()))
        if any(value or (value is not None and name.startswith(("reward", "eval", "train"))) for value in values):
            chosen.setdefault(values, name)
    return [*chosen.values()]


def step_table(files: Sequence[RolloutFile], records: Sequence[Json]) -> list[Json]:
    """Return what each step took and what failed in it, for the last steps; one that failed as a whole has a line, too."""
    by_step = {record["step"]: record for record in records}
    failed = {file.step for file in files if file.purpose == "failed"}
    shown = _names(by_step.values(), "timing/", "failures/")
    table = []
    for step in sorted(by_step.keys() | failed)[-_LAST_STEPS:]:
        own = by_step.get(step, {})
        numbers = {name: _number(own[name]) for name in own if name in shown}
        record = {name: value for name, value in numbers.items() if value is not None}
        waits = {name.removeprefix(_WAIT): each for name, each in record.items() if name.startswith(_WAIT)}
        fraction, count = record.get("failures/fraction"), record.get("failures/count", 0)
        table.append(
            {
                "step": step,
                "phases": phase_seconds(record),
                "waits": {name: each for name, each in waits.items() if name not in _SHARES},
                "num_failed": int(count),
                "num_trajectories": round(count / fraction) if fraction else None,
                "is_failed": step in failed,
            }
        )
    return table


def timeline_lines(records: Iterable[Json], last: int = _LAST_LINES_OF_TIMELINE) -> list[Json]:
    """Return lines of the timeline, with the kind of each phase; what is not one is left out."""
    lines = []
    for record in deque(records, maxlen=last):
        try:
            phases = [
                {"name": str(name), "kind": kind_of(str(name)), "begin": float(begin), "end": float(end)}
                for name, begin, end in record["learner"]
            ]
            line = {"step": record["step"], "began": float(record["began"]), "seconds": float(record["seconds"])}
            spans = {name: [[float(a), float(b)] for a, b in record[name]] for name in ("engine", "groups")}
            lines.append({**line, "learner": phases, **spans})
        except (KeyError, TypeError, ValueError):
            continue
    return lines


def memory_facts(run: Run, records: Sequence[Json], problems: list[str]) -> Json:
    """Return what micro-batches may take and were predicted to, and what was measured in the steps."""
    roles: list[Json] = []
    content = read_object(run.folder.memory_file, problems)
    for role, entries in content.items():
        for entry in _list(entries):
            for kind in ("forward", "training"):
                sizing = entry.get(kind) if isinstance(entry, dict) else None
                if isinstance(sizing, dict):
                    roles.append(
                        {
                            "role": role,
                            "pass": kind,
                            "limit_bytes": _number(sizing.get("limit_bytes")),
                            "predicted_bytes": _predicted_bytes(sizing),
                            "tokens": _number(sizing.get("tokens")),
                            "probes": [probe for probe in _list(sizing.get("probes")) if isinstance(probe, dict)],
                        }
                    )
    last = records[-_LAST_STEPS:]
    points = {
        name: [[record["step"], number] for record in last if (number := _number(record.get(name))) is not None]
        for name in sorted(_names(last, "memory/"))
    }
    measured = {name: found for name, found in points.items() if found}
    return {"roles": roles, "measured": measured}


def plan_beside(plan: Mapping[str, Any], records: Sequence[Json]) -> list[Json]:
    """Return the numbers of the plan, and what they were in the end."""
    last: Json = {}
    for name in {*_MEASURED.values()}:
        found = (number for record in reversed(records) if (number := _number(record.get(name))) is not None)
        last[name] = next(found, None)
    steps = [record["step"] for record in records if record["step"] > 0]
    rows: list[Json] = []
    for name, planned in plan.items():
        if _number(planned) is not None:
            happened = last.get(_MEASURED.get(name, ""))
            if happened is not None and name.endswith("_per_batch"):
                happened = happened / max(steps) if steps else None
            if not planned and not happened:  # of a critic, say, where there is none
                continue
            rows.append({"name": name, "planned": planned, "happened": happened})
    return sorted(rows, key=lambda row: (row["happened"] is None, row["name"]))


def environment_of(run: Run, problems: list[str]) -> Json:
    """Return versions, commit and command, where the run recorded them."""
    found: Json = read_object(run.folder.environment_file, problems)
    names = ("python", "platform", "versions", "git_commit", "git_dirty", "command")
    return redact({name: found.get(name) for name in names})  # type: ignore[no-any-return]  # a mapping stays one


def numbers_of(record: Mapping[str, Any]) -> Json:
    """Return a record of metrics with null for what is no finite number."""
    return {name: value if name == "step" else _number(value) for name, value in record.items()}


def _thinned(lines: Sequence[Json], most: int) -> list[int]:
    """Return the indices of at most about `most` lines: evenly spread, those with an evaluation, and the last."""
    if len(lines) <= most:
        return list(range(len(lines)))
    even = {round(index * (len(lines) - 1) / (most - 1)) for index in range(most)}
    held_out = _names(lines, "eval/")
    evaluated = [index for index, line in enumerate(lines) if not held_out.isdisjoint(line)]
    return sorted(even.union(evaluated[-most:]))


def _names(lines: Iterable[Json], *beginnings: str) -> set[str]:
    """Return the names of metrics that begin so; to ask each of all lines takes longer than all else about them."""
    return {name for name in set[str]().union(*lines) if name.startswith(beginnings)}


def _sums(lines: Sequence[Json], name: str) -> list[float]:
    total, sums = 0.0, []
    for line in lines:
        total += _number(line.get(name)) or 0.0
        sums.append(total)
    return sums


def _predicted_bytes(sizing: Mapping[str, Any]) -> float | None:
    """What the fitted model says of a micro-batch of the size that was chosen."""
    try:
        model, tokens = sizing["model"], sizing["tokens"]
        per_length = model["bytes_per_position_and_length"] * model["longest"]
        return _number(model["base_bytes"] + (model["bytes_per_position"] + per_length) * tokens)
    except (KeyError, TypeError):
        return None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]  # it is one
