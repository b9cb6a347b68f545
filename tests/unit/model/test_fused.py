"""Norms and gates as one operation give what transformers' give: outputs to the bit, and gradients of gates; those of
norms as near to float64 as theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from skyrl_train.model.layers import fused
from skyrl_train.model.layers.fused import use_fused_layers

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
    monkeypatch.setattr(fused, "_BLOCK", block)
    theirs, mine = made(kind), made(kind)
    use_fused_layers(nn.Sequential(mine))
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
    use_fused_layers(nn.Sequential(mine))
    by_out = torch.ones_like(inputs)
    assert torch.equal(mine(inputs), theirs(inputs))
    for found, its in zip(gradients(mine, inputs, by_out), gradients(theirs, inputs, by_out), strict=True):
        torch.testing.assert_close(found, its)


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm = made().requires_grad_(False)
    use_fused_layers(nn.Sequential(norm))
    inputs = torch.randn(3, 48, requires_grad=True)
    norm(inputs).sum().backward()
    assert norm.weight.grad is None
    assert inputs.grad is not None


def test_what_is_kept_is_the_input_and_a_number_for_each_position() -> None:
    norm = made()
    use_fused_layers(nn.Sequential(norm))
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
    use_fused_layers(model)
    assert ["forward" in vars(each) for each in (*model[:3], compiled[0], model[4])] == [False] * 4 + [True]
    theirs, wide = made().double(), made().double()
    use_fused_layers(nn.Sequential(wide))
    inputs = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(wide(inputs), theirs(inputs))
    assert wide(inputs.requires_grad_()).grad_fn.name() != "_NormBackward"


def feed_forward(
    kind: type[nn.Module] = LlamaMLP, *, dtype: torch.dtype = torch.float32, **changes: object
) -> nn.Module:
    """A block with weights of its own."""
    torch.manual_seed(0)
    config = (GemmaConfig if kind is GemmaMLP else LlamaConfig)(hidden_size=32, intermediate_size=40, **changes)
    return kind(config).to(dtype)


def all_gradients(block: nn.Module, inputs: Tensor) -> list[Tensor]:
    block.zero_grad()
    leaf = inputs.clone().requires_grad_()
    out = block(leaf)
    out.square().sum().backward()
    return [out, leaf.grad, *(each.grad for each in block.parameters())]


@pytest.mark.parametrize("kind", [LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_feed_forward_block_gives_the_same_bits_forward_and_backward(
    kind: type[nn.Module], rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_BLOCK", 100)
    theirs, mine = feed_forward(kind, dtype=dtype), feed_forward(kind, dtype=dtype)
    use_fused_layers(nn.Sequential(mine))
    inputs = 5 * torch.randn(2, rows, 32).to(dtype)
    assert "forward" in vars(mine)
    for found, expected in zip(all_gradients(mine, inputs), all_gradients(theirs, inputs), strict=True):
        assert torch.equal(found, expected)


def test_a_block_keeps_what_its_products_need_and_nothing_beside_it() -> None:
    def kept_of(block: nn.Module) -> int:
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: kept.setdefault(each.data_ptr(), each), lambda each: each
        ):
            block(torch.randn(1, 7, 32))
        return sum(each.numel() == 7 * 40 for each in kept.values())

    block = feed_forward()
    assert kept_of(block) == 4
    use_fused_layers(nn.Sequential(block))
    assert kept_of(block) == 3, "gate, up, and what the last product reads; not silu(gate)"


def test_another_activation_and_another_formula_of_blocks_are_left_alone() -> None:
    class Own(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.up_proj(x))

    others = [feed_forward(GemmaMLP), feed_forward(hidden_act="gelu"), feed_forward(Own)]
    use_fused_layers(nn.Sequential(*others))
    assert not any("forward" in vars(each) for each in others)
