"""Linear layers multiplied by oneDNN, or bfloat16 in float32, give the sums of torch's own, forward and backward."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.model.layers import linear as module
from skyrl_train.model.layers.linear import FastLinear, has_operation, linear, operand, product, use_fast_products

needs_operation = pytest.mark.skipif(not has_operation(), reason="this machine cannot be asked for oneDNN's products")


@pytest.fixture
def fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by oneDNN, on whatever processor."""
    monkeypatch.setattr(module, "has_fast_products", lambda: True)


@pytest.fixture
def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has no instructions for bfloat16."""
    monkeypatch.setattr(module, "multiplies_halves", lambda: False)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.norm())


def _gradients(layer: nn.Linear, inputs: Tensor, by_output: Tensor) -> list[Tensor]:
    leaf = inputs.clone().requires_grad_()
    layer(leaf).backward(by_output)
    return [leaf.grad, *(parameter.grad for parameter in layer.parameters())]


@needs_operation
@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize(("size", "out"), [(96, 256), (256, 96), (576, 192), (1536, 64)])
def test_outputs_and_gradients_are_those_of_float64(size: int, out: int) -> None:
    torch.manual_seed(0)
    layer, exact = nn.Linear(size, out), nn.Linear(size, out).double()
    exact.load_state_dict(layer.state_dict())
    use_fast_products(layer)
    inputs, by_output = torch.randn(2, 300, size), torch.randn(2, out, 300).transpose(1, 2)

    assert type(layer) is FastLinear
    assert _distance(layer(inputs), exact(inputs.double())) < 1e-6
    for found, expected in zip(
        _gradients(layer, inputs, by_output), _gradients(exact, inputs.double(), by_output.double()), strict=True
    ):
        assert found.shape == expected.shape
        assert _distance(found, expected) < 1e-6


@needs_operation
@pytest.mark.usefixtures("fast_products")
def test_a_frozen_weight_gets_no_gradient_and_its_inputs_are_not_kept() -> None:
    layer = nn.Linear(128, 128).requires_grad_(False)
    use_fast_products(layer)
    inputs = torch.randn(1, 256, 128, requires_grad=True)
    out = layer(inputs)
    assert out.grad_fn.saved_tensors[0] is None
    out.sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand_as(inputs))


def test_other_types_and_small_products_are_torchs_own_to_the_bit() -> None:
    for dtype, size in ((torch.float64, 256), (torch.bfloat16, 256), (torch.float32, 8)):
        inputs, weight = torch.randn(300, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        assert torch.equal(linear(inputs, weight), nn.functional.linear(inputs, weight))
        assert torch.equal(product(inputs, weight), inputs @ weight.T)


def test_autocast_chooses_the_type_as_ever() -> None:
    layer = nn.Linear(256, 256)
    use_fast_products(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(300, 256)).dtype == torch.bfloat16


@pytest.mark.usefixtures("without_halves")
def test_bfloat16_is_multiplied_in_float32_where_the_processor_has_no_instructions_for_it() -> None:
    torch.manual_seed(0)
    layer, exact = nn.Linear(192, 320), nn.Linear(192, 320).double()
    layer.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()})
    exact.load_state_dict(layer.state_dict())
    plain = nn.Linear(192, 320)
    plain.load_state_dict(layer.state_dict())
    use_fast_products(layer)
    inputs, by_output = torch.randn(2, 300, 192).bfloat16().float(), torch.randn(2, 300, 320).bfloat16()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(inputs)
        assert out.dtype == torch.bfloat16
        assert _distance(out, exact(inputs.double())) < 2e-3
        found = _gradients(layer, inputs, by_output)
        theirs = _gradients(plain, inputs, by_output)
    expected = _gradients(exact, inputs.double(), by_output.double())
    for mine, its, whole in zip(found, theirs, expected, strict=True):
        assert mine.dtype == its.dtype == torch.float32
        assert _distance(mine, whole) <= 1.1 * _distance(its, whole) + 1e-6


@pytest.mark.usefixtures("without_halves")
def test_what_is_kept_for_the_backward_pass_is_bfloat16() -> None:
    layer = nn.Linear(192, 320)
    use_fast_products(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.randn(300, 192, requires_grad=True))
    kept, weight = out.grad_fn.saved_tensors
    assert kept.dtype == torch.bfloat16
    assert weight is layer.weight, "and no copy of the weight"


@pytest.mark.usefixtures("without_halves")
def test_a_number_is_rounded_to_bfloat16_whatever_holds_it() -> None:
    tensor = torch.randn(64)
    held = operand(tensor, torch.bfloat16)
    assert held.dtype == torch.float32
    assert torch.equal(held, tensor.bfloat16().float())
    assert operand(tensor.double(), torch.float64).dtype == torch.float64


def test_what_only_resembles_a_linear_layer_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), nn.LayerNorm(4))
    use_fast_products(model)
    assert [type(part) for part in model] == [Own, nn.LayerNorm]


MANY_SHAPES = """
import re
import torch
from torch import nn
from skyrl_train.model.layers import linear

def megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.set_num_threads(1)
model = nn.Linear(256, 256)
linear.has_fast_products = lambda: True
linear.use_fast_products(model)
held = 0.0
for rows in range(200, 800):
    model(torch.ones(rows, 256)).sum().backward()
    if rows == 300:
        held = megabytes()
print(megabytes() - held)
"""


@needs_operation
def test_kernels_of_sizes_that_are_gone_are_not_kept() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) < 40  # over 300 with their own numbers
