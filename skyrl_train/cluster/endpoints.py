"""Objects inside Ray actors as endpoints: what an actor serves, and who calls it.

    caller                                          actor
    RayEndpoint[WeightSender].call(method, ...) --> invoke("WeightSender.carry", ...) --> Served: the object's method

An actor serves the public methods of the classes that it says, and nothing else; a name that is none of them is refused.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from skyrl_train.cluster.calls import Answer, Identity, RemoteActor, Watch, kill, own_identity
from skyrl_train.endpoints import Endpoint, Pending, Phase, method_name, served_methods
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.telemetry.logs import stacks
from skyrl_train.weights import Bucket, StreamPlan

if TYPE_CHECKING:
    from skyrl_train.config.models import PlacementConfig

W = TypeVar("W")
K = TypeVar("K")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Served:
    """The methods that one actor answers for, by class and name."""

    def __init__(self) -> None:
        self._methods: dict[str, Callable[..., Any]] = {}

    def add(self, kind: type[W], served: W) -> None:
        """Serve the public methods of class `kind`, which `served` is an instance of."""
        for key, name in served_methods(kind).items():
            self._methods[key] = getattr(served, name)

    def answer(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Return what a method gives or raises on purpose. Raises LookupError where nothing of that name is served."""
        return answer_of(lambda: self._call(key, args, kwargs))

    async def answer_of_coroutine(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Return the same of a method that is awaited."""
        try:
            return Answer(value=await cast(Awaitable[Any], self._call(key, args, kwargs)))
        except SkyrlTrainError as error:
            return Answer(error=error)

    def _call(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if key not in self._methods:
            raise LookupError(f"{key} is not served here")
        # What another actor answered is passed on as it is, be it an error.
        given = [each.unwrap() if isinstance(each, Answer) else each for each in args]
        return self._methods[key](*given, **kwargs)


class AsyncHost:
    """An actor whose event loop stays free. It serves itself, and what is added to `_served`, each call on a thread."""

    def __init__(self, role: str, secrets: Mapping[str, str]) -> None:
        """`secrets` are environment variables that Ray must not see."""
        os.environ.update(secrets)
        stacks.answer(role)
        self._served = Served()
        self._served.add(type(self), self)

    async def ping(self) -> bool:
        """Give a sign of life, on a thread that nothing else occupies."""
        return True

    async def identify(self) -> Identity:
        """Return where this process is."""
        return own_identity()

    async def invoke(self, key: str, *args: Any, **kwargs: Any) -> Answer:
        """Answer for a method of what is served, on a thread."""
        return await asyncio.to_thread(self._served.answer, key, args, kwargs)

    async def invoke_coroutine(self, key: str, *args: Any, **kwargs: Any) -> Answer:
        """Answer for a method of what is served that is awaited."""
        return await self._served.answer_of_coroutine(key, args, kwargs)


def answer_of(function: Callable[[], Any]) -> Answer:
    """Return what `function` gives, or raises on purpose, as an Answer."""
    try:
        return Answer(value=function())
    except SkyrlTrainError as error:
        return Answer(error=error)


def stored(value: R) -> R:
    """Return a reference to a value in the object store, as an argument for calls: the method is given the value."""
    return cast(R, ray.put(value))


def _is_large(value: object) -> bool:
    """Whether it is worth being written once, for all actors to read."""
    return isinstance(value, StreamPlan) or (isinstance(value, Bucket) and value.data is not None)


def watch(placement: PlacementConfig, phase: Phase, what: str) -> Watch:
    """Return what waits with the deadlines of a start (phases `start` and `restart`) or of a call."""
    starting = phase in ("start", "restart")
    return Watch(
        phase=phase,
        what=what,
        timeout_s=placement.start_timeout_s if starting else placement.call_timeout_s,
        silence_timeout_s=placement.start_timeout_s if starting else placement.silence_timeout_s,
    )


class RayEndpoint(Endpoint[W]):
    """Objects of class `W`, one inside each of some actors.

    Calls may come from several threads: each reaches all actors before the next does, so that ranks meet in collectives.
    """

    def __init__(
        self,
        kind: type[W],
        actors: Sequence[RemoteActor],
        placement: PlacementConfig,
        in_order: threading.Lock,
        *,
        concurrency_group: str = "",
    ) -> None:
        """`in_order` is held while calls are handed to the actors, whatever they are for; `concurrency_group`: whose threads
        answer in the actors, those of all other calls where it is empty."""
        self.actors = tuple(actors)
        self._kind, self._placement, self._in_order = kind, placement, in_order
        self._options = {"concurrency_group": concurrency_group} if concurrency_group else {}

    def begin(
        self, method: Callable[Concatenate[W, P], R], phase: Phase, /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Hand the call to every actor."""
        given = tuple(stored(each) if _is_large(each) else each for each in args)
        return self._submit(method, phase, [given] * len(self.actors), kwargs)

    def begin_each(self, method: Callable[[W, A], R], phase: Phase, each: Sequence[A], /) -> Pending[R]:
        """Hand each actor a call with its own argument."""
        if len(each) != len(self.actors):
            raise ValueError(f"{len(each)} arguments for {len(self.actors)} actors")
        return self._submit(method, phase, [(one,) for one in each], {})

    def ask(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Return the results of a method that the actors await."""
        return self.begin_asking(method, phase, *args, **kwargs).wait()

    def begin_asking(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Submitted[R]:
        """Hand every actor a call of a method that it awaits, and return at once."""
        return self._submit(method, phase, [args] * len(self.actors), kwargs, entry="invoke_coroutine")

    @property
    def members(self) -> tuple[object, ...]:
        """The handles of the actors, by rank."""
        return tuple(actor.handle for actor in self.actors)

    @property
    def names(self) -> tuple[str, ...]:
        """Role, rank, node and process of each actor."""
        return tuple(map(str, self.actors))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Address of each actor's node, as it said itself."""
        return tuple(actor.identity.node if actor.identity else "" for actor in self.actors)

    def _submit(
        self,
        method: Callable[..., Any],
        phase: Phase,
        arguments: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        entry: str = "invoke",
    ) -> Submitted[Any]:
        key = method_name(self._kind, method)
        with self._in_order:
            refs = [
                getattr(actor.handle, entry).options(name=key, **self._options).remote(key, *given, **kwargs)
                for actor, given in zip(self.actors, arguments, strict=True)
            ]
        return Submitted(self.actors, refs, watch(self._placement, phase, method.__name__))


class Submitted(Pending[R]):
    """Calls of actors that Ray was handed, whose answers are still to come."""

    def __init__(self, actors: Sequence[RemoteActor], refs: Sequence[Any], waiting: Watch) -> None:
        self._actors, self._refs, self._waiting = tuple(actors), list(refs), waiting

    def wait(self, *others: Pending[Any]) -> list[R]:
        together = [other for other in others if isinstance(other, Submitted)]
        actors = [actor for pending in (self, *together) for actor in pending._actors]
        refs = [ref for pending in (self, *together) for ref in pending._refs]
        results: list[R] = self._waiting.wait(actors, refs)[: len(self._refs)]
        for other in others:
            if other not in together:
                other.wait()
        return results

    def passed_on(self, index: int = 0) -> R:
        return cast(R, self._refs[index])

    def future(self, index: int = 0) -> asyncio.Future[Answer]:
        """Return one actor's answer for who awaits it, without a deadline. Raises Ray's errors where the actor is gone."""
        return asyncio.wrap_future(self._refs[index].future())


class ActorGroup:
    """The actors of one role, such as the ranks of a model."""

    def __init__(self, placement: PlacementConfig, role: str, actors: Sequence[RemoteActor]) -> None:
        self.role, self.actors = role, tuple(actors)
        self._placement, self._in_order = placement, threading.Lock()

    def of(
        self, kind: type[K], actors: Sequence[RemoteActor] | None = None, *, concurrency_group: str = ""
    ) -> RayEndpoint[K]:
        """Return the objects of class `kind` inside the actors, or inside some of them; `concurrency_group` as there."""
        there = self.actors if actors is None else actors
        return RayEndpoint(kind, there, self._placement, self._in_order, concurrency_group=concurrency_group)

    def close(self) -> None:
        """End the actors at once: they hold nothing that is not saved."""
        kill(self.actors)
