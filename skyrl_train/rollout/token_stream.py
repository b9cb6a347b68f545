"""Tokens of an answer that is on its way, for whoever listens while an engine is asked:

    with listening(take):                 take(token ids) is called as they are sampled, on whichever thread that is
        await engine.generate(request)

An engine that can says them (`listener()`); others say nothing until the whole answer is there, which is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[Sequence[int]], object]

_LISTENER: ContextVar[Listener | None] = ContextVar("token_listener", default=None)


def listener() -> Listener | None:
    """Return who listens to the answer that is being asked for."""
    return _LISTENER.get(None)


@contextmanager
def listening(take: Listener | None) -> Iterator[None]:
    """Have `take` told of the answer that is asked for inside; None where nobody may be."""
    token = _LISTENER.set(take)
    try:
        yield
    finally:
        _LISTENER.reset(token)
