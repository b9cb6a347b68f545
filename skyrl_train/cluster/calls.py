"""Calls to actors, with a deadline and a name; what a dead, hung or broken actor becomes.

While a call runs, its actor is asked for a sign of life now and then, on a thread that the call does not occupy. An actor
that works is left in peace until the call's own deadline; one that is gone, stopped or swapped out is found much sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.session import RaySession, ended_process
from skyrl_train.errors import ActorError, ActorLostError, CollectiveError, EngineDeadError, SkyrlTrainError
from skyrl_train.telemetry.logs import of_run

HEALTH = "health"
"""The concurrency group in which every actor answers `ping`."""
SAVES = "saves"
"""The one in which a learner's ranks write checkpoints beside whatever else they do, one at a time."""
_POLL_S = 0.5
_MOST_POLL_S = 4.0
"""A call that takes long is looked at ever more rarely, at last once in so long: each look wakes Ray's threads."""
_SETTLE_S = 2.0
"""After a first failure: how long others may take to say that they failed before it."""
_ASKED_S = 2.0
"""An actor that was asked to end has so long."""
_END_THERE_S = 20.0
"""How long tasks may take that end stopped processes of other nodes, which may be gone as a whole."""
_FETCH_S = 60.0
"""Deadline of reading an answer that is there."""
_SHARED_FOLDER_S = 10.0
"""After which a node of a network file system sees what another one wrote: caches of names last some seconds."""
_TAIL_LINES = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a call. An error that the project raises on purpose is part of the answer: Ray would wrap it in one of
    its own, with a traceback for a message."""

    value: Any = None
    error: SkyrlTrainError | None = None

    def unwrap(self) -> Any:
        """Return the value. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Where an actor lives, as it says itself."""

    node: str
    pid: int
    node_id: str = ""
    """Ray's, for what must run on the same node."""


@dataclass(kw_only=True)
class RemoteActor:
    """A handle with what an error needs to say of it."""

    handle: Any
    role: str
    rank: int
    log_folder: Path | None
    identity: Identity | None = None
    is_silent: bool = False
    """It gave no sign of life, so that it hears nothing either."""

    def found_at(self, identity: Identity) -> None:
        """Remember where the actor said that it is."""
        self.identity = identity

    def __str__(self) -> str:
        where = f"node {self.identity.node}, pid {self.identity.pid}" if self.identity else "not started yet"
        return f"{self.role} rank {self.rank} ({where})"

    def log_tail(self) -> str:
        """Return the last lines that the process wrote, for an error message."""
        if self.log_folder is None or self.identity is None:
            return "Its log is in Ray's session folder on that node (/tmp/ray/session_latest/logs)."
        lines: list[str] = []
        for path in sorted(self.log_folder.glob(f"worker-*-{self.identity.pid}.*")):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
        if not lines:
            return "It wrote nothing to its log."
        return "Last lines of its log:\n" + "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])


def node_address() -> str:
    """Return the address of the node that this process runs on."""
    return str(ray.util.get_node_ip_address())


def kill(actors: Sequence[RemoteActor]) -> None:
    """End actors at once, whatever they do. Ray only asks, which a stopped process does not hear: where it is on this
    machine and still there a little later, the kernel tells it. Told sooner, Ray would report a crash."""
    for actor in actors:
        ray.kill(actor.handle, no_restart=True)
    here = {actor.identity.pid for actor in actors if actor.log_folder is not None and actor.identity is not None}
    ends = time.monotonic() + _ASKED_S
    while (left := [pid for pid in here if _is_ray_worker(pid)]) and time.monotonic() < ends:
        time.sleep(0.02)
    for pid in left:
        _end_process(pid)
    _end_on_their_nodes([actor for actor in actors if actor.is_silent and actor.log_folder is None])


def own_identity() -> Identity:
    """Return where this process is."""
    return Identity(node=node_address(), pid=os.getpid(), node_id=str(ray.get_runtime_context().get_node_id()))


def finds(marker: Path) -> str:
    """Return why this node cannot use the folder of a file that the caller just made there; empty where it can."""
    waits_until = time.monotonic() + _SHARED_FOLDER_S
    while not marker.exists():
        if time.monotonic() > waits_until:
            return "does not find" if not marker.parent.is_dir() else "finds without what was just written to it"
        time.sleep(0.2)
    return "" if os.access(marker.parent, os.W_OK) else "may not write to"


def _end_on_their_nodes(actors: Sequence[RemoteActor]) -> None:
    """Stopped processes of other nodes would keep their devices' memory: a task on each node ends them."""
    asked = []
    for actor in actors:
        if actor.identity is not None and actor.identity.node_id:
            there = NodeAffinitySchedulingStrategy(node_id=actor.identity.node_id, soft=False)
            options = {"num_cpus": 0, "runtime_env": RaySession.runtime_env(1), "scheduling_strategy": there}
            asked.append(ray.remote(max_retries=0)(_end_process).options(**options).remote(actor.identity.pid))
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=_END_THERE_S)


def _end_process(pid: int) -> None:
    if _is_ray_worker(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_ray_worker(pid: int) -> bool:
    """Whether the process that has this number now is one of Ray's."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class Watch:
    """Waits for one call on each of some actors."""

    def __init__(self, *, phase: str, what: str, timeout_s: float, silence_timeout_s: float) -> None:
        """
        Args:
            phase: Of the step, for messages: `score`, `update`, `sync`, ...
            what: Name of the call.
            timeout_s: Deadline of the call.
            silence_timeout_s: An actor that gives no sign of life for so long is taken for hung.
        """
        self._phase, self._what = phase, what
        self._timeout_s, self._silence_timeout_s = timeout_s, silence_timeout_s

    def wait(self, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> list[Any]:
        """Return the answers in order.

        Raises ActorLostError where an actor is gone, silent or late, what each of them is doing being logged then;
        ActorError, or what an actor raised on purpose.
        """
        started = time.monotonic()
        pings: _Pings | None = None
        pending = dict(zip(refs, actors))
        ends_at = started + self._timeout_s
        failed, broken_off = False, False
        poll_s, most_s = _POLL_S, min(_MOST_POLL_S, max(_POLL_S, self._silence_timeout_s / 10))
        while pending and not failed:
            done, _ = ray.wait(
                list(pending), num_returns=len(pending), timeout=min(poll_s, max(0.0, ends_at - time.monotonic()))
            )
            # While answers come in, an error may be among the next: it is not to wait for a long look.
            poll_s = _POLL_S if done else min(poll_s * 1.25, most_s)
            for ref in done:
                del pending[ref]
                if isinstance(error := _error_of(ref), CollectiveError) and not broken_off:
                    # The rank that is gone or hangs is another one, which is worth waiting for: it is the cause.
                    broken_off, ends_at = True, min(ends_at, time.monotonic() + self._silence_timeout_s)
                failed |= error is not None and not isinstance(error, CollectiveError)
            # Most calls are done by then, and asking costs the caller as much as a call.
            if pending and pings is None:
                pings = _Pings(actors, self._silence_timeout_s)
            if pending and (ended := ended_process()):
                first = next(iter(pending.values()))
                raise self._lost(
                    f"{first} (phase {self._phase}, {self._what}) is lost with Ray's session: {ended} has ended", first
                )
            if pings is not None and (silent := pings.silent(list(pending.values()))):
                silent.is_silent = True
                raise self._lost(
                    f"{silent} (phase {self._phase}, {self._what}): the process, asked for a sign of life, did not answer "
                    f"within {self._silence_timeout_s:g} s. It is stopped, swapped out or unreachable",
                    silent,
                )
            if pending and time.monotonic() > ends_at and not failed:
                if broken_off:
                    break
                first = next(iter(pending.values()))
                raise self._lost(
                    f"{first} (phase {self._phase}, {self._what}) did not answer within {self._timeout_s:g} s. It is alive: "
                    "raise placement.call_timeout_s if it is only slow",
                    first,
                )
        if failed or broken_off:
            ray.wait(list(refs), num_returns=len(refs), timeout=_SETTLE_S)
            self._raise_first(actors, refs)
        return [self._value(actor, ref) for actor, ref in zip(actors, refs)]

    def _value(self, actor: RemoteActor, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._timeout_s).unwrap()
        except ray.exceptions.RayError as error:  # it answered, and its node went with the answer
            raise self._died(actor, error) from None

    def _raise_first(self, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> None:
        """Raise the likeliest cause of all failures: a death before an error on purpose before a crash before a collective
        that broke off, by rank."""
        found: list[tuple[int, int, Exception]] = []
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for rank, (actor, ref) in enumerate(zip(actors, refs)):
            error = _error_of(ref) if ref in ready else None
            if isinstance(error, CollectiveError):
                found.append((3, rank, error))
            elif isinstance(error, EngineDeadError):
                found.append((0, rank, self._died(actor, error)))
            elif isinstance(error, SkyrlTrainError):
                found.append((1, rank, error))
            elif isinstance(error, ray.exceptions.RayTaskError):
                found.append((2, rank, self._crashed(actor, str(error.cause or error))))
            elif error is not None:
                found.append((0, rank, self._died(actor, error)))
        _, rank, error = min(found, key=lambda entry: entry[:2])
        if isinstance(error, CollectiveError):
            actor = actors[rank]
            raise self._lost(f"{actor} (phase {self._phase}, {self._what}): {error}", actor)
        raise error

    def _lost(self, what: str, culprit: RemoteActor) -> ActorLostError:
        """Of actors that wait for each other: what each is doing goes to the log, as it is gone in a moment."""
        logger.info("%s. What every process is doing:\n%s", what, of_run())
        return ActorLostError(f"{what}. {culprit.log_tail()}", phase=self._phase)

    def _died(self, actor: RemoteActor, error: Exception) -> ActorLostError:
        what = f"{actor} died in phase {self._phase} ({self._what}): {reason_of(error)}"
        return ActorLostError(f"{what}\n{actor.log_tail()}", phase=self._phase)

    def _crashed(self, actor: RemoteActor, text: str) -> ActorError:
        lines = [line for line in text.strip().splitlines() if line.strip()][-_TAIL_LINES:]
        listed = "\n".join(f"  | {line}" for line in lines)
        return ActorError(f"{actor} failed in phase {self._phase} ({self._what}):\n{listed}\n{actor.log_tail()}")


def reason_of(error: Exception) -> str:
    """Why an actor is gone, without Ray's list of what may have been the reason."""
    text = " ".join(str(error).split())
    return text.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0][:300]


def _error_of(ref: Any) -> Exception | None:
    """What a call that is done raised, on purpose or not; None where it has a result."""
    try:
        answer: Answer = ray.get(ref, timeout=_FETCH_S)
        return answer.error
    except ray.exceptions.RayError as error:
        raised: Exception = error
        return raised


def ask_for_sign_of_life(actor: RemoteActor) -> Any:
    """On a thread of the actor that its work does not occupy."""
    return actor.handle.ping.options(concurrency_group=HEALTH).remote()


async def silent_for(limit_s: float) -> str:
    """Return the reason for which an actor is given up that gave no sign of life; what every process is doing goes to the
    log before anything is ended."""
    logger.info("What every process is doing:\n%s", await asyncio.to_thread(of_run))
    return f"gave no sign of life for {limit_s:g} s"


class _Pings:
    """One outstanding sign of life per actor."""

    def __init__(self, actors: Sequence[RemoteActor], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = max(_POLL_S, timeout_s / 10)
        now = time.monotonic()
        self._asked = {id(actor): (now, ask_for_sign_of_life(actor)) for actor in actors}

    def silent(self, actors: Sequence[RemoteActor]) -> RemoteActor | None:
        """An actor that has owed an answer for too long. A dead one is not silent: its call fails by itself."""
        now = time.monotonic()
        for actor in actors:
            since, ref = self._asked[id(actor)]
            if ray.wait([ref], timeout=0)[0]:
                if now - since > self._interval_s:
                    self._asked[id(actor)] = (now, ask_for_sign_of_life(actor))
            elif now - since > self._timeout_s:
                return actor
        return None
