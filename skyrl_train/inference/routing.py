"""Which of several engines answers a request: the one that has computed the longest beginning of its prompt, unless it
has much more to do than another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

_BLOCK_TOKENS = 32
_MAX_KNOWN = 1 << 16


class PrefixRouter:
    """Remembers, block by block, which engine saw which beginnings. Not thread-safe."""

    def __init__(self, *, max_lead: int) -> None:
        """`max_lead`: an engine with so many requests more than the least busy one gets no further ones."""
        self._max_lead = max_lead
        self._known: OrderedDict[int, int] = OrderedDict()

    def choose(self, token_ids: Sequence[int], load: Sequence[int], alive: Collection[int]) -> int:
        """Index of an engine in `alive` (not empty), by the prompt and the requests that each engine has in flight."""
        least = min(load[index] for index in alive)
        blocks = _block_hashes(token_ids)
        for block in reversed(blocks):
            engine = self._known.get(block)
            if engine in alive and engine is not None and load[engine] - least < self._max_lead:
                break
        else:
            engine = min(alive, key=lambda index: (load[index], index))
        for block in blocks:
            self._known[block] = engine
            self._known.move_to_end(block)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return engine

    def forget(self) -> None:
        """Everything: with new weights nothing that was computed counts."""
        self._known.clear()


def _block_hashes(token_ids: Sequence[int]) -> list[int]:
    """One for each beginning of a whole number of blocks, and one for the whole prompt."""
    hashes, running = [], 0
    for start in range(0, len(token_ids), _BLOCK_TOKENS):
        running = hash((running, tuple(token_ids[start : start + _BLOCK_TOKENS])))
        hashes.append(running)
    return hashes
