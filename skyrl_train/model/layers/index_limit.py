"""How many token positions a forward may have before a tensor of it has more numbers than kernels can index."""

from __future__ import annotations

from typing import Any

from torch import nn

MOST_ELEMENTS = 2**31 - 1
"""Of one tensor: kernels of Triton and of flash attention index with 32 bits, and read elsewhere beyond."""


def widest_activation(model: nn.Module) -> int:
    """Return the most numbers of one position that a layer takes or gives. The head takes positions in tiles."""
    head_of: Any = getattr(model, "get_output_embeddings", None)
    head = None if head_of is None else head_of()
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    return max((max(each.in_features, each.out_features) for each in layers), default=1)


def beyond_index(positions: int, width: int, *, ranks: int = 1) -> str:
    """Return what is wrong with a forward of so many positions of `width` numbers, divided over so many ranks; empty where
    kernels can index it."""
    if positions * width <= MOST_ELEMENTS * ranks:
        return ""
    divided = f" over {ranks} ranks" if ranks > 1 else ""
    return f"a tensor of {positions} positions x {width} numbers{divided} has more elements than kernels index, 2^31"
