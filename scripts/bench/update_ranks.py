"""Time of updates of a model that is sharded over ranks: layers gathered ahead, and experts on other ranks. Of a CPU the
process's time, which does not count what it waits.

python scripts/bench/update_ranks.py --device cuda --ranks 8 --model qwen2.5-0.5b --ahead 0,1,2
python scripts/bench/update_ranks.py --device cpu --ranks 2 --experts 8 --expert-parallel 1,2 --ahead 0,1
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from torch import multiprocessing
from update_ours import Ours
from update_work import KINDS, SIZES

from skyrl_train.config.models import StrategyConfig, mesh_sizes
from skyrl_train.distributed import RankContext, RankMesh, join, make_strategy
from skyrl_train.endpoints import Rendezvous

_DEADLINE_S = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table: one line for each layout, `--ahead` and, of a mixture, each `--expert-parallel`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True, help="cuda: a GPU for each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ahead", default="0,1,2", help="strategy.layers_ahead")
    parser.add_argument("--experts", type=int, default=0, help="of a mixture in place of a dense model")
    parser.add_argument("--expert-parallel", default="1", help="with --experts: strategy.expert_parallel_size")
    parser.add_argument("--model", default="tiny", help="tiny, mid or qwen2.5-0.5b")
    parser.add_argument("--kind", default="single", help="single or step")
    parser.add_argument("--layouts", default="padded")
    parser.add_argument("--steps", type=int, default=3, help="timed updates")
    parser.add_argument("--tokens", type=int, default=16384, help="computed positions of a micro-batch")
    parser.add_argument("--float32", action="store_true", help="with --device cuda: not bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    args = parser.parse_args(argv)
    args.bf16 = args.device == "cuda" and not args.float32
    table = harness.Table("layout", "experts over", "layers ahead", "s per update", "peak GiB of a rank")
    for variant in args.layouts.split(","):
        for size in args.expert_parallel.split(",") if args.experts else ["1"]:
            for ahead in args.ahead.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    work = (args, variant, int(size), int(ahead), folder)
                    multiprocessing.spawn(_rank, args=work, nprocs=args.ranks)
                    found = [torch.load(path) for path in sorted(Path(folder).glob("rank*"))]
                seconds, held = (max(each[number] for each in found) for number in (0, 1))
                table.row(variant, size, ahead, f"{seconds:.3f}", f"{held / 2**30:.2f}" if held else "-")


def _rank(rank: int, args: Any, variant: str, expert_parallel: int, ahead: int, folder: str) -> None:
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    meeting = Rendezvous(rank=rank, num_ranks=args.ranks, init_method=f"file://{folder}/meeting", timeout_s=_DEADLINE_S)
    join(meeting, device)
    config = StrategyConfig(name="fsdp2", expert_parallel_size=expert_parallel, layers_ahead=ahead)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    mesh = RankMesh(sizes=mesh_sizes(config, args.ranks), device_type=device.type)
    settings = RankContext(num_ranks=args.ranks, device=device, dtype=dtype, mesh=mesh, layers_ahead=ahead)
    size = SIZES[args.model]
    strategy = make_strategy(config, settings)
    ours = Ours(
        size,
        KINDS[args.kind](size.vocabulary),
        variant=variant,
        tokens=args.tokens,
        bf16=args.bf16,
        checkpointing=args.checkpointing,
        strategy=strategy,
        experts=args.experts,
    )
    ours.score()
    ours.update()
    seconds = ours.timed(args.steps)
    held = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    torch.save((seconds, held), f"{folder}/rank{rank}")
    strategy.agree(0)  # who leaves closes its connections
    os._exit(0)  # gloo's thread may still release tensors of the last collective


if __name__ == "__main__":
    harness.run(main)
