"""What a simulation is given by a run that was made: how long its samples are, and how fast its parts were.

    rollouts/*.parquet  --recorded_lengths-->  Lengths        turns of each sample, prompt by prompt
    metrics.jsonl, timeline.jsonl  --run_rates-->  RunRates   of a serial run whose engine goes in waves (hf)

Lengths come from recorded rollouts, from pairs of numbers, or from a stated long-tailed distribution. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.simulated_engines import (
    SimulatedTurn,
)
from scripts.studies.simulation import LearnerRates, SimulatedGroup
from skyrl_train.errors import DataError
from skyrl_train.plan.forms import EngineRates
from skyrl_train.system import derive_seed
from skyrl_train.telemetry import phase_seconds, read_metrics
from skyrl_train.telemetry.records import read_rollouts, read_timeline
from skyrl_train.types import RolloutBatch, Trajectory

Turns = tuple[tuple[int, int, int], ...]
"""Of a sample: new tokens of each prompt, all tokens that it begins with, tokens of its answer."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What an environment takes for each answer: log-normal around a median."""

    median_s: float = 0.0
    sigma: float = 0.0
    """Of the logarithm; 0 is the same each time."""

    @staticmethod
    def of_mean(mean_s: float, sigma: float) -> Latency:
        """Return the one that takes `mean_s` in the mean."""
        return Latency(median_s=mean_s / math.exp(sigma * sigma / 2), sigma=sigma)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of the samples of some prompts."""

    source: str
    """Where they come from, for the reader."""
    prompts: tuple[tuple[Turns, ...], ...]

    def groups(self, *, samples: int, seed: int, latency: Latency) -> Callable[[int], SimulatedGroup]:
        """Return what draws the group at each place of the order of the data: `samples` of a prompt's own. The first has the
        prompt's tokens to compute, which the others find computed."""

        def make_group(ordinal: int) -> SimulatedGroup:
            rng = np.random.default_rng(derive_seed(seed, "simulated_group", ordinal))
            known = self.prompts[int(rng.integers(len(self.prompts)))]
            chosen = rng.choice(len(known), samples, replace=len(known) < samples)
            group = []
            for number, index in enumerate(chosen.tolist()):
                waits = latency.median_s * np.exp(latency.sigma * rng.standard_normal(len(known[index])))
                group.append(
                    [
                        SimulatedTurn(
                            prompt_tokens=0 if number and not place else new,
                            context_tokens=context,
                            response_tokens=response,
                            environment_s=wait,
                        )
                        for place, ((new, context, response), wait) in enumerate(zip(known[index], waits.tolist()))
                    ]
                )
            return group

        return make_group


@dataclass(frozen=True, kw_only=True)
class RunRates:
    """What a run measured."""

    engine: EngineRates
    learner: LearnerRates
    environment_s: float
    """Mean wait for an answer of an environment."""
    engine_error: float
    """Relative standard deviation of what the rates say of waves to what they took."""


def recorded_lengths(rollouts: Iterable[RolloutBatch], *, source: str) -> Lengths:
    """Return the lengths of recorded rollouts; failed samples are left out. Raises DataError where none is left."""
    prompts: list[tuple[Turns, ...]] = []
    for batch in rollouts:
        of_prompt: dict[str, list[Turns]] = {}
        for trajectory in batch.trajectories:
            if trajectory.turns and not trajectory.failed:
                of_prompt.setdefault(trajectory.prompt_uid, []).append(_turns(trajectory))
        prompts += map(tuple, of_prompt.values())
    if not prompts:
        raise DataError(f"{source}: no rollouts that have not failed, so there are no lengths to simulate with")
    return Lengths(source=source, prompts=tuple(prompts))


def paired_lengths(pairs: Iterable[tuple[int, int]], *, source: str) -> Lengths:
    """Return lengths of prompts with one answer each, (tokens of the prompt, of the answer). A group of a prompt draws its
    samples among the answers to all, as of one prompt there is but one. Raises DataError for no pairs."""
    known = [(max(1, prompt), max(1, response)) for prompt, response in pairs]
    if not known:
        raise DataError(f"{source}: no lengths to simulate with")
    answers = [response for _, response in known]
    rng = np.random.default_rng(derive_seed(0, "paired_lengths"))
    return Lengths(
        source=source,
        prompts=tuple(
            tuple(((prompt, prompt, answers[index]),) for index in rng.integers(len(answers), size=16).tolist())
            for prompt, _ in known
        ),
    )


def stated_lengths(*, prompt: int, median: int, sigma: float, longest: int, num_prompts: int = 1024) -> Lengths:
    """Return lengths of one turn: prompts of `prompt` tokens and answers log-normal around `median`, cut at `longest`."""
    rng = np.random.default_rng(derive_seed(0, "stated_lengths"))
    answers = np.clip(median * np.exp(sigma * rng.standard_normal(num_prompts)), 1, longest).astype(np.int64)
    stated = (
        f"stated: prompts of {prompt:,}, answers log-normal around {median:,} (sigma {sigma:g}), at most {longest:,}"
    )
    return paired_lengths(((prompt, answer) for answer in answers.tolist()), source=stated)


def rollouts_of(folder: Path, steps: slice = slice(None)) -> list[RolloutBatch]:
    """Return the training rollouts of a run's steps. Raises DataError."""
    files = sorted((folder / "rollouts").glob("train_step_*"))[steps]
    return [batch for file in files for batch in read_rollouts(file).values()]


def run_rates(folder: Path, *, warm_up: int = 1) -> RunRates:
    """Return the rates of a serial run in one process, whose engine goes in waves; the first `warm_up` steps are left out.

    Raises DataError for a run that has no steps, or a stream, of which it is not known what a wave was.
    """
    records = _records(folder, warm_up)
    if _is_stream(records):
        raise DataError(f"{folder}: an engine's rates are taken of a serial run, with trainer.max_staleness=0")
    batches = rollouts_of(folder, slice(warm_up, None))
    engine, error = _engine_rates(folder, records, batches)
    num_turns = sum(len(each.turns) for batch in batches for each in batch.trajectories)
    return RunRates(
        engine=engine,
        learner=learner_rates(folder, warm_up=warm_up),
        environment_s=_sum(records, "timing/wait/environments") / num_turns,
        engine_error=error,
    )


def learner_rates(folder: Path, *, warm_up: int = 1) -> LearnerRates:
    """Return the rates of a run's learner. Those of a run with a stream are beside an engine that computes, with which it
    may share cores and an interpreter; its syncs hold their wait for the engine. Raises DataError for no steps."""
    records = _records(folder, warm_up)
    computed = _sum(records, "timing/update") + _sum(records, "timing/score")
    beside = sum(
        seconds for record in records for name, seconds in phase_seconds(record).items() if name not in _NOT_EACH_STEP
    )
    return LearnerRates(
        token_s=computed / _sum(records, "batch/tokens"),
        step_s=beside / len(records),
        sync_s=_sum(records, "timing/sync") / len(records),
    )


def _records(folder: Path, warm_up: int) -> list[dict[str, Any]]:
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "timing/generate" in record]
    if len(records) <= warm_up:
        raise DataError(f"{folder}: {len(records)} steps in its metrics.jsonl, of which {warm_up} are left out")
    return records[warm_up:]


def _is_stream(records: Sequence[Mapping[str, Any]]) -> bool:
    return any("timing/wait/rollouts" in record for record in records)


_NOT_EACH_STEP = ("generate", "sync", "update", "score", "evaluate", "checkpoint")
"""Phases that are counted by themselves, or not at all."""


def _engine_rates(
    folder: Path, records: Sequence[Mapping[str, Any]], batches: Sequence[RolloutBatch]
) -> tuple[EngineRates, float]:
    """Fit what waves took, or whole steps where the spans of the timeline are not those of the waves."""
    spans = {
        line.step: [end - begin for begin, end in line.engine] for line in read_timeline(folder / "timeline.jsonl")
    }
    counts: list[list[float]] = []
    seconds: list[float] = []
    for record, batch in zip(records, batches):
        waves = _waves(batch)
        measured = spans.get(int(record["step"]), [])
        if len(measured) != len(waves):
            waves, measured = [[sum(column) for column in zip(*waves)]], [record["timing/engine/busy"]]
        counts += waves
        seconds += measured
    x, y = np.array(counts, dtype=np.float64), np.array(seconds, dtype=np.float64)
    found = _non_negative(x / y[:, None], np.ones_like(y))
    error = float(np.sqrt(np.mean((x @ found / y - 1) ** 2)))
    step_s, sequence_s, prompt_s = found.tolist()
    return EngineRates(step_s=step_s, sequence_s=sequence_s, prompt_token_s=prompt_s, batching="waves"), error


def _waves(batch: RolloutBatch) -> list[list[float]]:
    """Of each wave of a serial batch: steps of decoding, tokens of answers, tokens of prompts that are computed."""
    samples = [_turns(each) for each in batch.trajectories if each.turns]
    firsts = {each.prompt_uid: len(each.turns[0].added_token_ids) for each in batch.trajectories if each.turns}
    waves = []
    for place in range(max(map(len, samples))):
        turns = [sample[place] for sample in samples if len(sample) > place]
        answers = [response for _, _, response in turns]
        new = sum(firsts.values()) if place == 0 else sum(new for new, _, _ in turns)
        waves.append([float(max(answers)), float(sum(answers)), float(new)])
    return waves


def _non_negative(x: Any, y: Any) -> Any:
    """Least squares without negative factors: the best of those over some of the few columns."""
    best, least = np.zeros(x.shape[1]), math.inf
    for size in range(1, x.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(x.shape[1]), size)):
            factors = np.linalg.lstsq(x[:, columns], y, rcond=None)[0]
            rest = float(((x[:, columns] @ factors - y) ** 2).sum())
            if (factors >= 0).all() and rest < least:
                best, least = np.zeros(x.shape[1]), rest
                best[columns] = factors
    return best


def _turns(trajectory: Trajectory) -> Turns:
    return tuple(
        (len(turn.added_token_ids), context, len(turn.response_token_ids))
        for turn, context in zip(trajectory.turns, trajectory.prompt_lengths())
    )


def _sum(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(float(record.get(name, 0.0)) for record in records)
