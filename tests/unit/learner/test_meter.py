from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from skyrl_train.distributed import is_out_of_memory
from skyrl_train.learner.memory.meter import CountingMeter

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
    gathered = torch.zeros(FLOATS)
    with meter.counting(lambda: [gathered]):
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


TRITON_MESSAGE = "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes ..."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' ..."), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error. Last error:\nFailed to CUDA calloc 4096 bytes"),
            True,
        ),
        (dist.DistBackendError("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"), True),
        (dist.DistBackendError("NCCL error: unhandled system error. Last error:\nCannot allocate memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})(TRITON_MESSAGE), True),
        (RuntimeError("shapes do not match"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
