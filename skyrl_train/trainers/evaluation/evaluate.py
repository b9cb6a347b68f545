"""Evaluation on held-out prompts: accuracy, pass@k, turns and lengths, in all and by environment and data source.

A trajectory is right where its environment says so in the metric `solved`; without such a metric, where its total
reward is at least 1. A failed trajectory is neither right nor wrong: it is left out and counted. What was measured stays in
`evaluation.json`, and a run ends with a table of its first and its last evaluation.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from skyrl_train.errors import DataError, counted
from skyrl_train.interfaces import Generator
from skyrl_train.system.files import write_json
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams, Trajectory

DECLARED_METRICS = """
eval/accuracy | share | Right answers: mean over prompts of their samples' share. | evaluations | verl
    `val-core/<source>/acc/mean@N`; SkyRL `eval/all/avg_score`
eval/accuracy_first_turn | share | The same, right in the first turn. | evaluations
eval/pass@<k> | share | Unbiased probability that one of k samples is right. | evaluations | verl
    `val-core/<source>/acc/best@N/mean`; SkyRL `eval/all/pass_at_N`
eval/reward_mean | reward | Mean total reward. | evaluations | TRL `eval_reward`
eval/turns_mean | count | Mean turns. | evaluations | verl `val-aux/num_turns/mean`
eval/response_length_mean | tokens | Mean sampled tokens. | evaluations | TRL `eval_completions/mean_length`; SkyRL
    `eval/all/generate/avg_num_tokens`
eval/failed | count | Failed trajectories, neither right nor wrong. | evaluations
eval/<part>/{accuracy,accuracy_first_turn,pass@<k>,reward_mean,turns_mean,response_length_mean,failed} | | The same of a
    part: `dataset=NAME`, `env_class=NAME`, `data_source=NAME`. | where several
"""

SOLVED_REWARD = 1.0
"""Total reward from which a trajectory counts as right where its environment reports no `solved`."""
SEED_STEP = 0
"""Enters the seeds of every evaluation in place of the step: the same prompts meet the same random numbers each time,
so that a difference between two evaluations comes from the weights."""


@dataclass(frozen=True, kw_only=True)
class EvaluationFigures:
    """What a set of trajectories achieved. None where no trajectory of the set is left to measure it on."""

    num_prompts: int
    num_trajectories: int
    num_failed: int
    failures: Mapping[str, int]
    """Failed trajectories by kind."""
    accuracy: float | None
    """Mean over prompts of the share of right samples; with one sample per prompt, the share of right answers."""
    accuracy_first_turn: float | None
    """The same for answers that were right in the first turn."""
    pass_at: Mapping[int, float]
    """k to the probability that at least one of k samples is right, for k = 1, 2, 4, ... and all samples."""
    reward_mean: float | None
    turns_mean: float | None
    response_length_mean: float | None
    """Tokens sampled in all turns together."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of one evaluation."""

    global_step: int
    n_samples_per_prompt: int
    overall: EvaluationFigures
    parts: Mapping[str, EvaluationFigures]
    """By `dataset=NAME` (of a mix), `env_class=NAME` and `data_source=NAME`, where there is more than one of them."""

    def metrics(self) -> dict[str, float]:
        """`eval/accuracy`, `eval/pass@4`, ..., and `eval/data_source=NAME/accuracy` for the parts."""
        metrics = _metrics_of(self.overall, "eval")
        for name, figures in self.parts.items():
            metrics |= _metrics_of(figures, f"eval/{name}")
        return metrics

    def line(self) -> str:
        """`evaluation at step 10: accuracy 0.652, first turn 0.610, reward 0.634, 2 of 256 trajectories failed`."""
        figures = self.overall
        values = {
            "accuracy": figures.accuracy,
            "first turn": figures.accuracy_first_turn,
            **{f"pass@{k}": value for k, value in figures.pass_at.items() if k > 1},
            "reward": figures.reward_mean,
        }
        parts = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
        if figures.num_failed:
            parts.append(f"{figures.num_failed} of {figures.num_trajectories} trajectories failed")
        return f"evaluation at step {self.global_step}: {', '.join(parts)}"


RolloutHook = Callable[[int, RolloutBatch], None]
"""Called with (step, all rollouts of the evaluation)."""


class Evaluator:
    """Evaluates whatever weights the generator has."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParams,
        n_samples_per_prompt: int,
        batch_size: int,
        env_class: str | None,
        on_rollouts: RolloutHook | None = None,
    ) -> None:
        """`env_class` is the environment of all prompts; None stands for each prompt's own. `batch_size` counts
        prompts; it does not change the result of an engine whose samples depend on their seeds alone."""
        self._generator = generator
        self._prompts = tuple(prompts)
        self._sampling = sampling
        self._n_samples_per_prompt = n_samples_per_prompt
        self._batch_size = batch_size
        self._env_class = env_class
        self._on_rollouts = on_rollouts

    def evaluate(self, global_step: int) -> EvaluationResult:
        """One pass over the held-out prompts. `global_step` labels the result and does not enter the seeds."""
        trajectories: list[Trajectory] = []
        for start in range(0, len(self._prompts), self._batch_size):
            part = self._generator.generate(
                self._prompts[start : start + self._batch_size],
                n_samples_per_prompt=self._n_samples_per_prompt,
                sampling=self._sampling,
                global_step=SEED_STEP,
                purpose="eval",
            )
            trajectories += part.trajectories
        rollouts = RolloutBatch(
            prompts=self._prompts,
            trajectories=tuple(trajectories),
            n_samples_per_prompt=self._n_samples_per_prompt,
        )
        if self._on_rollouts is not None:
            self._on_rollouts(global_step, rollouts)
        groups = groups_of(rollouts)
        return EvaluationResult(
            global_step=global_step,
            n_samples_per_prompt=self._n_samples_per_prompt,
            overall=measure([group for _, group in groups]),
            parts={name: measure(part) for name, part in self._parts(groups)},
        )

    def _parts(
        self, groups: Sequence[tuple[Prompt, tuple[Trajectory, ...]]]
    ) -> Iterator[tuple[str, list[tuple[Trajectory, ...]]]]:
        for column in ("dataset", "env_class", "data_source"):
            parts: dict[str, list[tuple[Trajectory, ...]]] = defaultdict(list)
            for prompt, group in groups:
                parts[self._value_of(prompt, column)].append(group)
            if len(parts) > 1:
                for value in sorted(parts):
                    yield f"{column}={value}", parts[value]

    def _value_of(self, prompt: Prompt, column: str) -> str:
        if column == "dataset":
            return prompt.dataset
        if column == "env_class":
            return self._env_class or str(prompt.env_class)
        return str(prompt.extras.get(column, "none"))


def groups_of(rollouts: RolloutBatch) -> list[tuple[Prompt, tuple[Trajectory, ...]]]:
    """Each prompt with its trajectories."""
    size = rollouts.n_samples_per_prompt
    return [
        (prompt, rollouts.trajectories[index * size : (index + 1) * size])
        for index, prompt in enumerate(rollouts.prompts)
    ]


def is_solved(trajectory: Trajectory) -> bool:
    """Right in the end. Raises ValueError for a failed trajectory."""
    solved = trajectory.metrics.get("solved")
    return trajectory.reward >= SOLVED_REWARD if solved is None else solved >= 0.5


def is_solved_first_turn(trajectory: Trajectory) -> bool:
    """Right in the first turn: the metric `solved_first_turn`, or else that turn's reward."""
    solved = trajectory.metrics.get("solved_first_turn")
    return trajectory.turns[0].reward >= SOLVED_REWARD if solved is None else solved >= 0.5


def response_length(trajectory: Trajectory) -> int:
    """Tokens sampled in all turns."""
    return sum(turn.num_response_tokens for turn in trajectory.turns)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that one of `k` samples is right, from `num_samples`, `num_right` of them
    right: `1 - C(n - c, k) / C(n, k)` (Chen et al., arXiv:2107.03374, equation 1).

    Raises ValueError unless `1 <= k <= num_samples`.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {counted(num_samples, 'sample')}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def measure(groups: Sequence[Sequence[Trajectory]]) -> EvaluationFigures:
    """Figures of prompts, given the trajectories of each.

    Failed trajectories are left out of all but their counts; a prompt all of whose trajectories failed is left out of
    the accuracies, and out of pass@k where fewer than k are left.
    """
    everything = [trajectory for group in groups for trajectory in group]
    kept_groups = [[trajectory for trajectory in group if not trajectory.failed] for group in groups]
    kept = [trajectory for group in kept_groups for trajectory in group]
    counts = [(len(group), sum(map(is_solved, group))) for group in kept_groups if group]
    first = [sum(map(is_solved_first_turn, group)) / len(group) for group in kept_groups if group]
    largest = max((len(group) for group in groups), default=0)
    pass_at = {k: _mean([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in _sample_counts(largest)}
    return EvaluationFigures(
        num_prompts=len(groups),
        num_trajectories=len(everything),
        num_failed=len(everything) - len(kept),
        failures=dict(Counter(sorted(t.failure.kind.value for t in everything if t.failure is not None))),
        accuracy=_mean([c / n for n, c in counts]),
        accuracy_first_turn=_mean(first),
        pass_at={k: value for k, value in pass_at.items() if value is not None},
        reward_mean=_mean([trajectory.reward for trajectory in kept]),
        turns_mean=_mean([float(len(trajectory.turns)) for trajectory in kept]),
        response_length_mean=_mean([float(response_length(trajectory)) for trajectory in kept]),
    )


def _sample_counts(largest: int) -> list[int]:
    """`1, 2, 4, ...` up to and including `largest`."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return sorted({*powers, largest}) if largest else []


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _metrics_of(figures: EvaluationFigures, prefix: str) -> dict[str, float]:
    values: dict[str, float | None] = {
        "accuracy": figures.accuracy,
        "accuracy_first_turn": figures.accuracy_first_turn,
        "reward_mean": figures.reward_mean,
        "turns_mean": figures.turns_mean,
        "response_length_mean": figures.response_length_mean,
        "failed": float(figures.num_failed),
        **{f"pass@{k}": value for k, value in figures.pass_at.items()},
    }
    return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


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


def evaluation_table(*results: EvaluationResult) -> Table:
    """One evaluation, or the first and the last side by side with what changed; parts (environments, data sources) below
    the whole."""
    last = results[-1]
    samples = f"{counted(last.n_samples_per_prompt, 'sample')} each"
    title = f"Held-out evaluation ({counted(last.overall.num_prompts, 'prompt')}, {samples})"
    table = Table("", title=title, box=box.SIMPLE_HEAD, title_style="bold", min_width=60)
    names = ("before (step {})", "after (step {})") if len(results) > 1 else ("step {}",)
    headings = [name.format(result.global_step) for name, result in zip(names, results)]
    for heading in [*headings, "change"] if len(results) > 1 else headings:
        table.add_column(heading, justify="right")

    def add_row(name: str, values: Sequence[float | None], digits: int) -> None:
        cells = ["-" if value is None else f"{value:.{digits}f}" for value in values]
        known = [value for value in values if value is not None]
        table.add_row(name, *cells, *([f"{known[1] - known[0]:+.{digits}f}"] if len(known) > 1 else []))

    rows = [_rows(result.overall) for result in results]
    for name, (_, digits) in rows[-1].items():
        add_row(name, [each[name][0] if name in each else None for each in rows], digits)
    table.add_row("failed trajectories", *(_failures(result.overall) for result in results))
    for part in last.parts:
        of_part = [result.parts.get(part) for result in results]
        add_row(f"accuracy, {part}", [None if figures is None else figures.accuracy for figures in of_part], 3)
    return table


def _rows(figures: EvaluationFigures) -> dict[str, tuple[float | None, int]]:
    """The value and its digits, by the name of the line."""
    return {
        "accuracy": (figures.accuracy, 3),
        "accuracy, first turn": (figures.accuracy_first_turn, 3),
        **{f"pass@{k}": (value, 3) for k, value in figures.pass_at.items() if k > 1},
        "mean reward": (figures.reward_mean, 3),
        "turns used": (figures.turns_mean, 2),
        "response length (tokens)": (figures.response_length_mean, 1),
    }


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
