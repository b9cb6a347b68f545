"""What ranks do for a weight sync, without Ray and engines.

    python scripts/bench/weight_parts.py                             # two ranks hand over their shards, each way
    python scripts/bench/weight_parts.py --stream 16 8               # 16 ranks to 8 workers of engines, over gloo

With `--stream` each rank and each worker is a process, all on this machine and named as if eight ranks, or four workers,
were on a node. They pass random weights by the plan (`weight_sync/stream.py`) and, in turns, in one group in which each rank
broadcasts to all others. Prints what a worker and a rank received, from other nodes and from their own, counted by those who
receive and compared with what the plan counts, and how often the busiest passes on what a bucket has. Ends with an error
where a bit differs.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
from weight_sync import save_model

if TYPE_CHECKING:
    from multiprocessing import Queue

    from torch import Tensor

    from skyrl_train.weights import StreamPlan

TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of the model in float32")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", type=int, nargs=2, metavar=("RANKS", "WORKERS"), help="over gloo, by the plan")
    args = parser.parse_args(argv)
    if args.stream:
        measure_streams(*args.stream, megabytes=args.megabytes, rounds=args.rounds)
        return
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


def measure_streams(num_ranks: int, num_workers: int, *, megabytes: int, rounds: int) -> None:
    """Print what passes from so many ranks to so many workers. Raises AssertionError where it is not what was sent."""
    import multiprocessing

    import torch

    from skyrl_train.weight_sync import topology
    from tests.support.weight_streams import hops, make_plan, sizes_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrix = (640, 512)
    count = max(1, round(megabytes * 1e6 / 2 / (matrix[0] * matrix[1])))
    weights = {f"layers.{index}.matrix": torch.randn(matrix).bfloat16() for index in range(count)}
    weights |= {f"layers.{index}.norm": torch.randn(matrix[1]) for index in range(count)}
    nodes = [f"ranks-{index // 8}" for index in range(num_ranks)]
    plan = make_plan(weights, nodes, [f"engines-{index // 4}" for index in range(num_workers)], limit_bytes=16 * 2**20)
    context = multiprocessing.get_context("fork")  # which shares the weights and what was imported
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_stream_end, args=(folder, number, plan, weights, rounds, answers))
            for number in range(num_ranks + num_workers)
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(TIMEOUT_S)
    counted: dict[tuple[str, int], int] = {}
    for stage, _, target, num_bytes in hops(topology.Topology.of(plan), sizes_of(plan, headers=True)):
        counted[stage, target] = counted.get((stage, target), 0) + num_bytes
    measured = {key: size for each in found for key, size in each.items() if size}
    assert measured == counted, "what was received is not what the plan counts"
    whole = sum(sizes_of(plan))
    links = topology.Topology.of(plan).link_bytes(sizes_of(plan))
    table = harness.Table(
        *("way", "MB of weights", "all received, MB", "a worker, other nodes", "a worker, its node", "a rank"),
        "calls for a bucket",
        title=f"{num_ranks} ranks to {num_workers} workers, bit for bit; counted and measured bytes agree",
    )
    count = num_ranks + num_workers
    cells = whole, whole * (count - 1), whole, 0, whole * (1 - 1 / num_ranks)
    table.row("one group", *(f"{cell / 1e6:,.0f}" for cell in cells), num_ranks)
    away = links["enter"].network + links["across"].network
    cells = whole, sum(counted.values()), away, links["within"].local, 0
    table.row("plan", *(f"{cell / 1e6:,.0f}" for cell in cells), 2 * topology.Topology.of(plan).most_calls())


def _stream_end(
    folder: str, number: int, plan: StreamPlan, weights: Mapping[str, Tensor], rounds: int, answers: Queue[Any]
) -> None:
    """One rank or worker of both ways."""
    import torch

    from skyrl_train.endpoints import Rendezvous
    from skyrl_train.weight_sync import Arrivals, SentWeights, StreamEnd, WeightGroup
    from tests.support.weight_streams import place_of, receive, send, sizes_of

    num_ranks, cpu = len(plan.sender_nodes), torch.device("cpu")
    count = num_ranks + len(plan.receiver_nodes)
    end = StreamEnd(plan, place_of(f"{folder}/plan", number, plan, TIMEOUT_S), cpu)
    place = Rendezvous(rank=number, num_ranks=count, init_method=f"file://{folder}/one", timeout_s=TIMEOUT_S)
    group, arrivals, sent = WeightGroup(place, cpu), Arrivals(), SentWeights()
    sizes, received = sizes_of(plan), {}
    for version in range(rounds):
        group.receive(1024) if number else group.send(torch.zeros(1024, dtype=torch.uint8))  # all are there
        if number < num_ranks:
            send(end, number, dict(weights), version, "", sent)
        else:
            found = receive(end, arrivals, version, "")
        if number >= num_ranks:
            assert set(found) == set(weights)
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), f"worker {number}"
        if version == 0:
            received = {(stage, number): way.received_bytes for stage, (_, way) in end.groups.items()}
        before = group.received_bytes
        for rank, size in enumerate(sizes):
            group.receive(size, rank) if rank != number else group.send(torch.zeros(size, dtype=torch.uint8))
        assert group.received_bytes - before == sum(sizes) - (sizes[number] if number < num_ranks else 0)
    answers.put(received)
    group.receive(1024) if number else group.send(torch.zeros(1024, dtype=torch.uint8))  # nobody leaves before


if __name__ == "__main__":
    harness.run(main)
