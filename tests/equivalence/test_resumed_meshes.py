"""A run that goes on with another strategy or other sizes: the weights are those of one process that never stopped, between
every pair; what is handed to engines and exported is the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch, stage
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy, SingleProcess
from skyrl_train.learner import ModelEngine, PolicyLearner, read_model
from skyrl_train.model import load_causal_lm, load_tokenizer, quiet_transformers
from skyrl_train.weight_sync import RankSender
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close, tree_batch, use_layout
from tests.support.learner_cases import fixed_rows, make_double
from tests.support.sequence_cases import ALGORITHM, TIMEOUT_S, Ranks, make_strategy

TOLERANCE = 1e-10
ALONE = "one process"
KINDS = {
    "ddp": Ranks(strategy="ddp", num_ranks=4),
    "fsdp": Ranks(strategy="fsdp2", num_ranks=4),
    "hsdp": Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2),
    "tensor": Ranks(strategy="fsdp2", num_ranks=4, tensor_parallel_size=4),
    "fsdp + tensor": Ranks(strategy="fsdp2", num_ranks=4, tensor_parallel_size=2),
    "fsdp + tensor, offload": Ranks(strategy="fsdp2", num_ranks=4, tensor_parallel_size=2, cpu_offload=True),
}
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.05)
"""Whose clipping takes effect."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """After the last step, on rank 0."""

    weights: dict[str, Tensor]
    norm: float
    """Of the last step's gradient, before clipping."""


def save_model(folder: Path) -> None:
    """Qwen3 with heads, features and a vocabulary that four ranks divide; parts of the latter are odd."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=52,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)


def make_learner(folder: Path, strategy: ModelStrategy) -> PolicyLearner:
    config = ModelConfig(path=str(folder))
    model = load_causal_lm(config, "cpu")
    make_double(model)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=fixed_rows(4),
        optimizer=OPTIMIZER,
        strategy=strategy,
        total_optimizer_steps=9,
    )
    learner = PolicyLearner(engine, model=config, algorithm=ALGORITHM, temperature=0.8)
    use_layout(learner, "prefix_shared", rows=3)
    return learner


def step(learner: PolicyLearner, seed: int, share: int = 0, shares: int = 1) -> float:
    closed: MiniBatch = close(tree_batch(12))
    rows = stage(closed.batch, shares).shards[share]
    rows = rows.with_columns(advantages=rows["advantages"] * (1 + seed))
    learner.forward_backward(replace(closed, batch=rows))
    return float(learner.optim_step()["policy/grad_norm"].value)  # type: ignore[union-attr]


def handed_over(learner: PolicyLearner) -> dict[str, Tensor]:
    """What each rank has of a weight sync."""
    sender = RankSender(learner.engine.model, learner.engine.strategy, torch.device("cpu"))
    found: dict[str, Tensor] = {}
    for planned in learner.weights().buckets():
        found |= dict(zip(planned.names, sender.share(planned).tensors or ()))
    return found


def run_rank(rank: int, folder: Path, model: Path, kinds: Sequence[str]) -> dict[str, dict[str, Found]]:
    """By who goes on, and from whose checkpoint."""
    found: dict[str, dict[str, Found]] = {}
    learners: dict[str, tuple[PolicyLearner, int, int]] = {}
    for name in kinds:
        ranks = KINDS[name]
        shares = ranks.num_ranks // ranks.ranks_per_share
        learner = make_learner(model, make_strategy(ranks))
        learners[name] = learner, rank // ranks.ranks_per_share, shares
        for seed in range(2):
            step(learner, seed, rank // ranks.ranks_per_share, shares)
        learner.save(folder / name)
        _require_engines_alike(learner, model)
    for name, (learner, share, shares) in learners.items():
        found[name] = {}
        for source in (ALONE, *kinds):
            learner.load(folder / source)
            learner.engine.offloader.offload()
            learner.engine.offloader.onload(optimizer=True)
            norm = step(learner, 2, share, shares)
            found[name][source] = Found(weights=learner.whole_state_dict(), norm=norm)
        learner.export_hf(folder / f"export {name}")
    return found


def _require_engines_alike(learner: PolicyLearner, model: Path) -> None:
    """A model that is given what a sync hands over scores as the ranks do."""
    other = make_learner(model, SingleProcess())
    other.load_weights(handed_over(learner).items())
    batch = tree_batch(12)
    difference = float((other.forward(batch) - learner.forward(batch)).abs().max())
    if not difference < 1e-10:
        raise ValueError(f"scores of the handed over weights differ by {difference}")


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("fsdp", "hsdp", "fsdp + tensor, offload"), marks=pytest.mark.slow),
        pytest.param(tuple(KINDS), marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_each_goes_on_from_the_checkpoint_of_every_other(
    tmp_path: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tmp_path / "model"
    save_model(model)
    alone = make_learner(model, SingleProcess())
    for seed in range(2):
        step(alone, seed)
    alone.save(tmp_path / ALONE)
    norm = step(alone, 2)
    expected = Found(weights=alone.whole_state_dict(), norm=norm)
    assert norm > 2 * OPTIMIZER.max_grad_norm
    found: dict[str, dict[str, Found]] = on_ranks(run_rank, tmp_path, model, kinds, num_ranks=4, deadline_s=TIMEOUT_S)[
        0
    ]
    for source in kinds:
        alone.load(tmp_path / source)
        again = step(alone, 2)
        found.setdefault(ALONE, {})[source] = Found(weights=alone.whole_state_dict(), norm=again)
    counts = {**dict.fromkeys(kinds, len(kinds) + 1), ALONE: len(kinds)}
    assert {name: len(sources) for name, sources in found.items()} == counts
    for name, sources in found.items():
        for source, result in sources.items():
            assert result.norm == pytest.approx(norm, rel=TOLERANCE), (name, source)
            assert _furthest(result.weights, expected.weights) < TOLERANCE, (name, source)
    for name in kinds:
        assert _furthest(_exported(tmp_path / f"export {name}"), expected.weights) < 1e-6, "float32"
        assert _parts_written_once(tmp_path / name, read_model(tmp_path / ALONE))


def _furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) <= set(expected)
    return max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items())


def _exported(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _parts_written_once(folder: Path, whole: dict[str, Tensor]) -> bool:
    """Shards hold each number of matrices once; norms, which ranks with parts of matrices have whole, at most by each."""
    from safetensors import safe_open

    count = 0
    for file in folder.glob("shard-*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith("model/")]  # noqa: SIM118
            count += sum(tensors.get_tensor(name).numel() for name in names if "norm" not in name)
    return count in (0, sum(tensor.numel() for name, tensor in whole.items() if "norm" not in name))
