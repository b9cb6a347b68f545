"""What two ranks do for a weight sync, without Ray and engines: python scripts/bench/weight_parts.py

Two FSDP2 ranks on gloo hand over a random model, in turns and in each way:

    each parameter   gathered by itself, rank 0 packs all
    each layer       gathered in one collective, rank 0 packs all (`WeightSender.carry`)
    own shards       nothing is gathered, each rank packs what it has (`carry_part`)
    changes          the same, of what changed alone, after each value moved by 1e-6, as by AdamW at that learning rate

Prints, in the type that travels, megabytes that ranks exchanged and that left for engines, and the least seconds of both
ranks until all bytes were packed, with their checksums.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from weight_sync import save_model

TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of the model in float32")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engines")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    from torch import multiprocessing

    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.megabytes)
        multiprocessing.spawn(run_rank, (folder, args.dtype, args.rounds), nprocs=2)  # type: ignore[no-untyped-call]


def run_rank(rank: int, folder: str, dtype: str, rounds: int) -> None:
    """One rank; rank 0 prints."""
    import torch
    import torch.distributed as dist  # noqa: TID251 - what is measured

    from skyrl_train.config.models import ModelConfig
    from skyrl_train.distributed import Sharded, join, leave
    from skyrl_train.endpoints import LocalEndpoint, Rendezvous
    from skyrl_train.model import load_causal_lm
    from skyrl_train.model.parallel import ALL_GATHER
    from skyrl_train.weight_sync import RankSender
    from skyrl_train.weights import Bucket, ModelWeights, Update, WeightSender, pack_bucket

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    join(Rendezvous(rank=rank, num_ranks=2, init_method=f"file://{folder}/meet", timeout_s=TIMEOUT_S), cpu)
    model = load_causal_lm(ModelConfig(path=folder), "cpu")
    strategy = Sharded(device=cpu, dtype=torch.float32, cpu_offload=False)
    strategy.prepare(model)
    sender = RankSender(model, strategy, cpu)
    parameters = dict(model.named_parameters())
    exchanged = [0]
    gather: Any = getattr(dist, ALL_GATHER)

    def planned(update: Update) -> list[Bucket]:
        return ModelWeights(LocalEndpoint[WeightSender](sender)).buckets(
            dtype=dtype if dtype != "float32" else "", update=update
        )

    def each_parameter(bucket: Bucket) -> Bucket:
        types = {name: getattr(torch, type_) for name, type_ in zip(bucket.names, bucket.dtypes)}
        whole = [(name, strategy.full(parameters[name].detach().to(type_))) for name, type_ in types.items()]
        exchanged[0] += sum(tensor.numel() * tensor.element_size() for _, tensor in whole)
        return pack_bucket(whole) if rank == 0 else bucket

    def each_layer(bucket: Bucket) -> Bucket:
        def counted(output: torch.Tensor, *rest: Any, **options: Any) -> Any:
            exchanged[0] += output.numel() * output.element_size()
            return gather(output, *rest, **options)

        setattr(dist, ALL_GATHER, counted)
        try:
            return sender.carry(bucket)
        finally:
            setattr(dist, ALL_GATHER, gather)

    ways: dict[str, tuple[Callable[[Bucket], Bucket], Update]] = {
        "each parameter": (each_parameter, ""),
        "each layer": (each_layer, ""),
        "own shards": (sender.carry_part, ""),
        "changes": (sender.carry_part, "changes"),
    }
    for bucket in planned("keep"):
        sender.carry_part(bucket)
    least: dict[str, float] = {}
    bytes_of: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, (hand_over, update) in ways.items():
            if name == "changes":
                with torch.no_grad():
                    for parameter in parameters.values():
                        parameter.add_(torch.sign(torch.randn_like(parameter)), alpha=1e-6)  # as AdamW's first step
            exchanged[0] = 0
            buckets = planned(update)
            dist.barrier()  # type: ignore[no-untyped-call]
            started = time.perf_counter()
            sent = [bucket for bucket in map(hand_over, buckets) if bucket.data is not None]
            dist.barrier()  # type: ignore[no-untyped-call]
            least[name] = min(least.get(name, TIMEOUT_S), time.perf_counter() - started)
            total = torch.tensor(sum(bucket.num_bytes for bucket in sent))
            dist.all_reduce(total)
            bytes_of[name] = exchanged[0] / 2e6, float(total) / 1e6
    if rank == 0:
        table = harness.Table(dtype, "MB that a rank received", "MB to an engine", "seconds")
        for name, seconds in least.items():
            table.row(name, f"{bytes_of[name][0]:.0f}", f"{bytes_of[name][1]:.1f}", f"{seconds:.2f}")
    leave()


if __name__ == "__main__":
    harness.run(main)
