"""Weights of fewer bits in an engine than in the trainer, rounded by the receiver of a sync (`generator.quantization`).

    scale  = largest size in a row / largest number of the type     one for each output of a matrix
    weight = scale * nearest number of the type to weight / scale

What is rounded is what computes nearly everything: matrices of decoder layers. Embeddings, the head, norms, biases and what
sends tokens to experts stay whole, as in vLLM's own online quantization. The engine computes with the rounded numbers in
its own type, so that what is measured is what rounding does, and neither memory nor time is saved.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["none", "int8", "fp8"]

_LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Of 8-bit integers, and of floating-point numbers with 4 bits of exponent and 3 of mantissa (E4M3)."""
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.")


def is_rounded(name: str, tensor: Tensor) -> bool:
    """Return whether the parameter of this name is one that is rounded: a matrix of a decoder layer, or one an expert."""
    return tensor.ndim > 1 and bool(_LAYER.search(name)) and not _ROUTER.search(name)


@torch.no_grad()
def rounded(name: str, tensor: Tensor, rounding: Rounding) -> Tensor:
    """Return the parameter `[..., outputs, inputs]` as an engine of so few bits has it, in its own type; itself where it is
    not rounded."""
    if rounding == "none" or not is_rounded(name, tensor):
        return tensor
    exact = tensor.float()
    # One for each row of outputs: its largest number becomes the
    # type's largest, so that none is beyond, which E4M3 has NaN for.
    scale = exact.abs().amax(dim=-1, keepdim=True) / _LARGEST[rounding]
    # A row of zeros has a scale of 0, and would become NaN.
    in_units = exact / torch.where(scale > 0, scale, torch.ones_like(scale))
    nearest = in_units.round() if rounding == "int8" else in_units.to(torch.float8_e4m3fn).float()
    return (nearest * scale).to(tensor.dtype)
