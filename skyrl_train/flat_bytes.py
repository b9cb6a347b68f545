"""Bytes of weights on their way: the memory they are packed into, and the checksum by which damage is found.

Both are what a sync costs beyond copying. On a core that copies 18 GB a second, writing to fresh memory of torch's makes it
2.5, to fresh memory of NumPy's 12, and a CRC-32 runs at 7 (`scripts/bench/weight_sync.py --in-process` compares).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LANES = 2**17
"""Words that are summed side by side: half a megabyte, which a core's second cache keeps between one row and the next."""
_LANE_FACTOR = 0x9E3779BD - 2**32
"""Odd, so that no change of a word can vanish modulo 2^32; 5 modulo 8, so that its powers repeat after 2^30 rows only."""


class Memory:
    """Memory that bytes are packed into: in the host taken once and used again, since writing to fresh pages costs several
    times what copying does. What was packed is there until the next bucket is."""

    def __init__(self) -> None:
        self._flat = host_bytes(0)

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return so many bytes `[num_bytes]` on `device`, with anything in them."""
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if len(self._flat) < num_bytes:
            self._flat = host_bytes(0)  # before more is taken
            self._flat = host_bytes(num_bytes)
        return self._flat[:num_bytes]


def host_bytes(num_bytes: int) -> Tensor:
    """Return fresh bytes of the host, with anything in them. NumPy asks for huge pages for them, torch does not."""
    return torch.from_numpy(np.empty(max(1, num_bytes), dtype=np.uint8))[:num_bytes]


class Checksum:
    """Checksum of bytes, the same on every device: words of 32 bits in `_LANES` lanes, each a polynomial modulo 2^32,

        lane = lane * factor + word          one multiplication and one addition a word, in vectors
        sum of lane * (2 * index + 1)        modulo 2^64

    It notices whatever happens to a single word, and other damage with a probability of 1 - 2^-32 or more. It is read
    about as fast as memory is copied, where a CRC-32 takes three times as long.
    """

    def __init__(self, flat: Tensor) -> None:
        self._words = (flat if len(flat) else flat.new_empty(0)).view(
            torch.int32
        )  # NumPy's empty arrays have no stride
        self._lanes = torch.zeros(min(len(self._words), _LANES), dtype=torch.int32, device=flat.device)
        self._num_words = 0

    def advance(self, num_bytes: int) -> None:
        """Take in the whole rows of the first `num_bytes`, which will not change any more."""
        while self._num_words < len(self._words):
            end = min(self._num_words + _LANES, len(self._words))
            if 4 * end > num_bytes:
                return
            row = self._words[self._num_words : end]
            lanes = self._lanes[: len(row)]
            torch.add(row, lanes, alpha=_LANE_FACTOR, out=lanes)
            self._num_words = end

    def value(self) -> int:
        """Return it, of all bytes."""
        self.advance(4 * len(self._words))
        return int((self._lanes.long() * (2 * torch.arange(len(self._lanes), device=self._lanes.device) + 1)).sum())


def checksum_of(flat: Tensor) -> int:
    """Return the checksum of bytes that are there."""
    return Checksum(flat).value()


class Packing:
    """Bytes that are put together from the first to the last and summed while a core's cache has them, so that they pass
    through memory once. Between what is put there are zeros, so that equal weights are equal bytes on every rank."""

    def __init__(self, num_bytes: int, device: torch.device, memory: Memory | None) -> None:
        """`memory`: of those before; None takes fresh memory."""
        self.flat = (memory or Memory()).take(num_bytes, device)
        self._checksum = Checksum(self.flat)
        self._end = 0

    def put(self, start: int, values: Tensor, dtype: torch.dtype) -> None:
        """Copy values from wherever they are, in `dtype`, to the bytes from `start` on."""
        values = values.reshape(-1)
        size = dtype.itemsize
        self.flat[self._end : start].zero_()
        self._end = start + size * len(values)
        target = self.flat[start : self._end].view(dtype)
        step = 4 * _LANES // size if self.flat.device.type == values.device.type == "cpu" else max(1, len(values))
        for low in range(0, len(values), step):
            target[low : low + step].copy_(values[low : low + step])
            self._checksum.advance(start + size * min(low + step, len(values)))

    def checksum(self) -> int:
        """Return the checksum, now that all is there."""
        self.flat[self._end :].zero_()
        return self._checksum.value()
