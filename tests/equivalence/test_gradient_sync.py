"""When ranks of a sharded model sum gradients: with each micro-batch, or with the last. The gradient is the same, the number
of exchanges and the memory differ, and what is probed is what a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch, stage
from skyrl_train.config.models import ModelConfig, OptimizerConfig, sums_once_a_step
from skyrl_train.distributed import GradientSync, Sharded
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.learner.memory import GIB, CountingMeter, Prober, hold_everything
from skyrl_train.model import load_causal_lm
from skyrl_train.model.parallel import REDUCE_SCATTER
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close, distance, flat_gradient, on_policy, with_loss
from tests.support.learner_cases import fixed_rows, make_batch, make_double, make_learner, save_tiny_model
from tests.support.memory_cases import size_itself

ALGORITHM = replace(with_loss("kl_cov"), kl_estimator="abs")
"""Terms with a kink where the old and the new log-probability are equal."""
ROWS, LENGTH = 16, 16
"""Of a mini-batch, in micro-batches of two rows on each of two ranks."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """By one rank."""

    gradient: Tensor
    on_policy_gradient: Tensor
    """With old and reference log-probabilities that the sharded model computed itself."""
    num_exchanges: int
    probed_bytes: int
    peak_bytes: int
    left: int
    """Whole gradients that are still there after the step."""


class CountedExchanges:
    """Sums of gradients over ranks, counted as they are made."""

    def __init__(self) -> None:
        self.count = 0
        self._original: Any = getattr(dist, REDUCE_SCATTER)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._original(*args, **kwargs)


def sharded_learner(folder: Path, sync: GradientSync, *, double: bool) -> PolicyLearner:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    dtype = torch.float64 if double else torch.float32
    if double:
        make_double(model)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=fixed_rows(2),
        optimizer=OptimizerConfig(name="sgd"),
        strategy=Sharded(device=torch.device("cpu"), dtype=dtype, cpu_offload=False, gradient_sync=sync),
    )
    return PolicyLearner(engine, model=ModelConfig(), algorithm=ALGORITHM, temperature=1.0)


def scored_by_itself(learner: PolicyLearner, closed: MiniBatch) -> MiniBatch:
    """As in the first optimizer step after scoring."""
    return replace(closed, batch=on_policy(closed.batch, learner.forward(closed.batch)))


def whole_gradient(learner: PolicyLearner) -> Tensor:
    """Of all ranks, and none left behind."""
    full, parameters = learner.engine.strategy.full, learner.engine.parameters.values()
    found = torch.cat([full(p.grad).flatten() for p in parameters if p.grad is not None])
    learner.engine.zero_grad()
    return found


def run_rank(rank: int, folder: Path, sync: GradientSync) -> Found:
    closed = close(make_batch([LENGTH] * ROWS))
    shard = replace(closed, batch=stage(closed.batch, 2).shards[rank])
    learner = sharded_learner(folder, sync, double=True)
    counted = CountedExchanges()
    setattr(dist, REDUCE_SCATTER, counted)
    learner.forward_backward(shard)
    num_exchanges = counted.count
    gradient = whole_gradient(learner)
    learner.forward_backward(scored_by_itself(learner, shard))
    on_policy_gradient = whole_gradient(learner)
    left = len(list(learner.engine.strategy.whole_gradients(learner.engine.model)))

    measured, meter = sharded_learner(folder, sync, double=False), CountingMeter(1 << 40)
    hold_everything(measured.engine, meter)
    probe = Prober(learner=measured, meter=meter).probe(2, LENGTH, training=True)
    assert probe is not None
    size_itself(measured.engine, meter, tokens=2 * LENGTH)
    single = close(make_batch([LENGTH] * ROWS, dtype=torch.float32))
    metrics = measured.forward_backward(replace(single, batch=stage(single.batch, 2).shards[rank]))
    return Found(
        gradient=gradient,
        on_policy_gradient=on_policy_gradient,
        num_exchanges=num_exchanges,
        probed_bytes=probe.peak_bytes,
        peak_bytes=round(metrics["memory/policy_peak_gib"].value * GIB),
        left=left,
    )


@pytest.mark.slow
def test_one_exchange_a_step_leaves_the_gradient_and_is_probed_for_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path)
    alone = make_learner(tmp_path, double=True, algorithm=ALGORITHM)
    closed = close(make_batch([LENGTH] * ROWS))
    alone.forward_backward(closed)
    expected = flat_gradient(alone)
    alone.forward_backward(scored_by_itself(alone, closed))
    expected_on_policy = flat_gradient(alone)
    each = on_ranks(run_rank, tmp_path, "micro_batch")
    once = on_ranks(run_rank, tmp_path, "step")
    num_blocks = once[0].num_exchanges
    assert [found.num_exchanges for found in each] == [4 * num_blocks] * 2
    assert [found.num_exchanges for found in once] == [num_blocks] * 2
    for found in (*each, *once):
        assert distance(found.gradient, expected) < 1e-10
        assert distance(found.on_policy_gradient, expected_on_policy) < 1e-10
        assert found.left == 0
        # an exchange ends when the other rank is there, so that one more block may or may not be held at the peak
        assert found.peak_bytes == pytest.approx(found.probed_bytes, rel=0.06)
    assert once[0].probed_bytes > each[0].probed_bytes, "whole gradients are held beside the activations"


@pytest.mark.parametrize(
    ("setting", "gradient_bytes", "device_bytes", "expected"),
    [
        ("step", 1000, 0, True),
        ("micro_batch", 1, 1000, False),
        ("auto", 100, 1000, True),
        ("auto", 101, 1000, False),
        ("auto", 1, 0, False),
    ],
)
def test_auto_keeps_whole_gradients_where_they_are_small_beside_the_device(
    setting: str, gradient_bytes: int, device_bytes: int, expected: bool
) -> None:
    assert sums_once_a_step(setting, gradient_bytes=gradient_bytes, device_bytes=device_bytes) is expected
