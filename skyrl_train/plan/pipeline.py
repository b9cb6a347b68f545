"""How long a step takes where rollouts are made while the learner updates, from what its phases take one after the other.

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

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.telemetry import phase_seconds

SHOWN = (0, 1, 2, 4, 8)
"""Values of `trainer.max_staleness` that a plan compares."""
_WORTH = 0.05
"""A larger one pays where a step is shorter by this share, at least."""
_ROUNDS = 1000
"""Batches that are drawn, for each that may be pending."""


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
