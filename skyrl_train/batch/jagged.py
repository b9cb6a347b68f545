"""Where tokens are, of rows that lie one after the other: index arithmetic on lengths and offsets, and moves to a device.

Rows of 3 and 2 tokens: lengths `[3, 2]`, offsets `[0, 3, 5]`; padded to `[2, 3]`, their tokens are at 0 1 2, 3 4.
Sizes that follow from lengths are known where the lengths are. On a device, asking for them makes the host wait for all
that is queued there, so that these functions are called before rows go to one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; waits for what is queued there only on the way to the host. (Unpinned memory is read at once.)"""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def offsets_of(lengths: Tensor) -> Tensor:
    """int64 `[rows + 1]`: 0, then the running total of `lengths` int64 `[rows]`."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def token_positions(row_offsets: Tensor, rows: Tensor) -> Tensor:
    """int64: where in a flat column the tokens of `rows` are, row after row."""
    lengths = row_offsets[rows + 1] - row_offsets[rows]
    shift = torch.repeat_interleave(row_offsets[rows] - offsets_of(lengths)[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift


def padding_of(lengths: Tensor) -> tuple[int, Tensor]:
    """The longest row, and int64 `[tokens]`: where each token is in rows `[rows, longest]`, flattened."""
    width = int(lengths.max()) if len(lengths) else 0
    filled = width - lengths
    shift = torch.repeat_interleave(filled.cumsum(0) - filled, lengths)
    return width, torch.arange(len(shift), device=lengths.device) + shift
