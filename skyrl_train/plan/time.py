"""How long a run takes, on how many devices, and what it leaves on disk: from rates that were measured or stated.

    metrics.jsonl of a run, or stated rates --> Rates of one rank --the plan's own tokens and positions--> seconds by phase

Rates are of work, not of steps: tokens that are sampled, positions that are scored or trained, each a second and rank. So
the steps of a run with other batches, lengths or layouts follow from those of one that was made. A rank stands for its
share of the engines too. No torch.

Where rollouts are made while the learner updates, a step follows from what its phases take one after the other:

    L_k  seconds from the begin of batch k's rollouts to the end of the last of them, nothing else beside them
    E    seconds of them in which the engine computes: what a batch costs it however many are in flight
    U    seconds of the learner: rows, scores, update, records, its share of evaluations and checkpoints
    S    seconds of a weight sync, in which neither does anything else

A serial step is L + U + S. With `trainer.max_staleness=s` the groups of batch k begin when version k - s is published, at
`P[k - s]`, and are due in batch k:

    F[k]      the engine's end of batch k, max(F[k - 1], P[k - s]) + E + S
    P[k + 1]  max(P[k], P[k - s] + L_k, F[k]) + U + S

A step is the mean distance of P over many batches whose L_k are drawn from those that were measured: stragglers do not
average out, since each holds up the batch that it is due in. For equal L it is max(U + S, E + S, (L + U + S) / (1 + s)).
`tests/unit/plan/test_pipeline.py` holds it against the rules of `rollout/admission.py` with a clock.

Where engine and learner take turns on the same devices their work adds up: a step is E + U + S at least. Where they share
cores without turns, as a laptop's, it is somewhere between, and how far is not predicted.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_train.config import PlanConfig, RolloutsConfig, TrainerConfig
from skyrl_train.errors import DataError, byte_size, counted, three_digits
from skyrl_train.plan.batch_plan import BatchPlan, ceil_div, optimizer_state_bytes
from skyrl_train.plan.estimate import PassEstimate, RowLengths, sampled_lengths
from skyrl_train.telemetry import phase_seconds

SHOWN = (0, 1, 2, 4, 8)
"""Values of `trainer.max_staleness` that a plan compares."""
_WORTH = 0.05
"""A larger one pays where a step is shorter by this share, at least."""
_ROUNDS = 1000
"""Batches that are drawn, for each that may be pending."""
FORWARD_SHARE = 3.0
"""How much faster a position is scored than trained, where no scoring was measured: one product of three."""
_WARM_UP_STEPS = 1
"""Steps of a run that are left out where there are others: kernels are chosen and caches filled in them."""
_EACH_TIME = ("checkpoint", "evaluate")
"""Phases that not every step has."""
_ROLLOUT_BYTES = 8.0
"""What a token takes of a rollout file: id, engine log-probability and text (`scripts/bench/rollout_store.py`)."""
_COLUMN_BYTES = {"float32": 3.5, "bfloat16": 1.5}
"""What a log-probability of the trainer takes there; advantages, which are equal over a trajectory, take next to nothing."""


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """What training batches take; see the head of this file."""

    rollouts_s: tuple[float, ...]
    """Of some batches."""
    engine_s: float
    learner_s: float
    sync_s: float

    def step_s(self, max_staleness: int, *, takes_turns: bool = False) -> float:
        """Return the seconds of a step; `takes_turns`: engine and learner share devices, one of them at a time."""
        own = self.learner_s + self.sync_s
        if max_staleness == 0:
            return sum(self.rollouts_s) / len(self.rollouts_s) + own
        draw, pending = random.Random(0), 1 + max_staleness
        published, engine_ends = [0.0] * pending, 0.0
        for _ in range(_ROUNDS * pending):
            began = published[-pending]
            engine_ends = max(engine_ends, began) + self.engine_s + self.sync_s
            rollouts_end = max(began + draw.choice(self.rollouts_s), engine_ends)
            published.append(max(published[-1], rollouts_end) + own)
        # A whole number of rounds, without the first: batches that begin together end together.
        counted = (_ROUNDS - _ROUNDS // 10) * pending
        step_s = (published[-1] - published[-1 - counted]) / counted
        return max(step_s, self.engine_s + own) if takes_turns else step_s

    def limit(self, max_staleness: int, *, takes_turns: bool = False) -> str:
        """Return what a step waits for in the end: `rollouts`, `the engine`, `the learner` or `the devices they share`."""
        both = self.engine_s + self.learner_s if takes_turns else max(self.engine_s, self.learner_s)
        if self.step_s(max_staleness, takes_turns=takes_turns) > (1 + _WORTH) * (both + self.sync_s):
            return "rollouts"
        if takes_turns:
            return "the devices they share"
        return "the engine" if self.engine_s > self.learner_s else "the learner"

    def best_staleness(self, *, takes_turns: bool = False) -> int:
        """Return the smallest of `SHOWN` beyond which none makes a step shorter by 5 %."""
        best = 0
        for candidate in SHOWN[1:]:
            if self.step_s(candidate, takes_turns=takes_turns) <= (1 - _WORTH) * self.step_s(
                best, takes_turns=takes_turns
            ):
                best = candidate
        return best


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast one rank with its share of the engines is; 0 is not known."""

    source: str
    """Where they are from, for the reader of the plan."""
    generated: float
    """Tokens that are sampled a second."""
    scored: float
    """Positions of forwards alone a second."""
    trained: float
    """Positions of forwards and backwards a second."""
    layout: str = ""
    """That of the measured forwards; empty is not known."""
    positions_per_token: float = 0.0
    """What that layout computed for each token of a batch: it finds more prefixes in common than lengths show."""
    sampled_share: float = 0.0
    """Share of a batch's tokens that were sampled; 0: what the prompts leave."""
    every_step_s: float = 0.0
    """What each step takes beside: rows are made, advantages estimated, records written, weights sent."""
    sync_s: float = 0.0
    """What of that a weight sync is."""
    engine_share: float = 1.0
    """Share of the rollouts' time in which the engine computes."""
    lengths: tuple[float, ...] = (1.0,)
    """How long the rollouts of each batch took, as shares of their mean."""
    each_time_s: tuple[float, float] = (0.0, 0.0)
    """Of one checkpoint, and of one evaluation."""


NO_TIME = "none"
"""`plan.rates`: nothing is measured, and no time predicted."""
NO_RATES = Rates(source="", generated=0.0, scored=0.0, trained=0.0)
"""Of work whose positions follow from the plan alone."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase of a step, in the mean over the run."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a run's phases, by rates that were measured or stated."""

    source: str
    phases: tuple[PhaseTime, ...]
    total_steps: int
    num_devices: int
    pipeline: PhaseTimes
    """What the phases take one after the other."""
    takes_turns: bool = False
    """Whether engine and learner have the same devices, one of them at a time."""

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def device_hours(self) -> float:
        return self.step_s * self.total_steps * self.num_devices / 3600


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step of a run computes, over all ranks."""

    sampled_tokens: float
    scored_positions: float
    trained_positions: float
    num_ranks: int


def rates_of(plan: PlanConfig) -> Rates | None:
    """Return stated rates, and for what is not stated those of the run in `plan.rates`; None where there are neither, so
    that the machine's are left.

    Raises DataError where the run has no metrics to take rates from.
    """
    stated = plan.generated_tokens_per_second, plan.scored_tokens_per_second, plan.trained_tokens_per_second
    if plan.rates in ("", NO_TIME):
        if not all(stated[::2]):
            return None
        return Rates(source="stated", generated=stated[0], scored=stated[1], trained=stated[2])
    measured = measured_rates(Path(plan.rates))
    return replace(
        measured,
        source=f"{measured.source}{', some stated' if any(stated) else ''}",
        generated=stated[0] or measured.generated,
        scored=stated[1] or measured.scored,
        trained=stated[2] or measured.trained,
    )


def measured_rates(folder: Path) -> Rates:
    """Return the rates of the run in `folder`, from its `metrics.jsonl` and the ranks of its `plan.json`.

    Raises DataError where there are no steps in it.
    """
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        learners = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["learners"]
        ranks = int(learners[0]["num_ranks"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"plan.rates={folder}: no metrics.jsonl and plan.json of a run ({error})") from error
    steps = [record for record in records if record.get("timing/step") and record.get("batch/tokens")]
    if not steps:
        raise DataError(f"plan.rates={folder}: its metrics.jsonl has no step whose time was taken")
    steps = steps[_WARM_UP_STEPS:] or steps
    trained = [name for name in steps[0] if name.startswith("layout/") and name.endswith("_positions")]
    prefix = "layout/policy_forwards_"
    forwards = {name: _sum(steps, name) for name in steps[0] if name.startswith(prefix)}
    per_token = _sum(steps, "layout/policy_positions") / max(1.0, _sum(steps, "layout/policy_tokens"))
    scored = per_token * sum(record["batch/tokens"] * _models_scored(record) for record in steps)
    known = {"generate", "score", "update", *_EACH_TIME}
    beside = [seconds for each in map(phase_seconds, steps) for name, seconds in each.items() if name not in known]
    phases = measured_phases(steps)
    made_s = rollout_seconds(steps)
    mean_s = sum(made_s) / len(made_s)
    return Rates(
        source=f"measured in {counted(len(steps), 'step')} of {folder}",
        generated=_over(_sum(steps, "batch/trained_tokens"), mean_s * len(steps), ranks),
        scored=_over(scored, _sum(steps, "timing/score"), ranks),
        trained=_over(sum(_sum(steps, name) for name in trained), _sum(steps, "timing/update"), ranks),
        layout=max(forwards, key=lambda name: forwards[name], default=prefix).removeprefix(prefix),
        positions_per_token=per_token,
        sampled_share=_sum(steps, "batch/trained_tokens") / _sum(steps, "batch/tokens"),
        every_step_s=sum(beside) / len(steps),
        sync_s=phases.sync_s,
        engine_share=min(1.0, phases.engine_s / (mean_s or math.inf)),
        lengths=tuple(seconds / (mean_s or math.inf) for seconds in made_s),
        each_time_s=(_mean(records, "timing/checkpoint"), _mean(records, "timing/evaluate")),
    )


def measured_phases(records: Sequence[Mapping[str, float]]) -> PhaseTimes:
    """Return what the steps of a run took, from their records, evaluations and checkpoints aside.

    Of a serial run the rollouts are the phase `generate`. Of one with a stream that is what the learner waited, and the
    rollouts are the longest group of each step. Raises ValueError for no records.
    """
    if not records:
        raise ValueError("no records of steps")
    engine, learner, sync = 0.0, 0.0, 0.0
    # What an engine computes for an evaluation is not told apart.
    plain = [record for record in records if "timing/evaluate" not in record] or records
    for record in plain:
        seconds = phase_seconds(record)
        beside = {name: seconds.get(name, 0.0) for name in ("generate", "sync", "evaluate", "checkpoint")}
        engine += record.get("timing/engine/busy", beside["generate"])
        learner += record["timing/step"] - sum(beside.values())
        sync += beside["sync"]
    count = len(plain)
    return PhaseTimes(
        rollouts_s=rollout_seconds(plain), engine_s=engine / count, learner_s=learner / count, sync_s=sync / count
    )


def rollout_seconds(records: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return L of steps: the longest group that ended in each where there was a stream, and one ended; else the phase
    `generate`."""
    is_stream = any("timing/wait/rollouts" in record for record in records)
    name = "timing/group/max" if is_stream else "timing/generate"
    return tuple(record[name] for record in records if name in record) or (0.0,)


def pipeline_lines(times: PhaseTimes, *, takes_turns: bool) -> Iterator[str]:
    """Yield the lines of a terminal: a step at each staleness, and which pays."""
    steps = [f"{each}: {times.step_s(each, takes_turns=takes_turns):.3g} s" for each in SHOWN]
    yield f"{'staleness':<10} a step with trainer.max_staleness {', '.join(steps)}"
    best = times.best_staleness(takes_turns=takes_turns)
    if best:
        gain = times.step_s(0) / times.step_s(best, takes_turns=takes_turns)
        why = times.limit(best, takes_turns=takes_turns)
        told = f"trainer.max_staleness={best} pays ({gain:.2f} x serial): a step then waits for {why}"
    else:
        told = "none above 0 pays: there is nothing that could go on beside the learner's work"
    yield f"{'':<10} {told}"
    shared = (
        "taking turns on the same devices" if takes_turns else "on cores or devices of their own; shared ones add up"
    )
    yield f"{'':<10} of what phases take one after the other, with engine and learner {shared}"


def work_of_step(
    plan: BatchPlan, lengths: RowLengths, estimates: Sequence[PassEstimate], rates: Rates, *, models_scored: float
) -> Work:
    """Return what one training batch makes of the plan's lengths.

    Args:
        models_scored: Forwards alone over a batch: of the old policy, the reference and the critic.
    """
    tokens = plan.num_samples_per_batch * float(lengths.all_rows.sum()) / len(lengths.trajectories)
    optimizer_steps = {"policy": plan.optimizer_steps_per_batch, "critic": plan.critic_optimizer_steps_per_batch}

    def per_token(estimate: PassEstimate) -> float:
        measured = rates.positions_per_token if estimate.layout == rates.layout else 0.0
        # all ranks wait for the busiest
        return estimate.load_max_over_mean * (measured or estimate.computed_tokens / estimate.num_tokens)

    return Work(
        sampled_tokens=tokens * (rates.sampled_share or sampled_share(lengths)),
        scored_positions=tokens * models_scored * per_token(estimates[0]),
        trained_positions=sum(
            each.num_tokens * per_token(each) * optimizer_steps[each.role] for each in estimates if each.training
        ),
        num_ranks=plan.learners[0].num_ranks,
    )


def run_time(
    rates: Rates, work: Work, trainer: TrainerConfig, *, total_steps: int, num_devices: int, takes_turns: bool = False
) -> RunTime:
    """Return how long each phase of a step takes, in the mean over a run of so many training batches.

    With `trainer.max_staleness` the phase `generate` is what the learner still waits, by the model at the head of this file;
    `takes_turns`: engine and learner share devices, one of them at a time.
    """
    ranks, scored = work.num_ranks, rates.scored or FORWARD_SHARE * rates.trained
    checkpoints = max(1, total_steps // trainer.ckpt_interval) if trainer.ckpt_interval else 1
    evaluations = total_steps // trainer.eval_interval if trainer.eval_interval else 1  # the last step is evaluated
    times = checkpoints, evaluations + trainer.eval_before_train
    each_time = [seconds * count / max(1, total_steps) for seconds, count in zip(rates.each_time_s, times)]
    made_s = _over(work.sampled_tokens, rates.generated, ranks)
    own = {
        "score": _over(work.scored_positions, scored, ranks),
        "update": _over(work.trained_positions, rates.trained, ranks),
        "all else": rates.every_step_s,
        **dict(zip(_EACH_TIME, each_time)),
    }
    learner_s = sum(own.values()) - rates.sync_s
    pipeline = PhaseTimes(
        rollouts_s=tuple(made_s * length for length in rates.lengths),
        engine_s=made_s * rates.engine_share,
        learner_s=learner_s,
        sync_s=rates.sync_s,
    )
    step_s = pipeline.step_s(trainer.max_staleness, takes_turns=takes_turns)
    wait_s = max(0.0, step_s - learner_s - rates.sync_s)
    return RunTime(
        source=rates.source,
        phases=tuple(PhaseTime(name=name, seconds=value) for name, value in {"generate": wait_s, **own}.items()),
        total_steps=total_steps,
        num_devices=num_devices,
        pipeline=pipeline,
        takes_turns=takes_turns,
    )


def disk_bytes(
    plan: BatchPlan,
    lengths: RowLengths,
    trainer: TrainerConfig,
    rollouts: RolloutsConfig,
    *,
    num_parameters: int | None,
) -> Mapping[str, int]:
    """Return what a run leaves on disk, by what it is: rollouts, and where the number of the policy's parameters is known,
    checkpoints and the exported model. A critic is as large as the policy."""
    found = {"rollouts": _rollout_bytes(plan, lengths, rollouts)} if trainer.dump_rollouts else {}
    if num_parameters is None:
        return found
    trained = sum(learner.role in ("policy", "critic") for learner in plan.learners)
    state = 4 + optimizer_state_bytes(trainer.policy.optimizer)  # beside the parameter, in float32
    written = ceil_div(plan.total_steps, trainer.ckpt_interval) if trainer.ckpt_interval else 1
    kept = min(trainer.max_ckpts_to_keep, written)
    # a checkpoint is whole before the oldest goes
    found["checkpoints"] = (kept + (written > kept)) * trained * state * num_parameters
    if trainer.export_hf:
        found["export"] = 4 * num_parameters
    return found


def time_lines(time: RunTime | None, disk: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of a terminal on time and disk."""
    if time is None:
        yield (
            "time       not predicted (plan.rates=none, or no config.json of a model here): plan.rates=FOLDER takes the "
            "rates of a run that was made; or state plan.generated_tokens_per_second and plan.trained_tokens_per_second"
        )
    else:
        yield f"{'rates':<10} {time.source}"
        parts = ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in time.phases if phase.seconds)
        yield f"{'a step':<10} {duration(time.step_s)}: {parts}"
        yield from pipeline_lines(time.pipeline, takes_turns=time.takes_turns)
        yield (
            f"{'the run':<10} {duration(time.step_s * time.total_steps)} for {counted(time.total_steps, 'step', ',')} on "
            f"{counted(time.num_devices, 'device')}: {three_digits(time.device_hours)} device-hours"
        )
    if disk:
        parts = ", ".join(f"{what} {byte_size(count)}" for what, count in disk.items())
        yield f"{'disk':<10} {byte_size(sum(disk.values()))} at most: {parts}"


def _rollout_bytes(plan: BatchPlan, lengths: RowLengths, rollouts: RolloutsConfig) -> int:
    steps = min(plan.total_steps, rollouts.keep_last or plan.total_steps)
    scored = len(set(rollouts.columns) - {"advantages"})
    per_token = _ROLLOUT_BYTES + scored * _COLUMN_BYTES[rollouts.columns_dtype]
    return int(plan.num_samples_per_batch * tokens_of_rollout(lengths) * steps * rollouts.sample_fraction * per_token)


def tokens_of_rollout(lengths: RowLengths) -> float:
    """Tokens of a whole trajectory, in the mean: its last row has them all."""
    return sum(int(rows[-1]) for rows in lengths.trajectories) / len(lengths.trajectories)


def sampled_share(lengths: RowLengths) -> float:
    """The share of a batch's tokens that come after their prompt; what an environment adds counts as sampled."""
    _, sampled = sampled_lengths(lengths)
    return float(sampled.sum()) / float(lengths.all_rows.sum())


def _models_scored(record: Mapping[str, float]) -> float:
    """How many models scored this step's batch; the policy may have scored a share of it."""
    policy = 1.0 - record.get("score/policy_pass_skipped", 0.0)
    # The first is not there where the policy scored nothing.
    reference = "kl/reference" in record or "loss/kl" in record
    return policy + reference + ("critic/explained_variance" in record)


def _over(amount: float, divisor: float, ranks: int) -> float:
    """Of one rank: a rate of an amount and its seconds, or seconds of an amount and its rate; 0 where that is not known."""
    return amount / divisor / ranks if divisor > 0 else 0.0


def _sum(records: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(record.get(name, 0.0) for record in records)


def _mean(records: Iterable[Mapping[str, float]], name: str) -> float:
    values = [record[name] for record in records if record.get(name)]
    return sum(values) / len(values) if values else 0.0


def duration(seconds: float) -> str:
    """Return seconds as `28.7 s`, `12.5 min` or `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{three_digits(seconds / 3600)} h"
