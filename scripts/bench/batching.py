"""Time and balance of planning an optimizer step against its size. Pure CPU work on one thread; no model.

    python scripts/bench/batching.py                    # 1k to 1M sequences
    python scripts/bench/batching.py --sizes 1024 102400 --json

For each number of sequences with long-tailed lengths (log-normal, median 1,000, sigma 1, at most 16,384 tokens):
balancing over 8 and 64 ranks, cutting rows under a cap of 16,384 tokens, padded and packed, and the mini-batch
boundaries of step-wise rows. Then the same cuts of other lengths: how full micro-batches are, how level, and how long it
took. For layouts that compute common tokens once, positions that all ranks compute where rows go to ranks by length alone
and where groups of rows are kept together; and forwards of groups under a cap of one and a half groups. Seconds are of
the process, on one thread. `--check` exits with status 1 where a promise of docs/batch_sizes.md is broken.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch import Rows, compute_prompt_mini_batch_boundaries
from skyrl_train.batch.layouts import CostModel
from skyrl_train.batch.planner import (
    RowFacts,
    balance_groups,
    balance_rows,
    computed_tokens,
    rows_over,
    split_packed,
    split_padded,
    token_budget,
)

MAX_TOKENS = 16384
ROWS_PER_PROMPT = 20
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number of sequences."""

    num_sequences: int
    deal_8_s: float
    deal_64_s: float
    load_8: float
    """Busiest rank over the mean."""
    load_64: float
    load_64_least: float
    """The least that equal numbers of rows allow: the costliest row with the cheapest others, or 1."""
    pack_padded_s: float
    """All rows at once; ranks do this side by side, on their own share."""
    pack_packed_s: float
    step_s: float
    """Planning a step: dealing to 8 ranks and packing every rank's share, padded, one after the other."""
    largest_over_cap: float
    """Computed tokens of the largest micro-batch over the cap; rows over the cap by themselves left out."""
    padding: float
    padding_first_come: float
    """With as many rows in each micro-batch, in the order of arrival."""
    boundaries_s: float


def long_tailed_lengths(count: int) -> Rows:
    """Log-normal, median 1,000, sigma 1, 20 to 16,384."""
    draws = np.random.default_rng(0).standard_normal(count)
    return np.clip(1000 * np.exp(draws), 20, 16384).astype(np.int64)


def timed(run: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Best of some repeats, and the result."""
    best, result = math.inf, None
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    assert result is not None
    return best, result


def plan_step(lengths: Rows, costs: NDArray[np.float64]) -> list[list[Rows]]:
    """Micro-batches of each of 8 ranks."""
    return [split_padded(lengths[rows], MAX_TOKENS) for rows in balance_rows(costs, 8)]


def measure(count: int) -> Result:
    lengths = long_tailed_lengths(count)
    costs = CostModel().of_rows(lengths)
    repeats = 3 if count < 1_000_000 else 1
    deal_8_s, dealt_8 = timed(lambda: balance_rows(costs, 8), repeats)
    deal_64_s, dealt_64 = timed(lambda: balance_rows(costs, 64), repeats)
    padded_s, padded = timed(lambda: split_padded(lengths, MAX_TOKENS), repeats)
    packed_s, packed = timed(lambda: split_packed(lengths, MAX_TOKENS), repeats)
    step_s, _ = timed(lambda: plan_step(lengths, costs), repeats)
    uids = [f"prompt-{row // ROWS_PER_PROMPT}" for row in range(count)]
    num_prompts = len(set(uids))
    boundaries_s, _ = timed(lambda: compute_prompt_mini_batch_boundaries(uids, num_prompts), repeats)
    loads_8, loads_64 = costs[dealt_8].sum(axis=1), costs[dealt_64].sum(axis=1)
    least = max(1.0, (costs.max() + np.sort(costs)[: count // 64 - 1].sum()) / loads_64.mean())
    computed = sum(computed_tokens(lengths[part], padded=True) for part in padded)
    first_come = sum(computed_tokens(part, padded=True) for part in np.array_split(lengths, len(padded)))
    return Result(
        num_sequences=count,
        deal_8_s=deal_8_s,
        deal_64_s=deal_64_s,
        load_8=float(loads_8.max() / loads_8.mean()),
        load_64=float(loads_64.max() / loads_64.mean()),
        load_64_least=float(least),
        pack_padded_s=padded_s,
        pack_packed_s=packed_s,
        step_s=step_s,
        largest_over_cap=max(
            largest(lengths, padded, padded_layout=True), largest(lengths, packed, padded_layout=False)
        ),
        padding=1 - int(lengths.sum()) / computed,
        padding_first_come=1 - int(lengths.sum()) / first_come,
        boundaries_s=boundaries_s,
    )


def largest(lengths: Rows, parts: list[Rows], *, padded_layout: bool) -> float:
    """Computed tokens of the largest micro-batch over the cap."""
    fitting = [part for part in parts if not rows_over(lengths[part], MAX_TOKENS)]
    return max(computed_tokens(lengths[part], padded=padded_layout) for part in fitting) / MAX_TOKENS


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One number of sequences of some distribution, cut in one way."""

    lengths: str
    num_sequences: int
    padded: bool
    num_micro_batches: int
    fill: float
    """Computed tokens of the mean micro-batch over the cap."""
    level: float
    """Computed tokens of the largest micro-batch over the mean."""
    cut_s: float


def distributions(count: int) -> dict[str, Rows]:
    """Lengths of 20 to 16,384 tokens."""
    rng = np.random.default_rng(count)
    short, long = rng.normal(300, 50, count), rng.normal(12_000, 1_000, count)
    drawn = {
        "uniform": rng.uniform(20, MAX_TOKENS, count),
        "bimodal": np.where(rng.random(count) < 0.5, short, long),
        "equal": np.full(count, 1_000.0),
        "Pareto": 200 * (1 + rng.pareto(1.2, count)),
        "log-normal": 1_000 * np.exp(rng.standard_normal(count)),
    }
    return {name: lengths.clip(20, MAX_TOKENS).astype(np.int64) for name, lengths in drawn.items()}


def measure_cut(name: str, lengths: Rows, *, padded: bool) -> Cut:
    split = split_padded if padded else split_packed
    cut_s, parts = timed(lambda: split(lengths, MAX_TOKENS), 2)
    computed = np.array([computed_tokens(lengths[part], padded=padded) for part in parts])
    return Cut(
        lengths=name,
        num_sequences=len(lengths),
        padded=padded,
        num_micro_batches=len(parts),
        fill=float(computed.mean() / MAX_TOKENS),
        level=float(computed.max() / computed.mean()),
        cut_s=cut_s,
    )


@dataclass(frozen=True, kw_only=True)
class WholeGroups:
    """Groups of rows that share a prompt, under a cap of one and a half groups."""

    what: str
    num_rows: int
    fewest: int
    """Forwards that the distinct tokens would fill."""
    num_forwards: int
    repeated: float
    """Positions that are computed again, over the distinct ones."""
    plan_s: float


def measure_whole_groups(what: str, prompts: int, samples: int) -> WholeGroups:
    lengths, shared, _ = shared_rows(prompts, samples, 1)
    numbers = np.arange(len(lengths))
    rows = RowFacts(
        lengths=lengths,
        loss_tokens=lengths - 1,
        prompts=numbers // samples,
        trajectories=numbers,
        order=numbers,
        shared=shared,
        hosts=numbers,
        layout="prefix_shared",
        budget=int(1.5 * (lengths - shared).sum() / prompts),
    )
    plan_s, forwards = timed(lambda: token_budget(rows), 2)
    computed = int(rows.sizes([np.asarray(forward.rows) for forward in forwards]).positions.sum())
    return WholeGroups(
        what=what,
        num_rows=rows.num_rows,
        fewest=-(-rows.num_distinct // rows.budget),
        num_forwards=len(forwards),
        repeated=computed / rows.num_distinct - 1,
        plan_s=plan_s,
    )


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """One optimizer step whose rows share prefixes, dealt to ranks in two ways."""

    what: str
    num_rows: int
    num_ranks: int
    distinct: int
    """Positions where nothing is computed twice: what one rank would compute."""
    by_rows: int
    """Positions that all ranks compute together where rows are dealt by length."""
    by_groups: int
    by_rows_load: float
    """Busiest rank over the mean, by what it computes."""
    by_groups_load: float
    busiest: float
    """The busiest rank's work by rows over that by groups: how much sooner the step is done."""
    deal_s: float


def shared_rows(prompts: int, samples: int, turns: int) -> tuple[Rows, Rows, Rows]:
    """`(lengths, shared, starts)` of rows in order: prompts of 256 to 512 tokens, long-tailed responses of at most 2,048
    over all turns, each turn a row that extends the one before."""
    rng = np.random.default_rng(0)
    prompt = np.repeat(rng.integers(256, 513, prompts), samples)
    responses = np.clip(1000 * np.exp(rng.standard_normal((prompts * samples, turns))), 20, 2048) / turns
    lengths = prompt[:, None] + np.cumsum(responses.astype(np.int64), axis=1)
    shared = np.concatenate([prompt[:, None], lengths[:, :-1]], axis=1)
    shared[::samples, 0] = 0
    return lengths.flatten(), shared.flatten(), np.arange(0, prompts * samples * turns + 1, samples * turns)


def positions_of(places: Rows, lengths: Rows, shared: Rows, starts: Rows, turns: int, samples: int) -> Rows:
    """`[rows at these places]`: what each adds to a rank that has these rows alone."""
    group = np.searchsorted(starts, places, side="right") - 1
    follows = np.diff(places // turns, prepend=-1) == 0
    prompt = shared[starts[group] + (turns if samples > 1 else 0)] if samples > 1 else np.zeros_like(places)
    before = np.where(follows, lengths[np.concatenate([places[:1], places[:-1]])], prompt)
    before[np.diff(group, prepend=-1) != 0] = 0
    return lengths[places] - before


def measure_dealing(what: str, prompts: int, samples: int, turns: int, num_ranks: int) -> Dealing:
    lengths, shared, starts = shared_rows(prompts, samples, turns)
    cost = CostModel()
    again = cost.of_rows(shared)
    deal_s, groups = timed(lambda: balance_groups(cost.of_rows(lengths) - again, again, starts, num_ranks), 3)
    rows = list(balance_rows(cost.of_rows(lengths), num_ranks))

    def computed(dealt: list[Rows]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Positions of each rank, and their cost."""
        added = [positions_of(np.sort(places), lengths, shared, starts, turns, samples) for places in dealt]
        costs = [
            (cost.of_rows(lengths[np.sort(places)]) - cost.of_rows(lengths[np.sort(places)] - each)).sum()
            for places, each in zip(dealt, added)
        ]
        return np.array([each.sum() for each in added]), np.array(costs)

    (row_positions, row_costs), (group_positions, group_costs) = computed(rows), computed(groups.places)
    return Dealing(
        what=what,
        num_rows=len(lengths),
        num_ranks=num_ranks,
        distinct=int((lengths - shared).sum()),
        by_rows=int(row_positions.sum()),
        by_groups=int(group_positions.sum()),
        by_rows_load=float(row_costs.max() / row_costs.mean()),
        by_groups_load=float(group_costs.max() / group_costs.mean()),
        busiest=float(row_costs.max() / group_costs.max()),
        deal_s=deal_s,
    )


DEALINGS = [
    ("32 prompts x 8 samples", 32, 8, 1, 8),
    ("4 prompts x 8 samples", 4, 8, 1, 8),
    ("32 prompts x 8 samples x 5 turns", 32, 8, 5, 8),
    ("128 prompts x 16 samples", 128, 16, 1, 64),
    ("5,120 prompts x 20 samples", 5120, 20, 1, 8),
    ("5,120 prompts x 20 samples", 5120, 20, 1, 64),
]


WHOLE_GROUPS = [
    ("512 prompts x 8 samples", 512, 8),
    ("512 prompts x 16 samples", 512, 16),
    ("5,120 prompts x 20 samples", 5120, 20),
]


def print_cuts(cuts: list[Cut], whole: list[WholeGroups]) -> None:
    print(f"\n{'lengths':<12}{'sequences':>11}  {'layout':<7}{'micro-batches':>14}{'fill':>8}{'level':>8}{'cut':>10}")
    for each in cuts:
        layout = "padded" if each.padded else "packed"
        print(f"{each.lengths:<12}{each.num_sequences:>11,}  {layout:<7}{each.num_micro_batches:>14,}", end="")
        print(f"{each.fill:>8.4f}{each.level:>8.4f}{each.cut_s:>8.3f} s")
    print(f"\n{'groups under a cap of 1.5':<34}{'fewest':>8}{'forwards':>10}{'repeated':>10}{'plan':>10}")
    for group in whole:
        print(
            f"{group.what:<34}{group.fewest:>8,}{group.num_forwards:>10,}{group.repeated:>10.1%}{group.plan_s:>8.3f} s"
        )


def print_dealings(dealings: list[Dealing]) -> None:
    print(
        f"\n{'rows that share prefixes':<34}{'ranks':>6}  {'distinct':>12}  {'by rows':>14}  {'by groups':>14}", end=""
    )
    print(f"  {'busiest/mean':>14}  {'busiest, rows/groups':>20}  {'deal':>8}")
    for each in dealings:
        load = f"{each.by_rows_load:.3f}/{each.by_groups_load:.3f}"
        rows, groups = each.by_rows / each.distinct, each.by_groups / each.distinct
        print(f"{each.what:<34}{each.num_ranks:>6}  {each.distinct:>12,}  {rows:>13.2f}x  {groups:>13.2f}x", end="")
        print(f"  {load:>14}  {each.busiest:>20.2f}  {each.deal_s:>6.3f} s")


def broken_promises(
    results: list[Result], dealings: list[Dealing], cuts: list[Cut], whole: list[WholeGroups]
) -> list[str]:
    """What does not hold, in words."""
    found = []
    for cut in cuts:
        if 100_000 <= cut.num_sequences <= 110_000 and cut.cut_s > 0.2:
            found.append(f"{cut.num_sequences} {cut.lengths} sequences: cutting took {cut.cut_s:.2f} s")
    for group in whole:
        if group.num_forwards > 1.05 * group.fewest:
            found.append(f"{group.what}: {group.num_forwards} forwards where {group.fewest} would do")
    for each in dealings:
        if each.busiest < 0.98:
            found.append(
                f"{each.what}: by groups the busiest rank has {1 / each.busiest:.3f} times what it has by rows"
            )
        if each.num_rows >= 100_000 and each.deal_s > 0.5:
            found.append(f"{each.what}: dealing groups took {each.deal_s:.2f} s")
    for result in results:
        size = f"{result.num_sequences} sequences"
        if result.largest_over_cap > 1:
            found.append(f"{size}: a micro-batch computes {result.largest_over_cap:.3f} times the cap")
        for ranks, load, least in ((8, result.load_8, 1.0), (64, result.load_64, result.load_64_least)):
            if load > max(1.01, 1.01 * least):
                found.append(f"{size} over {ranks} ranks: the busiest has {load:.3f} times the mean")
        if 100_000 <= result.num_sequences <= 110_000 and result.step_s > 0.5:
            found.append(f"{size}: planning a step took {result.step_s:.2f} s")
    for small, large in pairwise(results):
        work = [result.num_sequences * math.log(result.num_sequences) for result in (small, large)]
        if small.step_s > 0.02 and large.step_s / small.step_s > 3 * work[1] / work[0]:
            found.append(f"planning grows faster than n log n from {small.num_sequences} to {large.num_sequences}")
    return found


def print_table(results: list[Result]) -> None:
    head = (
        "sequences",
        "deal 8",
        "deal 64",
        "load 8",
        "64/least",
        "padded",
        "packed",
        "step",
        "cap",
        "padding",
        "boundaries",
    )
    print(" ".join(f"{name:>12}" for name in head))
    for r in results:
        cells = (
            f"{r.num_sequences:,}",
            f"{r.deal_8_s:.3f} s",
            f"{r.deal_64_s:.3f} s",
            f"{r.load_8:.4f}",
            f"{r.load_64:.3f}/{r.load_64_least:.3f}",
            f"{r.pack_padded_s:.3f} s",
            f"{r.pack_packed_s:.3f} s",
            f"{r.step_s:.3f} s",
            f"{r.largest_over_cap:.3f}",
            f"{r.padding:.1%}/{r.padding_first_come:.0%}",
            f"{r.boundaries_s:.3f} s",
        )
        print(" ".join(f"{cell:>12}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_024, 10_240, 102_400, 1_024_000])
    parser.add_argument("--json", action="store_true", help="one JSON object per size instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a promise is broken")
    arguments = parser.parse_args()
    wrong = [size for size in arguments.sizes if size < 64 or size % 64]
    if wrong:
        parser.error(f"sizes must be multiples of 64, to be dealt to 8 and 64 ranks; got {wrong}")
    results = [measure(size) for size in arguments.sizes]
    dealings = [measure_dealing(*case) for case in DEALINGS]
    whole = [measure_whole_groups(*case) for case in WHOLE_GROUPS]
    cuts = [
        measure_cut(name, lengths, padded=padded)
        for size in arguments.sizes
        for name, lengths in distributions(size).items()
        for padded in (False, True)
    ]
    if arguments.json:
        print("\n".join(json.dumps(asdict(result)) for result in [*results, *dealings, *cuts, *whole]))
    else:
        print_table(results)
        print_cuts(cuts, whole)
        print_dealings(dealings)
    broken = broken_promises(results, dealings, cuts, whole) if arguments.check else []
    print("\n".join(broken), end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
