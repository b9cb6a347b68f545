"""Whole weights of a model that is spread over ranks: what each rank has is put together, with one collective a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.distributed import Sharded, gather_whole, own_box
from skyrl_train.endpoints import Rendezvous
from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import add_adapter, as_they_are, by_layer, merged_weights, weights_by_name
from skyrl_train.model.parallel import ALL_GATHER
from skyrl_train.weight_sync import Arrivals, RankSender, StreamEnd
from skyrl_train.weights import Bucket, StreamPlan, Update, carried_bytes
from tests.support.gloo_ranks import on_ranks
from tests.support.learner_cases import save_tiny_model

SHAPES = [(8, 6), (7, 6), (3, 5), (2, 4, 6), (9,), (1,)]
"""Some of which neither 2 nor 4 ranks can cut evenly, or at all."""


@contextmanager
def counting_gathers() -> Iterator[list[int]]:
    """The bytes that each all-gather makes whole."""
    found: list[int] = []
    gather: Callable[..., Any] = getattr(distributed, ALL_GATHER)

    def counted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(output.numel() * output.element_size())
        return gather(output, *args, **kwargs)

    setattr(distributed, ALL_GATHER, counted)
    try:
        yield found
    finally:
        setattr(distributed, ALL_GATHER, gather)


def meshes() -> dict[str, Any]:
    """Tensors of `SHAPES` under several placements, on 4 ranks, and how many collectives make them whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    line, grid = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")),
    )
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in SHAPES]
    matrices = [tensor for tensor in whole if tensor.ndim > 1]
    composed = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
    expected = [parameter.detach().clone() for parameter in composed.parameters()]
    parallelize_module(composed, grid["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(composed, mesh=grid["outer"])
    cases = {
        "sharded": (whole, [distribute_tensor(each, line, [Shard(0)]) for each in whole], 1),
        "sharded and replicated": (
            whole,
            [distribute_tensor(each, grid, [Replicate(), Shard(0)]) for each in whole],
            1,
        ),
        "along two dimensions": (
            matrices,
            [distribute_tensor(each, grid, [Shard(0), Shard(1)]) for each in matrices],
            2,
        ),
        "twice along one": (whole, [distribute_tensor(each, grid, [Shard(0), Shard(0)]) for each in whole], 2),
        "held by all": (whole, whole, 0),
        "fsdp over tensor parallel": (expected, list(composed.parameters()), None),
    }
    found = {}
    for name, (wanted, tensors, expected_count) in cases.items():
        with counting_gathers() as gathers:
            halves = [torch.bfloat16 if index % 2 else None for index in range(len(tensors))]
            made = gather_whole(tensors, halves)
        equal = [
            torch.equal(mine, each if half is None else each.to(half)) for mine, each, half in zip(made, wanted, halves)
        ]
        equal.append(handed_over_once(tensors, wanted))
        found[name] = (equal, len(gathers) if expected_count is not None else None, expected_count)
    return found


def handed_over_once(tensors: list[Any], wanted: list[Tensor]) -> bool:
    """Whether the boxes of all ranks are the tensors, with each value once; those that are no boxes are told apart alike."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    mine = [own_box(tensor, share=index + rank, num_shares=num_ranks) for index, tensor in enumerate(tensors)]
    everybodys: list[Any] = [None] * num_ranks
    distributed.all_gather_object(everybodys, mine)
    for index, whole in enumerate(wanted):
        boxes = [each[index] for each in everybodys]
        if any(box is None for box in boxes):
            assert all(box is None for box in boxes)
            continue
        count, made = torch.zeros_like(whole), torch.zeros_like(whole)
        for box, offset in boxes:
            place = tuple(slice(low, low + size) for low, size in zip(offset, box.shape))
            made[place] = box
            count[place] += 1
        if not (torch.equal(made, whole) and bool((count == 1).all())):
            return False
    return True


def on_one_of_four(rank: int, folder: Path) -> dict[str, Any]:
    return meshes()


@pytest.mark.slow
def test_every_way_to_shard_is_put_together_with_one_collective_a_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank in on_ranks(on_one_of_four, tmp_path, num_ranks=4):
        for name, (equal, count, expected) in rank.items():
            assert all(equal), (name, equal)
            assert count == expected, name


def assert_sent_in_parts(sender: RankSender, expected: dict[str, Tensor]) -> None:
    """What both ranks send by themselves are the weights, rounded by the sender, bit for bit."""
    facts = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    planned = Bucket(names=tuple(facts), dtypes=("bfloat16",) * len(facts), shapes=tuple(facts.values()))
    parts: list[Any] = [None, None]
    distributed.all_gather_object(parts, sender.carry_part(planned))
    made = dict(Arrivals().take(replace(planned, parts=tuple(parts)), carried_bytes))
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    assert max(part.num_bytes for part in parts) < 0.7 * sum(part.num_bytes for part in parts)


def receive_all(end: StreamEnd, arrivals: Arrivals, version: int, update: Update) -> dict[str, Tensor]:
    arrivals.begin()
    return {
        name: tensor.clone()
        for bucket, bytes_of in end.receive(version, update)
        for name, tensor in arrivals.take(bucket, bytes_of)
    }


def assert_streamed_by_both(rank: int, sender: RankSender, expected: dict[str, Tensor], meeting: Path) -> None:
    """A worker that met both ranks has the weights from them, bit for bit, and then what changed: nothing."""
    shapes = tuple(tuple(tensor.shape) for tensor in expected.values())
    planned = Bucket(names=tuple(expected), dtypes=("bfloat16",) * len(shapes), shapes=shapes)
    boxes: list[Any] = [None, None]
    distributed.all_gather_object(boxes, sender.boxes([planned]))
    plan = StreamPlan(sender_nodes=("", ""), receiver_nodes=("",), buckets=(planned,), boxes=tuple(boxes))
    place = Rendezvous(rank=rank, num_ranks=3, init_method=f"file://{meeting}", timeout_s=30.0)
    arrivals, syncs = Arrivals(), {"keep": 1, "changes": 2}
    with ThreadPoolExecutor(1) as worker:
        joined = worker.submit(StreamEnd, plan, replace(place, rank=2), torch.device("cpu")) if rank == 0 else None
        sender.take_plan(plan)
        sender.meet(place)
        for update, version in syncs.items():
            receiving = None
            if joined is not None:
                receiving = worker.submit(receive_all, joined.result(30), arrivals, version, update)  # type: ignore[arg-type]
            num_bytes = sender.stream(version, update, 0.0)  # type: ignore[arg-type]
            with torch.no_grad():  # which leaves parameters outside of layers whole
                sender._model(input_ids=torch.arange(1, 9)[None])
            if receiving is not None:
                made = receiving.result(30)
                assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
        assert num_bytes <= 1024, "no value changed"


def on_one_of_two(rank: int, folder: Path) -> dict[str, Any]:
    """Weights of an FSDP2 model with an adapter and of one without, gathered in bfloat16, against the plain model."""
    found = {}
    for with_adapter in (False, True):
        model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
        if with_adapter:
            add_adapter(model, LoraConfig(rank=2, targets=("q_proj",)), seed=0)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.fill_(1e-3)
        types: dict[str, torch.dtype | None] = dict.fromkeys(weights_by_name(model), torch.bfloat16)
        expected = {name: tensor.clone() for name, tensor in merged_weights(model, as_they_are, types)}
        strategy = Sharded(device=torch.device("cpu"), dtype=torch.float32, cpu_offload=False)
        strategy.prepare(model)
        with counting_gathers() as gathers:
            made = dict(merged_weights(model, strategy.gather, types))
        assert all(torch.equal(made[name], expected[name]) for name in types)
        sender = RankSender(model, strategy, torch.device("cpu"))
        assert_sent_in_parts(sender, expected)
        assert_streamed_by_both(rank, sender, expected, folder / f"meet-{with_adapter}")
        found[str(with_adapter)] = (len(types), len(by_layer(types)), len(gathers))
    return found


@pytest.mark.slow
def test_the_weights_of_a_layer_are_gathered_in_one_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path)
    for rank in on_ranks(on_one_of_two, tmp_path):
        for num_weights, num_layers, num_gathers in rank.values():
            assert num_gathers == num_layers < num_weights / 4


def test_names_of_a_layer_stay_together() -> None:
    names = ["embed.weight", "layers.0.q", "layers.0.experts.1.w", "layers.1.q", "norm.weight", "head.weight"]
    assert by_layer(names) == [names[:1], names[1:3], names[3:4], names[4:]]
