"""Norms as one operation give what transformers' give: the output to the bit, gradients as near to float64 as theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from skyrl_train.model.layers import norms
from skyrl_train.model.layers.norms import use_fused_norms

WRITTEN_ALIKE = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def made(kind: type[nn.Module] = LlamaRMSNorm, *, size: int = 48) -> nn.Module:
    """A norm with weights of its own."""
    torch.manual_seed(0)
    norm = kind(size, eps=1e-5)
    nn.init.normal_(norm.weight)
    return norm


def gradients(norm: nn.Module, inputs: Tensor, by_out: Tensor) -> tuple[Tensor, Tensor]:
    norm.zero_grad()
    leaf = inputs.clone().requires_grad_()
    norm(leaf).backward(by_out)
    return leaf.grad, norm.weight.grad


def exact(norm: nn.Module, inputs: Tensor, by_out: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, as the paper writes it."""
    leaf, weight = inputs.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out = weight * leaf / (leaf.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    out.backward(by_out.double())
    return leaf.grad, weight.grad


@pytest.mark.parametrize("kind", WRITTEN_ALIKE)
@pytest.mark.parametrize("block", [1, 100, 1 << 16])
def test_outputs_are_the_same_bits_and_gradients_as_exact(
    kind: type[nn.Module], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "_BLOCK", block)
    theirs, mine = made(kind), made(kind)
    use_fused_norms(nn.Sequential(mine))
    inputs, by_out = 30 * torch.randn(2, 37, 48), torch.randn(2, 48, 37).transpose(1, 2)
    assert "forward" in vars(mine)
    assert torch.equal(mine(inputs), theirs(inputs))
    for found, its, whole in zip(
        gradients(mine, inputs, by_out), gradients(theirs, inputs, by_out), exact(mine, inputs, by_out), strict=True
    ):
        assert float((found - whole).norm()) <= 2 * float((its - whole).norm()) + 1e-7 * float(whole.norm())


@pytest.mark.parametrize("inputs", [torch.zeros(1, 5, 48), torch.full((1, 5, 48), 1e18), torch.empty(1, 0, 48)])
def test_nothing_large_numbers_and_no_position_are_what_they_are_elsewhere(inputs: Tensor) -> None:
    theirs, mine = made(), made()
    use_fused_norms(nn.Sequential(mine))
    by_out = torch.ones_like(inputs)
    assert torch.equal(mine(inputs), theirs(inputs))
    for found, its in zip(gradients(mine, inputs, by_out), gradients(theirs, inputs, by_out), strict=True):
        torch.testing.assert_close(found, its)


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm = made().requires_grad_(False)
    use_fused_norms(nn.Sequential(norm))
    inputs = torch.randn(3, 48, requires_grad=True)
    norm(inputs).sum().backward()
    assert norm.weight.grad is None
    assert inputs.grad is not None


def test_what_is_kept_is_the_input_and_a_number_for_each_position() -> None:
    norm = made()
    use_fused_norms(nn.Sequential(norm))
    inputs = torch.randn(1, 7, 48, requires_grad=True)
    kept = norm(inputs).grad_fn.saved_tensors
    assert [tuple(each.shape) for each in kept] == [(1, 7, 48), (48,), (7, 1)]
    assert kept[0].data_ptr() == inputs.data_ptr()


def test_another_formula_other_types_and_compiled_layers_are_left_alone() -> None:
    class Own(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states + self.weight

    compiled = nn.Sequential(made())
    compiled._compiled_call_impl = lambda: None
    model = nn.Sequential(GemmaRMSNorm(48), Own(48), nn.LayerNorm(48), compiled, made())
    use_fused_norms(model)
    assert ["forward" in vars(each) for each in (*model[:3], compiled[0], model[4])] == [False] * 4 + [True]
    theirs, wide = made().double(), made().double()
    use_fused_norms(nn.Sequential(wide))
    inputs = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(wide(inputs), theirs(inputs))
    assert wide(inputs.requires_grad_()).grad_fn.name() != "_NormBackward"
