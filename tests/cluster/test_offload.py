"""Models whose memory comes and goes, on two real FSDP2 ranks: what becomes of training is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from skyrl_train.batch.steps import stage
from skyrl_train.config import Config
from skyrl_train.config.models import (
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    PlacementConfig,
    PlatformConfig,
    StrategyConfig,
)
from skyrl_train.distributed import Sharded
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.learner import PolicyLearner
from skyrl_train.model import load_causal_lm
from tests.support.gloo_ranks import on_ranks
from tests.support.learner_cases import critic_of, make_batch, policy_of, save_tiny_model
from tests.support.ray_learners import make_config, mini_batch, relative_difference, weights_of

pytestmark = pytest.mark.cluster

CPU = torch.device("cpu")
LENGTHS = [9, 4, 12, 7, 5, 16, 8]
Move = Callable[[PolicyLearner], None]


def leave_and_return(learner: PolicyLearner) -> None:
    offloader = learner.engine.offloader
    offloader.offload()
    offloader.offload()
    held = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in learner.engine.held_tensors()]
    assert all(storage.nbytes() == 0 or not storage.resizable() for storage in held)
    assert sum(not storage.resizable() for storage in held) == 0
    offloader.onload(optimizer=False)
    offloader.onload(optimizer=True)


def stay(learner: PolicyLearner) -> None:
    """Does not move."""


def train(learner: PolicyLearner, shard_of: Callable[[int], object], between: Move) -> tuple[dict[str, Tensor], Tensor]:
    """Weights after three steps, and the scores in between."""
    scores = []
    for seed in range(3):
        between(learner)
        scores.append(learner.forward(make_batch(LENGTHS, seed=9)))
        between(learner)
        learner.forward_backward(shard_of(seed))  # type: ignore[arg-type]
        between(learner)
        learner.optim_step()
        between(learner)
    return weights_of(learner), torch.cat(scores)


def run_rank(rank: int, folder: Path) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    results = {}
    for name, config, between in variants(folder):
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        spread = Sharded(device=CPU, dtype=dtype, cpu_offload=config.strategy.offloads_all)
        learner = policy_of(config, strategy=spread)
        assert learner.engine.passes.device == CPU

        def shard_of(seed: int) -> object:
            closed = mini_batch(seed)
            return replace(closed, batch=stage(closed.batch, 2).shards[rank])

        results[name] = train(learner, shard_of, between)
    return results


def build_on_rank(rank: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Rank 1 cannot read weights: whoever tries on it ends the test. What the shards add up to."""
    if rank == 1:

        def refuse(*arguments: object, **options: object) -> object:
            raise AssertionError("a rank that receives its part read weights from the disk")

        safetensors.safe_open = safetensors.torch.load_file = refuse  # type: ignore[assignment]
        for module in ("causal_lm", "value_model"):
            vars(import_module(f"skyrl_train.model.{module}")).update(read_causal_lm=refuse, safe_open=refuse)
    config = replace(make_config(folder, strategy="fsdp2"), critic=CriticConfig(model=CriticModelConfig(path="policy")))
    found = {}
    for role in ("policy", "critic"):
        spread = Sharded(device=CPU, dtype=torch.float32, cpu_offload=False)
        learner = critic_of(config, strategy=spread) if role == "critic" else policy_of(config, strategy=spread)
        found[role] = dict(learner.weights())
    return found


def resume_crosswise(rank: int, folder: Path) -> list[bool]:
    """Whether shards that were saved with the optimizer's state on the device go on in the host bit for bit, and the other
    way round."""
    plain = make_config(folder, strategy="fsdp2")
    moved = replace(plain, strategy=replace(plain.strategy, cpu_offload="optimizer"))
    same = []
    for first, second in ((plain, moved), (moved, plain)):

        def steps(config: Config, seeds: range, load: Path | None = None) -> PolicyLearner:
            learner = policy_of(config, strategy=Sharded(device=CPU, dtype=torch.float32, cpu_offload=False))
            if load is not None:
                learner.load(load)
            for seed in seeds:
                closed = mini_batch(seed)
                learner.forward_backward(replace(closed, batch=stage(closed.batch, 2).shards[rank]))
                learner.optim_step()
            return learner

        saved = folder / f"saved by {first.strategy.cpu_offload}"
        steps(first, range(2)).save(saved)
        resumed, whole = steps(second, range(2, 4), saved), steps(first, range(4))
        for kind, learner in (("resumed", resumed), ("whole", whole)):
            learner.save(saved / kind)
        name = f"shard-{rank:05d}.safetensors"
        same.append((saved / "resumed" / name).read_bytes() == (saved / "whole" / name).read_bytes())
    return same


def test_shards_go_on_bit_for_bit_wherever_the_optimizers_state_is(tmp_path: Path) -> None:
    assert on_ranks(resume_crosswise, save_tiny_model(tmp_path / "model", tokenizer=True)) == [[True, True]] * 2


def variants(folder: Path) -> list[tuple[str, Config, Move]]:
    plain = make_config(folder, strategy="fsdp2")
    return [
        ("plain", plain, stay),
        ("moved", plain, leave_and_return),
        ("cpu_offload", replace(plain, strategy=StrategyConfig(name="fsdp2", cpu_offload=True)), stay),
        ("state in the host", replace(plain, strategy=StrategyConfig(name="fsdp2", cpu_offload="optimizer")), stay),
        ("checkpointing", replace(plain, model=replace(plain.model, gradient_checkpointing=True)), stay),
        ("bfloat16", replace(plain, model=replace(plain.model, dtype="bfloat16")), stay),
        ("bfloat16 moved", replace(plain, model=replace(plain.model, dtype="bfloat16")), leave_and_return),
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    folder = save_tiny_model(tmp_path_factory.mktemp("offloader"), tokenizer=True)
    found: dict[str, tuple[dict[str, Tensor], Tensor]] = on_ranks(run_rank, folder)[0]
    for name, config, _ in variants(folder):
        if name in ("plain", "bfloat16"):
            alone = policy_of(config)
            found[f"one process, {config.model.dtype}"] = train(alone, mini_batch, stay)
    return found


@pytest.mark.parametrize(
    ("name", "stayed"), [("moved", "plain"), ("bfloat16 moved", "bfloat16"), ("state in the host", "plain")]
)
def test_what_left_and_came_back_trains_bit_for_bit_as_what_stayed(
    results: dict[str, tuple[dict[str, Tensor], Tensor]], name: str, stayed: str
) -> None:
    weights, scores = results[stayed]
    found, found_scores = results[name]
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert torch.equal(found_scores, scores)


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("plain", "one process, float32", 3e-6),
        ("cpu_offload", "one process, float32", 3e-6),
        ("checkpointing", "one process, float32", 3e-6),
        ("bfloat16", "one process, bfloat16", 2e-2),
        ("bfloat16", "one process, float32", 5e-2),
    ],
)
def test_offload_checkpointing_and_bfloat16_give_the_weights_of_one_process(
    results: dict[str, tuple[dict[str, Tensor], Tensor]], name: str, expected: str, tolerance: float
) -> None:
    difference = relative_difference(results[name][0], results[expected][0])
    print(f"\nrelative difference of the weights, {name} and {expected}: {difference:.2e}")
    assert difference < tolerance
    assert all(tensor.dtype == torch.float32 for tensor in results[name][0].values()), "master weights"


def test_only_rank_0_reads_the_weights_of_a_sharded_policy_or_critic(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tokenizer=True)
    found = on_ranks(build_on_rank, folder)
    whole = load_causal_lm(ModelConfig(path=str(folder)), "cpu").state_dict()
    for role in ("policy", "critic"):
        for name, tensor in found[1][role].items():
            assert torch.equal(tensor, found[0][role][name])
            assert torch.equal(tensor, whole.get(name, torch.zeros_like(tensor))), "a new value head is 0"


def test_a_model_in_the_host_refuses_to_be_used(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(path=str(save_tiny_model(tmp_path, tokenizer=True))),
        placement=PlacementConfig(),
        platform=PlatformConfig(),
    )
    learner = policy_of(config)
    learner.engine.offloader.offload()
    for use in (
        lambda: learner.forward(make_batch(LENGTHS)),
        lambda: learner.forward_backward(mini_batch(0)),
        learner.optim_step,
        lambda: learner.hold_state(copies=False),
        lambda: learner.export_hf(tmp_path / "export"),
    ):
        with pytest.raises(SkyrlTrainError, match="host's memory; call onload"):
            use()
