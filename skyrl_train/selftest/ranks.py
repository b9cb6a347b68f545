"""Cases of several processes: memory that is exported, groups of ranks, and a model spread over them."""

from __future__ import annotations

import ast
import gc
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch, stage
from skyrl_train.config.models import StrategyConfig, mesh_sizes
from skyrl_train.distributed import ModelStrategy, RankContext, RankMesh, SequenceGroup, join, leave, make_strategy
from skyrl_train.endpoints import Rendezvous
from skyrl_train.model.parallel import all_gather, reduce_scatter
from skyrl_train.selftest.cases import Context, SkipCase
from skyrl_train.selftest.fixtures import (
    gradient_of,
    make_learner,
    make_reference,
    require_gradient,
    save_model,
    weights_of,
)
from skyrl_train.weight_sync import Export, WeightGroup, import_copy
from skyrl_train.weights import checksum_of, pack

_TIMEOUT_S = 120.0
_NUM_WORDS = 1 << 20
"""Of a bucket: 4 MiB."""
_STRATEGIES = {
    "fsdp2": StrategyConfig(name="fsdp2"),
    "fsdp2_cpu_offload": StrategyConfig(name="fsdp2", cpu_offload=True),
    "fsdp2_state_in_host": StrategyConfig(name="fsdp2", cpu_offload="optimizer"),
    "ddp": StrategyConfig(name="ddp"),
    "sequence_parallel": StrategyConfig(name="fsdp2", sequence_parallel_size=2),
    "tensor_parallel": StrategyConfig(name="fsdp2", tensor_parallel_size=2),
    "expert_parallel": StrategyConfig(name="fsdp2", expert_parallel_size=2),
}


def export_without_importer(context: Context) -> str:
    """Memory that was exported and that nobody opened is given back."""
    device = torch.device(context.device)
    if not context.on_cuda:
        export = Export(torch.ones(_NUM_WORDS).view(torch.uint8))
        (files,) = export.handles.values()
        assert Path(files[0]).stat().st_size == 4 * _NUM_WORDS
        export.close()
        assert not Path(files[0]).exists(), f"{files[0]} is left in shared memory"
        return "shared memory on a CPU: nothing left"
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        _, flat = pack([("weight", torch.ones(_NUM_WORDS))], device)
        export = Export(flat)
        del flat
        export.close()
        gc.collect()
    _collect_ipc()
    left = torch.cuda.memory_allocated() - before
    assert left < 4 * _NUM_WORDS, f"{left / 2**20:.1f} MiB are still held after 4 exports of 4 MiB"
    return f"{left} bytes left after 4 exports of 4 MiB"


def export_and_import(context: Context) -> str:
    """Two processes on one device: rank 1 copies what rank 0 exports; rank 0 has its memory back afterwards."""
    device = torch.device(context.device)
    offer, taken = context.folder / "offer.json", context.folder / "taken"
    if context.rank == 1:
        handles, size, checksum = ast.literal_eval(_wait_for(offer))
        found = checksum_of(import_copy(handles, device, size))
        taken.write_text(str(found))
        assert found == checksum, f"the imported bytes have checksum {found}, the exported ones {checksum}"
        return "imported"
    before = torch.cuda.memory_allocated() if context.on_cuda else 0
    bucket, flat = pack([("weight", torch.arange(_NUM_WORDS, dtype=torch.float32))], device)
    export = Export(flat)
    _publish(offer, repr([dict(export.handles), len(flat), bucket.checksum]))
    started = time.monotonic()
    _wait_for(taken)
    seconds = time.monotonic() - started
    del flat
    export.close()
    gc.collect()
    if context.on_cuda:
        _collect_ipc()
        left = torch.cuda.memory_allocated() - before
        assert left < 4 * _NUM_WORDS, f"{left / 2**20:.1f} MiB are still held after the import"
    return f"4 MiB with the right checksum, memory back; imported within {seconds:.1f} s"


def default_group(context: Context) -> str:
    """The collectives that a learner uses, on the device and on the CPU, over the group of all ranks."""
    device = _join(context)
    size = context.num_ranks
    mine = torch.full((size * 3,), float(context.rank + 1), device=device)
    dist.all_reduce(mine)
    assert mine.tolist() == [size * (size + 1) / 2] * (size * 3), f"all_reduce: {mine.tolist()}"
    gathered = torch.empty(size * 3, device=device)
    all_gather(gathered, torch.full((3,), float(context.rank), device=device))
    assert gathered.tolist() == [float(rank) for rank in range(size) for _ in range(3)], f"gather: {gathered.tolist()}"
    scattered = torch.empty(3, device=device)
    reduce_scatter(scattered, torch.arange(size * 3.0, device=device))
    assert scattered.tolist() == [size * (context.rank * 3.0 + index) for index in range(3)]
    counts = torch.tensor([context.rank])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    assert int(counts) == size - 1, f"all_reduce on the CPU: {int(counts)}"
    dist.barrier()
    leave()
    return f"{size} ranks on {'NCCL and gloo' if context.on_cuda else 'gloo'}"


def weight_group(context: Context) -> str:
    """The group that carries weights, beside the default group: rank 0 sends a bucket, the others have its bytes."""
    device = _join(context)
    group = WeightGroup(_rendezvous(context, "weights"), device)
    bucket, flat = pack([("weight", torch.arange(_NUM_WORDS, dtype=torch.float32))], device)
    started = time.monotonic()
    if context.rank == 0:
        group.send(flat)
    else:
        assert checksum_of(group.receive(len(flat))) == bucket.checksum, "the received bytes have another checksum"
    seconds = time.monotonic() - started
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert int(total) == context.num_ranks, "the default group does not answer beside it"
    dist.barrier()
    group.close()
    leave()
    return f"{context.num_ranks} ranks, {len(flat) / 2**20:.0f} MiB in {seconds:.2f} s"


def strategy_step(context: Context, *, name: str, dtype: str) -> str:
    """A model spread over the ranks: the gradient of one process, offload and onload bit for bit, save and load."""
    chosen = _STRATEGIES[name]
    of_ranks = chosen.ranks_per_share * chosen.expert_parallel_size
    if context.num_ranks % of_ranks:
        raise SkipCase(f"needs a multiple of {of_ranks} devices, found {context.num_ranks}")
    folder = context.folder / f"model-{context.rank}"
    experts = 4 if chosen.expert_parallel_size > 1 else 0
    # once ranks have met, transformers writes models on the first alone
    reference = make_reference(save_model(folder, experts=experts))
    strategy = _strategy(chosen, context, _join(context), dtype=getattr(torch, dtype))
    in_host = chosen.offloads_state
    learner = make_learner(folder, context.device, dtype=dtype, strategy=strategy, state_in_host=in_host)
    shard = _own_rows(reference.step, context, chosen.ranks_per_share)
    learner.forward_backward(shard)
    strategy.reduce_gradients(learner.engine.parameters.values())
    error = require_gradient(gradient_of(learner), reference, dtype)
    learner.engine.zero_grad()
    learner.forward_backward(shard)
    learner.optim_step()
    stepped = weights_of(learner)
    learner.save(context.folder / "checkpoint")
    offloader = learner.engine.offloader
    held = _bytes_on_cuda(learner.engine.held_tensors())
    allocated = torch.cuda.memory_allocated() if context.on_cuda else 0
    offloader.offload()
    freed = allocated - torch.cuda.memory_allocated() if context.on_cuda else 0
    assert freed >= 0.9 * held, f"offload freed {freed / 2**20:.1f} of {held / 2**20:.1f} MiB"
    offloader.onload(optimizer=True)
    assert torch.equal(weights_of(learner), stepped), "weights changed while they were in the host's memory"
    learner.forward_backward(shard)
    learner.optim_step()
    assert not torch.equal(weights_of(learner), stepped), "a step did not change the weights"
    dist.barrier()
    learner.load(context.folder / "checkpoint")
    assert torch.equal(weights_of(learner), stepped), "loaded weights are not those that were saved"
    dist.barrier()
    leave()
    figure = f"{context.num_ranks} ranks, gradient {error:.1e} off, offload and load bit for bit"
    return f"{figure}, {freed / 2**20:.0f} MiB freed meanwhile" if context.on_cuda else figure


def _strategy(chosen: StrategyConfig, context: Context, device: torch.device, *, dtype: torch.dtype) -> ModelStrategy:
    """What spreads the model, on a rank that has joined the others."""
    size = chosen.sequence_parallel_size
    ranks = RankContext(
        num_ranks=context.num_ranks,
        device=device,
        dtype=dtype,
        cpu_offload=chosen.offloads_all,
        group=SequenceGroup(size, timeout_s=_TIMEOUT_S) if size > 1 else None,
        mesh=RankMesh(sizes=mesh_sizes(chosen, context.num_ranks), device_type=device.type, timeout_s=_TIMEOUT_S),
    )
    return make_strategy(chosen, ranks)


def _bytes_on_cuda(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards on CUDA devices."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(int(tensor.nbytes) for tensor in local if tensor.device.type == "cuda")


def _own_rows(step: MiniBatch, context: Context, groups_of: int) -> MiniBatch:
    """This rank's share of the closed mini-batch; ranks that compute together have the same."""
    shards = stage(step.batch, context.num_ranks // groups_of).shards
    return MiniBatch(batch=shards[context.rank // groups_of], denominators=step.denominators)


def _collect_ipc() -> None:
    """Give back exported blocks whose importers are done."""
    library: Any = torch.cuda
    library.ipc_collect()


def _join(context: Context) -> torch.device:
    """Make this process a rank of the default group; its device."""
    device = torch.device(context.device)
    join(_rendezvous(context, "default"), device)
    return device


def _rendezvous(context: Context, name: str) -> Rendezvous:
    return Rendezvous(
        rank=context.rank,
        num_ranks=context.num_ranks,
        init_method=f"file://{context.folder / name}",
        timeout_s=_TIMEOUT_S,
    )


def _publish(path: Path, text: str) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)


def _wait_for(path: Path) -> str:
    ends = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < ends, f"the other process did not write {path.name} within {_TIMEOUT_S:g} s"
        time.sleep(0.02)
    return path.read_text()
