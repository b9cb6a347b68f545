"""Messages between two processes, of which one trusts the other with nothing: JSON behind four bytes of length.

What arrives is read as JSON of limited size and as nothing else. Needs the standard library alone, as the processes do that
run under another interpreter.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and a supervisor imports this
if TYPE_CHECKING:
    from typing import Any

MAX_FRAME_BYTES = 64 << 20
"""Of one message; what an environment may say in one answer is far less (`rollout/boundary: MAX_CHARACTERS`)."""
_LENGTH = struct.Struct("!I")


def frame(message: object) -> bytes:
    """Return a message as it is sent. Raises ValueError (or RecursionError) for what JSON does not hold, or is too long."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes; at most {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes that arrive, as messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete now. Raises ValueError where the bytes are none."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length:,} bytes; at most {MAX_FRAME_BYTES:,}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield parse(body)


def parse(body: bytes) -> Any:
    """Return the message in a frame. Raises ValueError where it is no JSON, or none that `frame` writes."""
    try:
        return json.loads(body, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
