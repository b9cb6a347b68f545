"""Experts divided over ranks: one gradient, one norm and the same weights after a step as one process has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch, stage
from skyrl_train.config.fields import LayoutName
from skyrl_train.config.models import ModelConfig, OptimizerConfig, StrategyConfig, mesh_sizes
from skyrl_train.distributed import ModelStrategy, RankContext, RankMesh, SingleProcess, make_strategy
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model.parallel import check_experts, follow_routing
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import distance, use_layout
from tests.support.layouts import Layout, closed, fixed_rollouts
from tests.support.learner_cases import fixed_rows, make_double
from tests.support.memory_cases import DEADLINE_S, FailingMeter, full_weights, size_itself
from tests.support.moe_cases import FAMILIES, STEP, DoubleRouter, double_moe, make_moe, with_experts

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
LAYOUTS: tuple[LayoutName, ...] = ("padded", "packed", "prefix_shared")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Found:
    """By one rank, whole."""

    gradients: dict[str, Tensor]
    """By layout, and with recorded experts."""
    norm: float
    weights: Tensor
    """After a step that clips."""


def make_model() -> PreTrainedModel:
    made = double_moe()
    for layer in made.model.layers:
        layer.mlp.gate = DoubleRouter(layer.mlp.gate.weight)
    follow_routing(made, name="m")
    return made


def learner_of(spread: ModelStrategy, *, optimizer: str = "adamw") -> PolicyLearner:
    chosen = OptimizerConfig(name=optimizer, lr=0.01, max_grad_norm=0.1)
    engine = ModelEngine(make_model(), name="policy", micro_batching=fixed_rows(1), optimizer=chosen, strategy=spread)
    return PolicyLearner(engine, model=ModelConfig(), algorithm=STEP.algorithm, temperature=1.0)


def shard_of(rank: int, num_ranks: int, *, recorded: bool = False) -> MiniBatch:
    rollouts = with_experts(fixed_rollouts()) if recorded else fixed_rollouts()
    mini_batch = closed(STEP, rollouts, Layout(step_wise=True))
    return replace(mini_batch, batch=stage(mini_batch.batch, num_ranks, together="prompt").shards[rank])


def one_step(learner: PolicyLearner) -> float:
    """A step of AdamW that clips; the norm of its gradient."""
    spread = learner.engine.strategy
    learner.forward_backward(shard_of(spread.rank, spread.num_ranks))
    return float(learner.optim_step()["policy/grad_norm"].value)


def weights_of(learner: PolicyLearner) -> Tensor:
    full = learner.engine.strategy.full
    return torch.cat([full(each.detach()).flatten() for each in learner.engine.model.parameters()])


def measured(spread: ModelStrategy) -> Found:
    learner = learner_of(spread)
    engine = learner.engine

    def gradient(layout: LayoutName, *, recorded: bool = False) -> Tensor:
        engine.zero_grad()
        use_layout(learner, layout, rows=2 + spread.rank)
        learner.forward_backward(shard_of(spread.rank, spread.num_ranks, recorded=recorded))
        spread.reduce_gradients(engine.parameters.values())
        whole = [spread.full(each.grad).flatten() for each in engine.parameters.values() if each.grad is not None]
        return torch.cat(whole).clone()

    gradients = {layout: gradient(layout) for layout in LAYOUTS}
    gradients["recorded"] = gradient("prefix_shared", recorded=True)
    engine.zero_grad()
    return Found(gradients=gradients, norm=one_step(learner), weights=weights_of(learner))


def strategy(name: str) -> ModelStrategy:
    """`fsdp2 2`: shards, and experts divided over two ranks; `fsdp2`: shards alone; `fsdp2 2 2`:
    in groups of two; `offload`: with shards in the host's memory."""
    kind, *sizes = name.removesuffix(" offload").split()
    expert, fsdp = (int(sizes[number]) if len(sizes) > number else default for number, default in enumerate((1, 0)))
    config = StrategyConfig(name=kind, expert_parallel_size=expert, fsdp_size=fsdp)
    mesh = RankMesh(sizes=mesh_sizes(config, dist.get_world_size()), device_type="cpu")
    ranks = RankContext(
        num_ranks=dist.get_world_size(),
        device=CPU,
        dtype=torch.float64,
        mesh=mesh,
        cpu_offload=name.endswith("offload"),
    )
    return make_strategy(config, ranks)


def run_rank(rank: int, folder: Path, names: tuple[str, ...]) -> dict[str, Found]:
    return {name: measured(strategy(name)) for name in names}


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        pytest.param(2, ("ddp 2", "fsdp2 2"), marks=SLOW),
        pytest.param(4, ("fsdp2 2", "fsdp2 2 2 offload"), marks=NIGHTLY),
        pytest.param(4, ("ddp 2", "ddp 4", "fsdp2 4", "fsdp2 2 2", "fsdp2 2 0 offload"), marks=NIGHTLY),
    ],
)
def test_experts_on_other_ranks_leave_gradient_norm_and_step(
    tmp_path: Path, num_ranks: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = measured(SingleProcess())
    for ranks in on_ranks(run_rank, tmp_path, names, num_ranks=num_ranks):
        for name, found in ranks.items():
            for layout, gradient in expected.gradients.items():
                assert distance(found.gradients[layout], gradient) < 1e-10, (name, layout)
            assert found.norm == pytest.approx(expected.norm, rel=1e-10), name
            assert distance(found.weights, expected.weights) < 1e-10, name


@dataclass(frozen=True, kw_only=True)
class WentOn:
    """By one rank."""

    weights: dict[tuple[str, str], Tensor]
    """By (who saved, who went on), after the step behind the checkpoint."""
    synced: dict[str, float]
    """By who sent: how far a model of one process scores apart with the weights that it was sent."""
    exported: dict[str, float]
    """The same with those of the export; of rank 0."""


def go_on(rank: int, folder: Path, spread: tuple[str, ...]) -> WentOn:
    """Each saves after a step; then each goes on from what each saved, `single` among them."""
    learners = {name: learner_of(strategy(name)) for name in spread}
    for name, learner in learners.items():
        one_step(learner)
        learner.save(folder / name)
    dist.barrier()
    weights, synced, exported = {}, {}, {}
    for name, learner in learners.items():
        for saved in ("single", *spread):
            learner.load(folder / saved)
            one_step(learner)
            weights[saved, name] = weights_of(learner)
        batch = shard_of(rank, 4).batch
        scores = learner.forward(batch)
        synced[name] = _distance_of_scores(dict(learner.weights()), batch, scores)
        whole = learner.whole_state_dict()
        if rank == 0:
            exported[name] = _distance_of_scores(whole, batch, scores)
    return WentOn(weights=weights, synced=synced, exported=exported)


def _distance_of_scores(weights: dict[str, Tensor], batch: TrainingInputBatch, scores: Tensor) -> float:
    alone = learner_of(SingleProcess())
    alone.engine.model.load_state_dict(weights)
    return float((alone.forward(batch) - scores).abs().max())


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(("fsdp2", "ddp 2", "fsdp2 2 2"), marks=NIGHTLY),
        pytest.param(("fsdp2", "ddp 2", "ddp 4", "fsdp2 2", "fsdp2 4", "fsdp2 2 2"), marks=NIGHTLY),
    ],
    ids=["some", "all"],
)
def test_every_way_to_spread_goes_on_from_every_other_and_gives_its_weights_away(
    tmp_path: Path, spread: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    learner = learner_of(SingleProcess())
    one_step(learner)
    learner.save(tmp_path / "single")
    one_step(learner)
    expected = weights_of(learner)
    for found in on_ranks(go_on, tmp_path, spread, num_ranks=4):
        for (saved, name), weights in found.weights.items():
            assert distance(weights, expected) < 1e-10, (saved, name)
        assert max([*found.synced.values(), *found.exported.values()]) < 1e-10
    for saved in spread:
        learner.load(tmp_path / saved)
        one_step(learner)
        assert distance(weights_of(learner), expected) < 1e-10, saved


TOKENS = 64
"""Of a micro-batch whose size is its own affair."""
NUM_POINTS = 12
"""Of a step, at each of which memory runs out once."""


def run_out(rank: int, folder: Path, name: str) -> tuple[Tensor, list[Tensor]]:
    """Weights after a step by itself, and after the same one with memory running out on rank 1."""
    learner, meter = learner_of(strategy(name), optimizer="sgd"), FailingMeter()
    engine = learner.engine
    before = [each.detach().clone() for each in engine.parameters.values()]

    def step(*refused: int) -> Tensor:
        with torch.no_grad():
            for parameter, value in zip(engine.parameters.values(), before):
                parameter.copy_(value)
        batches = size_itself(engine, meter, tokens=TOKENS)
        meter.refuse(*refused)
        one_step(learner)
        assert bool(engine.strategy.agree(batches.budgets.training < TOKENS)) == bool(
            engine.strategy.agree(len(refused))
        )
        return full_weights(engine)

    step()  # the first one makes what FSDP2 gathers into: later ones allocate less
    calm = step()
    last = engine.strategy.agree(meter.num_allocations * rank)
    points = [1 + number * (last - 1) // NUM_POINTS for number in range(NUM_POINTS)]
    return calm, [step(*([point] if rank == 1 else [])) for point in points]


@pytest.mark.parametrize("name", [pytest.param("fsdp2 2", marks=SLOW), pytest.param("ddp 2", marks=NIGHTLY)])
def test_memory_that_runs_out_on_one_rank_leaves_no_other_waiting_for_its_tokens(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for calm, disturbed in on_ranks(run_out, tmp_path, name, deadline_s=DEADLINE_S):
        assert len(disturbed) == NUM_POINTS
        for weights in disturbed:
            assert distance(weights, calm) < 1e-10


def run_families(rank: int, folder: Path) -> dict[str, tuple[float, float]]:
    """How far states, and the gradient of all ranks' rows together, are from those of a model that is whole."""
    found = {}
    for kind, changes in FAMILIES:
        whole, divided = (make_moe(kind, **changes) for _ in range(2))
        for model in (whole, divided):
            model.set_experts_implementation("eager")
            make_double(model)
        spread = strategy("ddp 2")
        check_experts(divided, size=2, num_shards=1, name=kind)
        spread.prepare(divided)
        rows = [torch.arange(3, 12).unsqueeze(0), torch.arange(20, 25).unsqueeze(0)]
        expected = [whole.base_model(input_ids=ids, use_cache=False).last_hidden_state for ids in rows]
        state = divided.base_model(input_ids=rows[rank], use_cache=False).last_hidden_state
        sum(each.square().sum() for each in expected).backward()  # type: ignore[union-attr]
        state.square().sum().backward()
        spread.reduce_gradients(divided.parameters())
        pairs = [
            (one.grad.flatten(), spread.full(other.grad).flatten())
            for one, other in zip(whole.parameters(), divided.parameters())
            if one.grad is not None and other.grad is not None
        ]
        assert len(pairs) == sum(one.grad is not None for one in whole.parameters())
        gradients = [torch.cat(each) for each in zip(*pairs)]
        found[kind] = float((state - expected[rank]).abs().max()), distance(*gradients)
    return found


@SLOW
def test_every_family_that_is_divided_computes_what_it_does_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers round to float32, which differs where states do by their last bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for found in on_ranks(run_families, tmp_path):
        assert found.keys() == dict(FAMILIES).keys()
        for kind, apart in found.items():
            assert max(apart) < 1e-6, (kind, apart)
