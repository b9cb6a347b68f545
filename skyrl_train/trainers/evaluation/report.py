"""`evaluation.json`, and the table of the first and the last evaluation that a run ends with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from skyrl_train.errors import DataError, counted
from skyrl_train.system.files import write_json
from skyrl_train.trainers.evaluation.evaluate import EvaluationFigures, EvaluationResult


def read_evaluations(path: Path) -> list[EvaluationResult]:
    """The evaluations of a run in order of their steps; none where the file is absent. Raises DataError where it is not
    what `write_evaluation` wrote."""
    if not path.exists():
        return []
    try:
        return [_result(entry) for entry in json.loads(path.read_text())["evaluations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not an evaluation file ({type(error).__name__}: {error}). Move it away.") from error


def write_evaluation(path: Path, result: EvaluationResult) -> None:
    """Adds the evaluation, in place of an earlier one at the same step."""
    others = [other for other in read_evaluations(path) if other.global_step != result.global_step]
    _write(path, sorted([*others, result], key=lambda entry: entry.global_step))


def cut_evaluations_after(path: Path, step: int) -> None:
    """Drops evaluations of later steps, which a resumed run repeats."""
    results = read_evaluations(path)
    kept = [result for result in results if result.global_step <= step]
    if len(kept) < len(results):
        _write(path, kept)


def evaluation_table(before: EvaluationResult, after: EvaluationResult) -> Table:
    """Both evaluations side by side, with what changed; parts (environments, data sources) below the whole."""
    table = _empty_table(after)
    table.add_column(f"before (step {before.global_step})", justify="right")
    table.add_column(f"after (step {after.global_step})", justify="right")
    table.add_column("change", justify="right")
    for name, value_of, digits in _rows(after.overall):
        _add_row(table, name, value_of(before.overall), value_of(after.overall), digits)
    table.add_row("failed trajectories", _failures(before.overall), _failures(after.overall), "")
    for part in after.parts:
        old = before.parts.get(part)
        _add_row(table, f"accuracy, {part}", old.accuracy if old else None, after.parts[part].accuracy, 3)
    return table


def figures_table(result: EvaluationResult) -> Table:
    """Return the table of one evaluation by itself."""
    table = _empty_table(result)
    table.add_column(f"step {result.global_step}", justify="right")
    for name, value_of, digits in _rows(result.overall):
        table.add_row(name, _shown(value_of(result.overall), digits))
    table.add_row("failed trajectories", _failures(result.overall))
    for part, figures in result.parts.items():
        table.add_row(f"accuracy, {part}", _shown(figures.accuracy, 3))
    return table


def evaluation_line(result: EvaluationResult) -> str:
    """`evaluation at step 10: accuracy 0.652, first turn 0.610, reward 0.634, 2 of 256 trajectories failed`."""
    figures = result.overall
    values = {
        "accuracy": figures.accuracy,
        "first turn": figures.accuracy_first_turn,
        **{f"pass@{k}": value for k, value in figures.pass_at.items() if k > 1},
        "reward": figures.reward_mean,
    }
    parts = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
    if figures.num_failed:
        parts.append(f"{figures.num_failed} of {figures.num_trajectories} trajectories failed")
    return f"evaluation at step {result.global_step}: {', '.join(parts)}"


def _empty_table(result: EvaluationResult) -> Table:
    samples = f"{counted(result.n_samples_per_prompt, 'sample')} each"
    title = f"Held-out evaluation ({counted(result.overall.num_prompts, 'prompt')}, {samples})"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", min_width=60)
    table.add_column("")
    return table


def _rows(figures: EvaluationFigures) -> list[tuple[str, Callable[[EvaluationFigures], float | None], int]]:
    """Name, value and digits of each line."""
    rows: list[tuple[str, Callable[[EvaluationFigures], float | None], int]] = [
        ("accuracy", lambda f: f.accuracy, 3),
        ("accuracy, first turn", lambda f: f.accuracy_first_turn, 3),
    ]
    rows += [(f"pass@{k}", lambda f, k=k: f.pass_at.get(k), 3) for k in figures.pass_at if k > 1]  # type: ignore[misc]
    return [
        *rows,
        ("mean reward", lambda f: f.reward_mean, 3),
        ("turns used", lambda f: f.turns_mean, 2),
        ("response length (tokens)", lambda f: f.response_length_mean, 1),
    ]


def _add_row(table: Table, name: str, old: float | None, new: float | None, digits: int) -> None:
    change = "" if old is None or new is None else f"{new - old:+.{digits}f}"
    table.add_row(name, _shown(old, digits), _shown(new, digits), change)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _failures(figures: EvaluationFigures) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in figures.failures.items())
    return f"{figures.num_failed} of {figures.num_trajectories}" + (f" ({kinds})" if kinds else "")


def _write(path: Path, results: Sequence[EvaluationResult]) -> None:
    write_json(path, {"evaluations": [asdict(result) for result in results]})


def _result(entry: dict[str, Any]) -> EvaluationResult:
    parts = {name: _figures(part) for name, part in entry["parts"].items()}
    return EvaluationResult(**{**entry, "overall": _figures(entry["overall"]), "parts": parts})


def _figures(entry: dict[str, Any]) -> EvaluationFigures:
    """Return figures as they were: JSON made text of the keys of `pass_at`."""
    return EvaluationFigures(**{**entry, "pass_at": {int(k): value for k, value in entry["pass_at"].items()}})
