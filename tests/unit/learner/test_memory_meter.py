from __future__ import annotations

import pytest
import torch

from skyrl_train.distributed.together import is_out_of_memory
from skyrl_train.learner.memory_meter import CountingMeter

FLOATS = 256
BYTES = 4 * FLOATS


def test_a_tensor_counts_while_something_holds_it() -> None:
    meter = CountingMeter(100 * BYTES)
    with meter.counting():
        first = torch.zeros(FLOATS)
        second = first + 1
        view = second[1:]
        assert meter.in_use_bytes() == 2 * BYTES
        del first, second
        assert meter.in_use_bytes() == BYTES, "the view holds its storage"
        del view
    assert (meter.in_use_bytes(), meter.peak_bytes()) == (0, 2 * BYTES)


def test_what_autograd_saved_counts_until_the_backward_pass() -> None:
    meter = CountingMeter(100 * BYTES)
    weight = torch.zeros(FLOATS, requires_grad=True)
    meter.adopt([weight])
    with meter.counting():
        loss = weight.exp().sum()  # exp saves its result, which nothing else holds
        assert meter.in_use_bytes() == 2 * BYTES + 4
        loss.backward()
        del loss
    assert meter.in_use_bytes() == 2 * BYTES, "the weight and its gradient"
    weight.grad = None
    assert meter.in_use_bytes() == BYTES


def test_an_allocation_past_the_limit_is_refused_and_not_part_of_the_peak() -> None:
    meter = CountingMeter(2 * BYTES)
    with meter.counting():
        held = torch.zeros(FLOATS)
        with pytest.raises(torch.OutOfMemoryError, match="only 1024 are left"):
            torch.zeros(2 * FLOATS)
        assert meter.in_use_bytes() == BYTES
        del held
    assert meter.peak_bytes() == BYTES


def test_what_was_there_before_counts_once_it_is_adopted_and_only_once() -> None:
    meter = CountingMeter(100 * BYTES)
    model = torch.nn.Linear(FLOATS, 1, bias=False)
    meter.adopt(model.parameters())
    meter.adopt(model.parameters())
    assert meter.in_use_bytes() == BYTES
    del model
    assert meter.in_use_bytes() == 0


def test_a_storage_that_is_given_back_by_resizing_does_not_count() -> None:
    meter = CountingMeter(100 * BYTES)
    with meter.counting():
        gathered = torch.zeros(FLOATS)
        gathered.untyped_storage().resize_(0)
        assert meter.in_use_bytes() == 0
        gathered.untyped_storage().resize_(BYTES)
        assert meter.in_use_bytes() == BYTES


def test_nothing_counts_outside_and_the_peak_begins_anew() -> None:
    meter = CountingMeter(100 * BYTES)
    with meter.counting():
        torch.zeros(FLOATS)
    held = torch.zeros(FLOATS)
    assert meter.in_use_bytes() == 0
    assert meter.peak_bytes() == BYTES
    meter.reset_peak()
    assert meter.peak_bytes() == 0
    assert held.numel() == FLOATS


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
