"""What earlier turns left behind: the keys and values of answered requests, for prompts that begin with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from skyrl_train.inference.kv_cache import RowState


@dataclass(frozen=True)
class _Kept:
    state: RowState
    wave: int


class KeptPrefixes:
    """Token ids to row states. The next turn of a conversation comes one wave later, so older ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._wave = 0
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._lengths: Counter[int] = Counter()

    def start_wave(self) -> None:
        """Drops what the wave before the last left behind."""
        self._wave += 1
        for token_ids in [key for key, kept in self._kept.items() if kept.wave < self._wave - 1]:
            self._drop(token_ids)

    def clear(self) -> None:
        """After the weights changed."""
        self._kept.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def keep(self, token_ids: tuple[int, ...], state: RowState) -> None:
        """Keeps the state of the first tokens of `token_ids` (all but the last, which no forward pass has seen).

        Nothing is kept once `max_bytes` are.
        """
        if token_ids in self._kept or self._num_bytes + state.num_bytes > self._max_bytes:
            return
        self._kept[token_ids] = _Kept(state, self._wave)
        self._lengths[len(token_ids)] += 1
        self._num_bytes += state.num_bytes

    def longest(self, prompt_token_ids: tuple[int, ...]) -> RowState | None:
        """The state of the longest kept sequence that the prompt begins with."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(prompt_token_ids):
                kept = self._kept.get(prompt_token_ids[:length])
                if kept is not None:
                    return kept.state
        return None

    def _drop(self, token_ids: tuple[int, ...]) -> None:
        kept = self._kept.pop(token_ids)
        self._num_bytes -= kept.state.num_bytes
        self._lengths[len(token_ids)] -= 1
        if not self._lengths[len(token_ids)]:
            del self._lengths[len(token_ids)]
