"""Weights on GPUs: exported blocks that are opened and that are not, and whole syncs to engines that share the devices."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.models import (
    GeneratorConfig,
    ModelConfig,
    PlacementConfig,
    PlatformConfig,
    StrategyConfig,
    VLLMConfig,
)
from skyrl_train.distributed import GradientSync, Sharded, SingleProcess, is_out_of_memory, join, leave
from skyrl_train.endpoints import Rendezvous
from skyrl_train.errors import EngineError
from skyrl_train.model import load_causal_lm
from skyrl_train.weight_sync import Export, RankSender, WeightGroup, device_name, import_copy
from skyrl_train.weights import Bucket, pack, unpack
from tests.support.learner_cases import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


def _import_copy(handles: dict[str, Any], bucket: Bucket, answers: Any) -> None:
    flat = import_copy(handles, torch.device("cuda:0"), bucket.num_bytes)
    answers.put(float(dict(unpack(bucket, flat))["weight"].double().sum()))


def test_blocks_that_nobody_opens_go_back_to_the_device(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(device)
    for _ in range(5):
        _, flat = pack([("weight", torch.randn(1024, 1024))], device)
        export = Export(flat)
        del flat
        export.close()
        export.close()
        assert torch.cuda.memory_allocated(device) == before


def test_a_block_that_another_process_opened_goes_back_too(device: torch.device) -> None:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    before = torch.cuda.memory_allocated(device)
    for _ in range(2):
        weight = torch.randn(1024, 1024)
        bucket, flat = pack([("weight", weight)], device)
        export = Export(flat)
        del flat
        process = context.Process(target=_import_copy, args=(dict(export.handles), bucket, answers))
        process.start()
        assert answers.get(timeout=120) == pytest.approx(float(weight.double().sum()))
        process.join(60)
        export.close()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated(device) == before


def test_a_rank_exports_to_its_own_device_alone(device: torch.device, tmp_path: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path))), device)
    sender = RankSender(model, SingleProcess(), device)
    facts = sender.describe()
    planned = Bucket(
        names=tuple(fact.name for fact in facts),
        dtypes=tuple(fact.dtype for fact in facts),
        shapes=tuple(fact.shape for fact in facts),
    )
    before = torch.cuda.memory_allocated(device)
    assert sender.export(planned, {"another device"}) is planned
    assert torch.cuda.memory_allocated(device) == before
    exported = sender.export(planned, {device_name(device)})
    assert list(exported.handles) == [sender.device()]
    with pytest.raises(EngineError, match="an engine computes on"):
        import_copy({"another device": []}, device, exported.num_bytes)
    sender.close_export()
    assert torch.cuda.memory_allocated(device) == before


def test_a_weight_group_of_its_own_sends_over_nccl(device: torch.device, tmp_path: Path) -> None:
    place = Rendezvous(rank=0, num_ranks=1, init_method=f"file://{tmp_path}/meet", timeout_s=60.0)
    group = WeightGroup(place, device)
    group.send(pack([("weight", torch.randn(64, 64))], device)[1])
    group.close()


def test_an_allocation_that_no_device_holds_is_known_for_what_it_is(device: torch.device) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)


def test_gradients_that_are_summed_once_a_step_are_those_of_every_micro_batch(
    device: torch.device, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path)
    place = Rendezvous(rank=0, num_ranks=1, init_method=f"file://{tmp_path}/ranks", timeout_s=60.0)
    join(place, device)
    try:
        each, once = (_gradient(folder, device, sync) for sync in ("micro_batch", "step"))
    finally:
        leave()
    assert float((each - once).norm() / each.norm()) < 1e-6


def _gradient(folder: Path, device: torch.device, sync: GradientSync) -> torch.Tensor:
    strategy = Sharded(device=device, dtype=torch.float32, cpu_offload=False, gradient_sync=sync)
    model = load_causal_lm(ModelConfig(path=str(folder)), device)
    strategy.prepare(model)
    assert strategy.keeps_whole_gradients == (sync == "step")
    for number in range(3):
        strategy.begin_micro_batch(model, is_last=number == 2)
        ids = torch.arange(1, 9, device=device)[None] + number
        strategy.compute(
            model, lambda ids=ids: model(input_ids=ids, use_cache=False).logits.float().square().mean()
        ).backward()
    assert not list(strategy.whole_gradients(model))
    return torch.cat(
        [strategy.full(parameter.grad).flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_engines_that_share_the_devices_compute_with_what_was_sent(tmp_path: Path, tensor_parallel: int) -> None:
    """Five syncs to engines of one device or two, on the devices of as many ranks: they agree, and memory stays flat."""
    pytest.importorskip("vllm")
    if torch.cuda.device_count() < tensor_parallel:
        pytest.skip(f"needs {tensor_parallel} GPUs")
    from skyrl_train.config.derived import run_models
    from skyrl_train.plan import plan_batches
    from skyrl_train.runs.construction import build_host, build_learners

    config = Config(
        output_dir=str(tmp_path),
        platform=PlatformConfig(name="gpu", device="cuda:0"),
        model=ModelConfig(path="builtin:tiny_qwen2", dtype="bfloat16"),
        trainer=TrainerConfig(total_steps=1),
        strategy=StrategyConfig(name="fsdp2" if tensor_parallel > 1 else "single"),
        placement=PlacementConfig(backend="ray", policy_num_workers=tensor_parallel, colocate_all=True),
        generator=GeneratorConfig(
            backend="vllm",
            max_context_length=400,
            verify_weight_sync=True,
            weight_sync_tolerance=0.3,
            vllm=VLLMConfig(tensor_parallel_size=tensor_parallel, gpu_memory_utilization=0.3),
        ),
    )
    free = []
    with ExitStack() as stack:
        host = build_host(config, stack)
        assert host.engines is not None
        plan = plan_batches(config, num_train_prompts=64)
        policy = build_learners(run_models(config, plan.schedule), stack, host).policy
        for version in range(5):
            host.engines.transport.sync(policy.weights(), version)
            free.append(torch.cuda.mem_get_info(0)[0])
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert len(records) == 5
    assert all(record["probe_difference"] <= 0.3 for record in records)
    assert abs(free[-1] - free[1]) < 64 * MIB
