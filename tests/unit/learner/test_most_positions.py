"""What bounds micro-batches that size themselves beside memory: a stated cap, the index of kernels, and gaps in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.errors import BatchError, MemoryLimitError
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.oom_retry import ForwardSize
from skyrl_train.learner.memory.sizing import SizingLimits, size_micro_batches
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model.layers import beyond_index, index_limit, widest_activation
from tests.support.learner_cases import make_learner, save_tiny_model
from tests.support.memory_cases import MIB

LIMITS = SizingLimits(longest=32, max_rows=64, limit_bytes=4 * MIB, margin=0.05, retries=3)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> PolicyLearner:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("model"))
    return make_learner(folder, role="policy")


def budgets(learner: PolicyLearner, limits: SizingLimits, meter: CountingMeter | None = None) -> tuple[int, int]:
    report = size_micro_batches(learner, meter or CountingMeter(limits.limit_bytes), limits)
    return report.budgets.training, report.budgets.forward


@pytest.mark.slow
def test_budgets_grow_no_further_than_the_cap_and_twice_it_in_scoring(learner: PolicyLearner) -> None:
    assert budgets(learner, replace(LIMITS, max_positions=96)) == (96, 192)
    assert budgets(learner, replace(LIMITS, max_positions=1)) == (32, 32)  # the longest row goes alone


class GappedMeter(CountingMeter):
    """Reserves a quarter more than it gives."""

    def reserved_peak_bytes(self) -> int:
        return self.peak_bytes() * 5 // 4


@pytest.mark.slow
def test_memory_that_an_allocator_loses_to_gaps_is_left_free(learner: PolicyLearner) -> None:
    limits = replace(LIMITS, limit_bytes=2 * MIB)
    whole = budgets(learner, limits)[0]
    gapped = budgets(learner, limits, GappedMeter(limits.limit_bytes))[0]
    assert 0.5 * whole < gapped < 0.85 * whole


def test_no_tensor_has_more_numbers_than_kernels_index(learner: PolicyLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beyond_index(461_790, 8960) == (
        "a tensor of 461790 positions x 8960 numbers has more elements than kernels index, 2^31"
    )
    assert not beyond_index(65_536, 28_672)
    assert not beyond_index(131_072, 28_672, ranks=2)
    width = widest_activation(learner.engine.model)
    assert width == learner.engine.model.config.intermediate_size
    monkeypatch.setattr(index_limit, "MOST_ELEMENTS", 40 * width)
    assert budgets(learner, LIMITS) == (40, 40)
    learner.engine.passes.forward.size = ForwardSize(num_rows=2, longest=30, positions=60)
    with pytest.raises(BatchError, match=r"Set a lower trainer.max_tokens_per_microbatch"):
        learner.engine.passes.require_indexed()
    with pytest.raises(MemoryLimitError, match=r"one row of 64 tokens.*64 positions x"):
        budgets(learner, replace(LIMITS, longest=64))
