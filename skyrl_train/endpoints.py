"""Typed calls to objects that may be in this process or in others.

    engines.call(UpdatableEngine.update, "sync", bucket)

A call names the method as its class defines it, so that a type checker sees the arguments and the result, and a method that
is not there. What travels to another process is the name of that method, which is looked up there among the methods of the
one class that an endpoint serves. `LocalEndpoint` is for objects of this process, `cluster/endpoints.py` has that for Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

Phase = Literal[
    "start", "restart", "size", "generate", "data", "score", "update", "sync", "checkpoint", "load", "export"
]
"""What of a run a call belongs to, for error messages and deadlines."""


class Pending(ABC, Generic[R]):
    """One call under way on each object of an endpoint."""

    @abstractmethod
    def wait(self, *others: Pending[Any]) -> list[R]:
        """Return the results in order, once `others` are done as well. Raises what the first that fails raised."""

    @abstractmethod
    def passed_on(self, index: int = 0) -> R:
        """Return the result of one object as an argument for another call, to which it goes directly.

        It may be a reference, so that nothing can be read from it here.
        """


class Endpoint(ABC, Generic[W]):
    """Objects that have the methods of class `W`, called together."""

    @abstractmethod
    def begin(
        self, method: Callable[Concatenate[W, P], R], phase: Phase, /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Have every object do `method` with these arguments, and return at once."""

    @abstractmethod
    def begin_each(self, method: Callable[[W, A], R], phase: Phase, each: Sequence[A], /) -> Pending[R]:
        """Have each object do `method` with an argument of its own, and return at once."""

    def call(
        self, method: Callable[Concatenate[W, P], R], phase: Phase, /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Return the results of `method` in the order of the objects.

        Raises what a method raised on purpose, or DeadlineError and ActorError where a process does not answer.
        """
        return self.begin(method, phase, *args, **kwargs).wait()

    @abstractmethod
    def ask(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Return the results of a method that is awaited where the objects are. Raises as `call` does."""

    @property
    def is_local(self) -> bool:
        """Whether the objects are of this process, so that what they are given or give is not copied."""
        return False

    @property
    @abstractmethod
    def members(self) -> tuple[object, ...]:
        """What tells the objects from others: they themselves, or their handles."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What messages call each object."""

    @property
    @abstractmethod
    def nodes(self) -> tuple[str, ...]:
        """Address of the node of each object; empty for one of this process."""


class _Done(Pending[R]):
    def __init__(self, results: list[R]) -> None:
        self._results = results

    def wait(self, *others: Pending[Any]) -> list[R]:
        for other in others:
            other.wait()
        return self._results

    def passed_on(self, index: int = 0) -> R:
        return self._results[index]


class LocalEndpoint(Endpoint[W]):
    """Objects of this process, one after the other on the caller's thread."""

    def __init__(self, *objects: W) -> None:
        self._members = objects

    def begin(
        self, method: Callable[Concatenate[W, P], R], _phase: Phase, /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Do it, and return the results."""
        return _Done([getattr(each, method.__name__)(*args, **kwargs) for each in self._members])

    def begin_each(self, method: Callable[[W, A], R], _phase: Phase, each: Sequence[A], /) -> Pending[R]:
        """Do it with an argument of its own for each object."""
        return _Done(
            [getattr(one, method.__name__)(argument) for one, argument in zip(self._members, each, strict=True)]
        )

    def ask(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        _phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Return the results of a method that is awaited, in an event loop of its own."""
        return [asyncio.run(getattr(each, method.__name__)(*args, **kwargs)) for each in self._members]

    @property
    def is_local(self) -> bool:
        """True: calls stay in this process."""
        return True

    @property
    def members(self) -> tuple[W, ...]:
        """The objects that are called, by rank."""
        return self._members

    @property
    def names(self) -> tuple[str, ...]:
        """What errors call them: their classes."""
        return tuple(f"the {type(each).__name__}" for each in self._members)

    @property
    def nodes(self) -> tuple[str, ...]:
        """An empty address for each, as all are on this node."""
        return ("",) * len(self._members)


def served_methods(kind: type[Any]) -> dict[str, str]:
    """Return what other processes may call of class `kind`: its public methods, `Class.method` to `method`."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {f"{kind.__name__}.{name}": name for name, _ in found if not name.startswith("_")}


def method_name(kind: type[W], method: Callable[..., Any]) -> str:
    """Return the name under which `method` of `kind` is called in another process.

    Raises TypeError where it is not a public method of that class.
    """
    name = method.__name__
    if name.startswith("_") or getattr(kind, name, None) is not method:
        raise TypeError(f"{method.__qualname__} is no public method of {kind.__name__}")
    return f"{kind.__name__}.{name}"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one model meet."""

    rank: int
    num_ranks: int
    init_method: str
    """`file:///path` of a file that does not exist yet (one node), or `tcp://address:port` of rank 0's node."""
    timeout_s: float
    """Deadline of joining and of each collective."""

    @property
    def single_node(self) -> bool:
        return self.init_method.startswith("file://")


def free_port() -> int:
    """Return a port of this node that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def listening(bound: socket.socket) -> int:
    """Have a bound TCP socket take connections, whose requests wait until somebody accepts them, and return its port.

    What is written to a connection is sent at once. asyncio sees to that for sockets whose protocol is stated, which those
    of `uvicorn.Config.bind_socket` are not: an answer's body would wait until the client has acknowledged the head, 40 ms.
    """
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections have it from here
    bound.listen()
    return int(bound.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where processes of a run find each other."""

    init_method: str
    timeout_s: float

    def rendezvous(self, rank: int, num_ranks: int) -> Rendezvous:
        """Return what one of them needs to know."""
        return Rendezvous(rank=rank, num_ranks=num_ranks, init_method=self.init_method, timeout_s=self.timeout_s)


def meeting_point(
    nodes: Sequence[str], *, folder: Path, port_of_first: Callable[[], int], timeout_s: float
) -> MeetingPoint:
    """Return a file in `folder` where all processes are on one node, else a port of the first node.

    Args:
        nodes: Address of the node of each process, that of rank 0 first; empty is this one.
        folder: On this node.
        port_of_first: Asks rank 0 for a free port.
        timeout_s: Deadline of joining and of each collective.
    """
    if len(set(nodes)) == 1:
        return MeetingPoint(init_method=f"file://{folder}/skyrl-ranks-{uuid.uuid4().hex}", timeout_s=timeout_s)
    return MeetingPoint(init_method=f"tcp://{nodes[0]}:{port_of_first()}", timeout_s=timeout_s)
