"""Why a request is not answered: with which status, and whose doing it is."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server", "unknown"]


class Refused(Exception):
    """A request that is refused. Nothing has changed by it."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status, self.category = status, category

    @property
    def body(self) -> dict[str, str]:
        """What is answered, as JSON; `detail` is what SDKs show."""
        return {"error": str(self), "detail": str(self), "category": self.category}


def not_there(what: str, name: str) -> Refused:
    """Of ids and paths that a tenant does not have, whether another one has them or not."""
    return Refused(f"there is no {what} {name[:200]!r}", status=404)
