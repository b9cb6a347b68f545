"""Decoder layers compiled by torch: one graph for all sizes, so that no micro-batch is compiled anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.distributed.fsdp import decoder_layers
from skyrl_train.errors import ModelError
from skyrl_train.model.attention import leave_uncompiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(model: PreTrainedModel, *, name: str) -> None:
    """Compiles each decoder layer in place, at its first use; names of parameters stay.

    Sizes are left open: rows, positions and segments differ from one micro-batch to the next. Attention over segments
    has kernels of its own and stays out of the graphs, on both sides of which torch compiles.
    Raises ModelError where there is no compiler, or nothing to compile.
    """
    reason = _why_not(model.device)
    if reason:
        raise ModelError(f"model path {name!r}: model.compile=true, but {reason}. Or set model.compile=false")
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(
            f"model path {name!r}: {type(model).__name__} declares no decoder layers to compile. "
            "Set model.compile=false"
        )
    leave_uncompiled()
    for layer in layers:
        layer.compile(dynamic=True)


def _why_not(device: torch.device) -> str:
    """Why nothing can be compiled here, with what would help; empty where it can."""
    if device.type == "cuda":
        from torch.utils import _triton

        return "" if _triton.has_triton() else "torch finds no working Triton. Install the triton that fits this torch"
    from torch._inductor import cpp_builder

    find: Any = cpp_builder.get_cpp_compiler
    try:
        find()
    except Exception as error:
        return f"torch finds no C++ compiler ({type(error).__name__}). Install one (g++), or name it in CXX"
    folder = str(Path(torch.__file__).parent)
    if " " in folder:  # torch does not quote it in the commands that it gives the compiler
        return (
            f"torch is installed in {folder!r}, whose blank its compiler commands do not survive. Install it elsewhere"
        )
    return ""
