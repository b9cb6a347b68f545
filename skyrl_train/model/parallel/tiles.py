"""How scored tokens are cut into tiles, of which the logits `[tokens of a tile, vocabulary]` are there one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ELEMENTS_PER_TILE = 1 << 21
"""Logits per tile on a CPU: 8 MiB in float32, near the size of a core's caches."""
TOKENS_PER_TILE = 128
"""At least so many tokens, whatever the vocabulary: each tile reads the whole weight, which fewer would not pay for."""
ELEMENTS_PER_TILE_ACCELERATOR = 1 << 26
"""Logits per tile elsewhere: 256 MiB in float32, enough rows to fill the device."""

TOKENS_PER_PRODUCT = 4096
"""Tokens elsewhere whose logits' gradients are kept, in the compute type, for one product with the hidden states: each reads
and writes the weight's gradient in float32, which a tile of 442 (at 152,000 entries) does not pay for."""

_traced_for = ""
"""The type of device whose tiles a trace of memory forms; empty where tiles are computed."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the tokens of a product are cut into tiles, in tokens."""

    tokens_per_tile: int
    tokens_per_product: int
    """Of whole tiles."""

    def of(self, num_tokens: int) -> Iterator[slice]:
        """Yield the tiles of so many tokens, in order; for a trace a few that show what all of them take."""
        starts: Sequence[int] = range(0, num_tokens, self.tokens_per_tile)
        if _traced_for:
            # the second tile is formed while the first is there still, and a product comes with the last of its tokens
            last_of_product = self.tokens_per_product // self.tokens_per_tile - 1
            chosen = sorted({0, 1, last_of_product, len(starts) - 1})
            starts = [starts[number] for number in chosen if number < len(starts)]
        for start in starts:
            yield slice(start, min(num_tokens, start + self.tokens_per_tile))


def make_tiles(
    device_type: str, vocabulary: int, tokens_per_tile: int | None = None, tokens_per_product: int | None = None
) -> Tiles:
    """Return the tiles for a type of device, of the stated sizes where they are stated."""
    is_host = on_host(device_type)
    budget = ELEMENTS_PER_TILE if is_host else ELEMENTS_PER_TILE_ACCELERATOR
    size = tokens_per_tile or max(TOKENS_PER_TILE, budget // vocabulary)
    product = tokens_per_product or (1 if is_host else TOKENS_PER_PRODUCT)
    return Tiles(tokens_per_tile=size, tokens_per_product=max(1, product // size) * size)


def on_host(device_type: str) -> bool:
    """Whether tensors of this type of device are computed on a CPU, or traced for one."""
    return (_traced_for or device_type) == "cpu"


def is_traced() -> bool:
    """Whether forwards are only traced now."""
    return bool(_traced_for)


@contextmanager
def tiles_for_trace(device_type: str) -> Iterator[None]:
    """Form tiles as large as on a device of this type, and only as many as show what all of them take, meanwhile."""
    global _traced_for
    before, _traced_for = _traced_for, device_type
    try:
        yield
    finally:
        _traced_for = before
