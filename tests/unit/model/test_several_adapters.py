"""Several adapters on one layer: each position's part and gradient, against slices that torch differentiates itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.model.lora import adapters_at, runs_of
from skyrl_train.model.lora.several import let_several_compute

RUNS = runs_of(["one", "", "two", "one"], [3, 2, 4, 1])
"""Ten positions, of which two are the base's own."""


class Layer(nn.Module):
    """What PEFT makes of a linear layer, as far as adapters side by side read it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 5).requires_grad_(False)
        self.lora_A = nn.ModuleDict({name: nn.Linear(6, 2, bias=False) for name in ("one", "two")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 5, bias=False) for name in ("one", "two")})
        self.scaling = {"one": 2.0, "two": 0.5}

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("the active adapter is not asked")


def by_slices(layer: Layer, inputs: Tensor) -> Tensor:
    base, parts, before = layer.base_layer(inputs), [], 0
    for name, start, stop in RUNS:
        part = layer.lora_B[name](layer.lora_A[name](inputs[start:stop])) * layer.scaling[name]
        parts += [base[before:start], (base[start:stop] + part).to(base.dtype)]
        before = stop
    return torch.cat([*parts, base[before:]])


def found_by(compute: Callable[[Tensor], Tensor], layer: Layer, inputs: Tensor) -> list[Tensor]:
    layer.zero_grad()
    leaf = inputs.clone().requires_grad_()
    out = compute(leaf * 1.0)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return [out.detach(), leaf.grad, *(each.clone() for each in gradients)]  # type: ignore[list-item]


def side_by_side(layer: Layer) -> Callable[[Tensor], Tensor]:
    let_several_compute(layer, [layer])

    def compute(inputs: Tensor) -> Tensor:
        with adapters_at(layer, {10: RUNS}):
            return layer(inputs.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]

    return compute


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def test_outputs_and_gradients_are_those_of_slices(layer: Layer) -> None:
    layer.double()
    inputs = torch.randn(10, 6, dtype=torch.float64)
    expected = found_by(lambda leaf: by_slices(layer, leaf), layer, inputs)
    found = found_by(side_by_side(layer), layer, inputs)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_autocast_rounds_each_product_as_it_does_elsewhere(layer: Layer) -> None:
    inputs = torch.randn(10, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = found_by(lambda leaf: by_slices(layer, leaf), layer, inputs)
        found = found_by(side_by_side(layer), layer, inputs)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_an_adapter_that_is_not_trained_gets_no_gradient(layer: Layer) -> None:
    for part in (layer.lora_A["two"], layer.lora_B["two"]):
        part.requires_grad_(False)
    side_by_side(layer)(torch.randn(10, 6)).sum().backward()
    assert layer.lora_A["two"].weight.grad is None
    assert layer.lora_A["one"].weight.grad is not None


def test_runs_that_are_alike_are_computed_together_with_the_weights_of_now(layer: Layer) -> None:
    inputs = torch.randn(6, 6)
    let_several_compute(layer, [layer])
    runs = runs_of(["one", "two", "one"], [2, 2, 2])

    def found() -> Tensor:
        with torch.no_grad(), adapters_at(layer, {6: runs}):
            return layer(inputs)  # type: ignore[no-any-return]

    def expected() -> Tensor:
        with torch.no_grad():
            parts = [
                layer.lora_B[name](layer.lora_A[name](inputs[start:stop])) * layer.scaling[name]
                for name, start, stop in runs
            ]
            return layer.base_layer(inputs) + torch.cat(parts)  # type: ignore[no-any-return]

    torch.testing.assert_close(found(), expected())
    with torch.no_grad():
        layer.lora_A["two"].weight.mul_(3.0)
    torch.testing.assert_close(found(), expected())
