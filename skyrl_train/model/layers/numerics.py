"""How this process computes: with kernels whose result depends on their inputs alone, or with the fastest ones.

On a CPU every kernel that is used here gives the same bits for the same inputs, so that a resumed run is identical. On
CUDA some fast kernels add up in an order that varies from call to call (atomic additions in scatters and in the backward
pass of attention, keys split over thread blocks). With `deterministic` none of those runs:

    torch        `use_deterministic_algorithms`: kernels with a fixed order; an operation that has none raises RuntimeError
                 and names itself. Compiled code is then chosen without timing kernels against each other
    cuBLAS       one workspace of a fixed size, by `CUBLAS_WORKSPACE_CONFIG`, which is read when CUDA starts
    attention    `model/layers/attention.py` asks variable-length attention for one pass over the keys (`num_splits=1`),
                 which torch before 2.12 cannot be told; flex attention adds up without atomics in any case

And in which types weights are held, and which attention is asked for.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from skyrl_train.config.models import ModelConfig

logger = logging.getLogger(__name__)

_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG under which cuBLAS is deterministic, as its documentation lists them."""


def set_numerics(*, deterministic: bool) -> None:
    """Settles which kernels this process takes. Call before anything computes on a device.

    cuDNN's attention is left out in either case: it makes a plan for each new shape of its inputs, about half a second
    each in the forward and in the backward pass on a B200, and nearly every micro-batch of padded rows has a new one.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACES[0]
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers for model.attention=flash_attention_2
    if deterministic != is_deterministic():
        torch.use_deterministic_algorithms(deterministic)


def is_deterministic() -> bool:
    """Whether `set_numerics` was told so in this process."""
    return torch.are_deterministic_algorithms_enabled()


def weight_dtype(model: ModelConfig, *, frozen: bool) -> torch.dtype:
    """The type in which weights are held: float32 where they are trained, else that of the forward pass."""
    return torch.bfloat16 if frozen and model.dtype == "bfloat16" else torch.float32


def in_4_bits(dtype: torch.dtype, model: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`: NF4 with scales in 8 bits (arXiv:2305.14314), products in `dtype`."""
    if model.quantization == "none":
        return {}

    make: Any = BitsAndBytesConfig
    kind = make(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
    return {"quantization_config": kind}


def asked_attention(model: ModelConfig) -> str | None:
    """The attention to ask transformers for; None is sdpa, or eager for a class that does not know it."""
    return None if model.attention == "auto" else model.attention


@cache
def say_eager(kind: str) -> None:
    """Once in a process, which may load a model several times."""
    logger.info("model.attention=auto: eager, since transformers has no sdpa for %s", kind)
