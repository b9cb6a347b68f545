"""Time and balance of planning an optimizer step against its size. Pure CPU work on one thread; no model.

    python scripts/bench/batching.py                    # 1k to 1M sequences
    python scripts/bench/batching.py --sizes 1024 102400 --json FILE

For each number of sequences with long-tailed lengths (log-normal, median 1,000, sigma 1, at most 16,384 tokens):
balancing over 8 and 64 ranks, cutting rows under a cap of 16,384 tokens, padded and packed, and the mini-batch
boundaries of step-wise rows. Then the same cuts of other lengths: how full micro-batches are, how level, and how long it
took. For layouts that compute common tokens once, positions that all ranks compute where rows go to ranks by length alone
and where groups of rows are kept together; and forwards of groups under a cap of one and a half groups. Seconds are of
the process, on one thread. `--check` exits with status 1 where a promise of docs/batch_sizes.md is broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import harness
import numpy as np
from harness import Table, timed
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
Facts = dict[str, Any]
"""What is found of one case, by name."""


def long_tailed_lengths(count: int) -> Rows:
    """Log-normal, median 1,000, sigma 1, 20 to 16,384."""
    draws = np.random.default_rng(0).standard_normal(count)
    return np.clip(1000 * np.exp(draws), 20, 16384).astype(np.int64)


def plan_step(lengths: Rows, costs: NDArray[np.float64]) -> list[list[Rows]]:
    """Micro-batches of each of 8 ranks, one after the other."""
    return [split_padded(lengths[rows], MAX_TOKENS) for rows in balance_rows(costs, 8)]


def measure(count: int) -> Facts:
    """One number of sequences: seconds; the busiest rank's cost over the mean; the largest micro-batch that fits over the
    cap; and padding, also with as many rows in each micro-batch in the order of arrival."""
    lengths = long_tailed_lengths(count)
    costs = CostModel().of_rows(lengths)
    repeats = 3 if count < 1_000_000 else 1
    deal_8_s, dealt_8 = timed(lambda: balance_rows(costs, 8), repeats)
    deal_64_s, dealt_64 = timed(lambda: balance_rows(costs, 64), repeats)
    padded_s, padded = timed(lambda: split_padded(lengths, MAX_TOKENS), repeats)
    packed_s, packed = timed(lambda: split_packed(lengths, MAX_TOKENS), repeats)
    uids = [f"prompt-{row // ROWS_PER_PROMPT}" for row in range(count)]
    num_prompts = len(set(uids))
    loads_8, loads_64 = costs[dealt_8].sum(axis=1), costs[dealt_64].sum(axis=1)
    computed = sum(computed_tokens(lengths[part], padded=True) for part in padded)
    first_come = sum(computed_tokens(part, padded=True) for part in np.array_split(lengths, len(padded)))
    return {
        "num_sequences": count,
        "deal_8_s": deal_8_s,
        "deal_64_s": deal_64_s,
        "load_8": float(loads_8.max() / loads_8.mean()),
        "load_64": float(loads_64.max() / loads_64.mean()),
        # The least that equal numbers of rows allow: the costliest row with the cheapest others.
        "load_64_least": max(1.0, float((costs.max() + np.sort(costs)[: count // 64 - 1].sum()) / loads_64.mean())),
        "pack_padded_s": padded_s,  # all rows at once; ranks do this side by side, on their own share
        "pack_packed_s": packed_s,
        "step_s": timed(lambda: plan_step(lengths, costs), repeats)[0],
        "largest_over_cap": max(largest(lengths, padded, is_padded=True), largest(lengths, packed, is_padded=False)),
        "padding": 1 - int(lengths.sum()) / computed,
        "padding_first_come": 1 - int(lengths.sum()) / first_come,
        "boundaries_s": timed(lambda: compute_prompt_mini_batch_boundaries(uids, num_prompts), repeats)[0],
    }


def largest(lengths: Rows, parts: list[Rows], *, is_padded: bool) -> float:
    """Computed tokens of the largest micro-batch over the cap."""
    fitting = [part for part in parts if not rows_over(lengths[part], MAX_TOKENS)]
    return max(computed_tokens(lengths[part], padded=is_padded) for part in fitting) / MAX_TOKENS


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


def measure_cut(name: str, lengths: Rows, *, is_padded: bool) -> Facts:
    """Sequences of some distribution, cut in one way: computed tokens of the mean micro-batch over the cap (`fill`), and of
    the largest over the mean (`level`)."""
    split = split_padded if is_padded else split_packed
    cut_s, parts = timed(lambda: split(lengths, MAX_TOKENS), 2)
    computed = np.array([computed_tokens(lengths[part], padded=is_padded) for part in parts])
    return {
        "lengths": name,
        "num_sequences": len(lengths),
        "layout": "padded" if is_padded else "packed",
        "num_micro_batches": len(parts),
        "fill": float(computed.mean() / MAX_TOKENS),
        "level": float(computed.max() / computed.mean()),
        "cut_s": cut_s,
    }


def measure_whole_groups(what: str, prompts: int, samples: int) -> Facts:
    """Groups of rows that share a prompt, under a cap of one and a half groups: forwards beside as many as the distinct
    tokens would fill, and positions that are computed again, over the distinct ones."""
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
    return {
        "what": what,
        "num_rows": rows.num_rows,
        "fewest": -(-rows.num_distinct // rows.budget),
        "num_forwards": len(forwards),
        "repeated": computed / rows.num_distinct - 1,
        "plan_s": plan_s,
    }


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


def measure_dealing(what: str, prompts: int, samples: int, turns: int, num_ranks: int) -> Facts:
    """An optimizer step whose rows share prefixes, dealt to ranks by length and by groups: positions that all ranks compute
    together, beside the distinct ones, which one rank would compute; the busiest rank's cost over the mean; and its cost by
    rows over that by groups, which is how much sooner the step is done."""
    lengths, shared, starts = shared_rows(prompts, samples, turns)
    cost = CostModel()
    again = cost.of_rows(shared)
    deal_s, (by_rank, _) = timed(lambda: balance_groups(cost.of_rows(lengths) - again, again, starts, num_ranks), 3)
    rows = list(balance_rows(cost.of_rows(lengths), num_ranks))

    def computed(dealt: list[Rows]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Positions of each rank, and their cost."""
        added = [positions_of(np.sort(places), lengths, shared, starts, turns, samples) for places in dealt]
        costs = [
            (cost.of_rows(lengths[np.sort(places)]) - cost.of_rows(lengths[np.sort(places)] - each)).sum()
            for places, each in zip(dealt, added)
        ]
        return np.array([each.sum() for each in added]), np.array(costs)

    (row_positions, row_costs), (group_positions, group_costs) = computed(rows), computed(by_rank)
    return {
        "what": what,
        "num_rows": len(lengths),
        "num_ranks": num_ranks,
        "distinct": int((lengths - shared).sum()),
        "by_rows": int(row_positions.sum()),
        "by_groups": int(group_positions.sum()),
        "by_rows_load": float(row_costs.max() / row_costs.mean()),
        "by_groups_load": float(group_costs.max() / group_costs.mean()),
        "busiest": float(row_costs.max() / group_costs.max()),
        "deal_s": deal_s,
    }


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


def seconds(value: float) -> str:
    return f"{value:.3f} s"


def print_steps(steps: Sequence[Facts]) -> None:
    table = Table(
        *("sequences", "deal 8", "deal 64", "load 8", "64/least", "padded", "packed", "step", "cap", "padding"),
        "boundaries",
    )
    for each in steps:
        table.row(
            f"{each['num_sequences']:,}",
            seconds(each["deal_8_s"]),
            seconds(each["deal_64_s"]),
            f"{each['load_8']:.4f}",
            f"{each['load_64']:.3f}/{each['load_64_least']:.3f}",
            seconds(each["pack_padded_s"]),
            seconds(each["pack_packed_s"]),
            seconds(each["step_s"]),
            f"{each['largest_over_cap']:.3f}",
            f"{each['padding']:.1%}/{each['padding_first_come']:.0%}",
            seconds(each["boundaries_s"]),
        )


def print_cuts(cuts: Sequence[Facts], whole: Sequence[Facts]) -> None:
    table = Table("lengths", "sequences", "layout", "micro-batches", "fill", "level", "cut", title="Cuts")
    for each in cuts:
        counts = (f"{each['num_sequences']:,}", each["layout"], f"{each['num_micro_batches']:,}")
        table.row(each["lengths"], *counts, f"{each['fill']:.4f}", f"{each['level']:.4f}", seconds(each["cut_s"]))
    table = Table("groups under a cap of 1.5", "fewest", "forwards", "repeated", "plan", title="Groups")
    for each in whole:
        counts = (f"{each['fewest']:,}", f"{each['num_forwards']:,}", f"{each['repeated']:.1%}")
        table.row(each["what"], *counts, seconds(each["plan_s"]))


def print_dealings(dealings: Sequence[Facts]) -> None:
    table = Table(
        *("rows that share prefixes", "ranks", "distinct", "by rows", "by groups", "busiest/mean"),
        *("busiest, rows/groups", "deal"),
        title="Dealing",
    )
    for each in dealings:
        table.row(
            each["what"],
            each["num_ranks"],
            f"{each['distinct']:,}",
            *(f"{each[way] / each['distinct']:.2f}x" for way in ("by_rows", "by_groups")),
            f"{each['by_rows_load']:.3f}/{each['by_groups_load']:.3f}",
            f"{each['busiest']:.2f}",
            seconds(each["deal_s"]),
        )


def broken_promises(
    steps: Sequence[Facts], dealings: Sequence[Facts], cuts: Sequence[Facts], whole: Sequence[Facts]
) -> list[str]:
    """What does not hold, in words."""
    found = []
    for cut in cuts:
        count, cut_s = cut["num_sequences"], cut["cut_s"]
        if 100_000 <= count <= 110_000 and cut_s > 0.2:
            found.append(f"{count} {cut['lengths']} sequences: cutting took {cut_s:.2f} s")
    for group in whole:
        if group["num_forwards"] > 1.05 * group["fewest"]:
            found.append(f"{group['what']}: {group['num_forwards']} forwards where {group['fewest']} would do")
    for each in dealings:
        if each["busiest"] < 0.98:
            times = 1 / each["busiest"]
            found.append(f"{each['what']}: by groups the busiest rank has {times:.3f} times what it has by rows")
        if each["num_rows"] >= 100_000 and each["deal_s"] > 0.5:
            found.append(f"{each['what']}: dealing groups took {each['deal_s']:.2f} s")
    for step in steps:
        size, step_s = f"{step['num_sequences']} sequences", step["step_s"]
        if step["largest_over_cap"] > 1:
            found.append(f"{size}: a micro-batch computes {step['largest_over_cap']:.3f} times the cap")
        for ranks, load, least in ((8, step["load_8"], 1.0), (64, step["load_64"], step["load_64_least"])):
            if load > max(1.01, 1.01 * least):
                found.append(f"{size} over {ranks} ranks: the busiest has {load:.3f} times the mean")
        if 100_000 <= step["num_sequences"] <= 110_000 and step_s > 0.5:
            found.append(f"{size}: planning a step took {step_s:.2f} s")
    for small, large in pairwise(steps):
        counts = [step["num_sequences"] for step in (small, large)]
        work = [count * math.log(count) for count in counts]
        if small["step_s"] > 0.02 and large["step_s"] / small["step_s"] > 3 * work[1] / work[0]:
            found.append(f"planning grows faster than n log n from {counts[0]} to {counts[1]}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_024, 10_240, 102_400, 1_024_000])
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a promise is broken")
    arguments = parser.parse_args(argv)
    wrong = [size for size in arguments.sizes if size < 64 or size % 64]
    if wrong:
        parser.error(f"sizes must be multiples of 64, to be dealt to 8 and 64 ranks; got {wrong}")
    steps = [measure(size) for size in arguments.sizes]
    dealings = [measure_dealing(*case) for case in DEALINGS]
    whole = [measure_whole_groups(*case) for case in WHOLE_GROUPS]
    cuts = [
        measure_cut(name, lengths, is_padded=is_padded)
        for size in arguments.sizes
        for name, lengths in distributions(size).items()
        for is_padded in (False, True)
    ]
    for facts in (*steps, *dealings, *cuts, *whole):
        harness.log(facts)
    print_steps(steps)
    print_cuts(cuts, whole)
    print_dealings(dealings)
    broken = broken_promises(steps, dealings, cuts, whole) if arguments.check else []
    print("\n".join(broken), end="\n" if broken else "")
    return int(bool(broken))


if __name__ == "__main__":
    harness.run(main)
