"""How the cost of an update and of the controller's work grows: exponents over tokens, samples, turns, model, ranks, rows.

    python scripts/bench/slopes.py                                # all axes, CPU seconds and counts
    python scripts/bench/slopes.py --axes tokens,turns --rounds 5

A cost that grows as `size ** exponent` has exponent 1 where it is in proportion. Sizes are the positions that are computed;
of layers, ranks and rows their number. Each is taken over the larger half of the sizes, where what every update costs alike
(optimizer, start of a pass) hides less of it. Counts are of operations that torch is asked for, of bytes that it is handed
by them, and of collectives; they are the same on every machine and in every run, and `tests/unit/scripts/test_slopes.py`
bounds them. CPU seconds are of one thread, the least of the rounds, which take turns over the sizes. Attention's own
seconds, which grow with the square of a row's length, are left out of a column.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import multiprocessing
from update_bound import Costs
from update_ours import Ours
from update_work import Conversation, ModelSize, single_turn, step_wise

from skyrl_train.config.models import StrategyConfig, mesh_sizes
from skyrl_train.distributed import RankContext, RankMesh, join, make_strategy
from skyrl_train.endpoints import Rendezvous

SMALL = ModelSize(64, 2, 2, 2, 128, 128)
MICRO_BATCH = 4096
"""Positions of a micro-batch: as sizes grow there are more of them, as in a run."""
COLLECTIVES = "c10d::"
_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What one size costs."""

    positions: int
    """That the update computes."""
    cpu_s: float
    attention_s: float
    operations: int
    bytes: int
    """Without attention's, which reads keys once for each block of queries."""
    collectives: int = 0


def _answers(tokens: int, **work: Any) -> list[Conversation]:
    """Answers of exactly so many tokens."""
    sizes = {"prompt_tokens": (64, 64), "response_median": 1000 * tokens, "longest_response": tokens}
    return single_turn(SMALL.vocabulary, **sizes, **work)


UPDATES: Mapping[str, tuple[tuple[int, ...], Callable[[int], tuple[ModelSize, list[Conversation]]]]] = {
    "tokens": ((256, 512, 1024, 2048, 4096), lambda n: (SMALL, _answers(n, prompts=1, samples=2))),
    "samples": ((4, 8, 16, 32, 64), lambda n: (SMALL, _answers(128, prompts=1, samples=n))),
    "prompts": ((2, 4, 8, 16, 32), lambda n: (SMALL, _answers(128, prompts=n, samples=2))),
    "turns": ((2, 4, 8, 16, 32), lambda n: (SMALL, step_wise(SMALL.vocabulary, prompts=1, samples=2, turns=n))),
    "layers": (
        (2, 4, 8, 16),
        lambda n: (ModelSize(64, n, 2, 2, 128, 128), _answers(128, prompts=2, samples=4)),
    ),
}
"""Axis to its sizes, and the model and rollouts of a size."""
RANKS = (1, 2, 4)
ROWS = (6400, 12800, 25600, 51200, 102400)


def count_update(size: ModelSize, conversations: list[Conversation], **options: Any) -> Counted:
    """Count one update after one that is not counted."""
    ours = Ours(size, conversations, variant="auto", tokens=MICRO_BATCH, **options)
    ours.score()
    ours.update()
    with Costs() as costs:
        ours.update()
    attention = sum(cost.cpu_s for name, cost in costs.of.items() if "attention" in name)
    return Counted(
        positions=ours.positions,
        cpu_s=costs.cpu_s,
        attention_s=attention,
        operations=sum(cost.calls for cost in costs.of.values()),
        bytes=sum(cost.bytes for name, cost in costs.of.items() if "attention" not in name),
        collectives=sum(cost.calls for name, cost in costs.of.items() if name.startswith(COLLECTIVES)),
    )


def count_axis(axis: str, size: int) -> Counted:
    """Count an update of this size of an axis of `UPDATES`."""
    return count_update(*UPDATES[axis][1](size))


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the exponent over the larger half of the sizes; not a number where a cost is 0."""
    first = len(sizes) // 2
    if min(costs[first], costs[-1]) <= 0:
        return math.nan
    return math.log(costs[-1] / costs[first]) / math.log(sizes[-1] / sizes[first])


def count_ranks(ranks: int) -> Counted:
    """Count the first rank's update, where `ranks` processes each hold a part of the model and have equally many rows."""
    with tempfile.TemporaryDirectory() as folder:
        # One process imports torch, and the ranks are its copies.
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        multiprocessing.start_processes(_rank, args=(ranks, folder), nprocs=ranks, start_method="forkserver")
        return Counted(**json.loads(Path(f"{folder}/counted").read_text(encoding="utf-8")))


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = Rendezvous(rank=rank, num_ranks=ranks, init_method=f"file://{folder}/meeting", timeout_s=_DEADLINE_S)
    join(meeting, torch.device("cpu"))
    config = StrategyConfig(name="fsdp2")
    mesh = RankMesh(sizes=mesh_sizes(config, ranks), device_type="cpu")
    settings = RankContext(num_ranks=ranks, device=torch.device("cpu"), dtype=torch.float32, mesh=mesh)
    strategy = make_strategy(config, settings)
    counted = count_update(SMALL, _answers(128, prompts=2, samples=4), strategy=strategy)
    if not rank:
        Path(f"{folder}/counted").write_text(json.dumps(asdict(counted)), encoding="utf-8")
    strategy.agree(0)  # who leaves closes its connections
    os._exit(0)  # gloo's thread may still release tensors of the last collective


def controller_s(rows: int) -> float:
    """CPU seconds of assembling, estimating and closing the batch of so many rows, of 64 tokens each."""
    import controller

    from skyrl_train.runs import assembler
    from skyrl_train.trainers import steps

    words = ["--prompts", str(rows // 8), "--samples", "8", "--turns", "1", "--tokens-per-sequence", "64"]
    args = controller.parse(words)
    rollouts, config = controller.rollouts_of(args), controller.make_config(args)
    start = time.process_time()
    batch = assembler(config)(rollouts, step=1, weight_version=0)
    batch = batch.with_columns(old_logprobs=batch["rollout_logprobs"])
    batch = steps.estimate(batch, config.trainer.algorithm, kl_coef=0.0, seed=config.seed)
    controller.close_all(batch, config)
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--axes", default=",".join([*UPDATES, "ranks", "rows"]))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = harness.Table(
        "axis", "sizes", "CPU s", "exponent", "without attention", "operations", "bytes", "collectives"
    )
    for axis in args.axes.split(","):
        sizes = {"ranks": RANKS, "rows": ROWS}.get(axis) or UPDATES[axis][0]
        if axis == "rows":
            seconds = [min(each) for each in zip(*([controller_s(n) for n in sizes] for _ in range(args.rounds)))]
            table.row(axis, *_seconds(sizes, seconds), "", "", "", "")
            continue
        count = count_ranks if axis == "ranks" else lambda n, axis=axis: count_axis(axis, n)
        rounds = [[count(n) for n in sizes] for _ in range(args.rounds)]
        least = [min(each, key=lambda one: one.cpu_s) for each in zip(*rounds)]
        work = sizes if axis in ("layers", "ranks") else tuple(each.positions for each in least)
        table.row(
            axis,
            *_seconds(work, [each.cpu_s for each in least]),
            f"{exponent(work, [each.cpu_s - each.attention_s for each in least]):.2f}",
            *(f"{exponent(work, [getattr(each, name) for each in least]):.2f}" for name in ("operations", "bytes")),
            ", ".join(str(each.collectives) for each in least) if axis == "ranks" else "",
        )


def _seconds(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[str, str, str]:
    shown = ", ".join(f"{each:.2f}" for each in seconds)
    return ", ".join(f"{n:,}" for n in sizes), shown, f"{exponent(sizes, seconds):.2f}"


if __name__ == "__main__":
    harness.run(main)
