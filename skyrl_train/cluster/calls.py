"""Calls to actors, with a deadline and a name; what a dead, hung or broken actor becomes.

While a call runs, its actor is asked for a sign of life now and then, on a thread that the call does not occupy. An actor
that works is left in peace until the call's own deadline; one that is gone, stopped or swapped out is found much sooner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util

from skyrl_train.errors import ActorError, DeadlineError, EngineDeadError, SkyrlTrainError

HEALTH = "health"
"""The concurrency group in which every actor answers `ping`."""
_POLL_S = 0.5
_SETTLE_S = 2.0
"""After a first failure: how long others may take to say that they failed before it."""
_ASKED_S = 2.0
"""An actor that was asked to end has so long."""
_TAIL_LINES = 20


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


@dataclass(kw_only=True)
class RemoteActor:
    """A handle with what an error needs to say of it."""

    handle: Any
    role: str
    rank: int
    log_folder: Path | None
    identity: Identity | None = None

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
        """Return the answers in order. Raises DeadlineError, ActorError, or what an actor raised on purpose."""
        started = time.monotonic()
        pings = _Pings(actors, self._silence_timeout_s)
        pending = dict(zip(refs, actors))
        failed = False
        while pending and not failed:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_POLL_S)
            for ref in done:
                del pending[ref]
                failed = failed or _has_failed(ref)
            if failed or not pending:
                break
            if silent := pings.silent(list(pending.values())):
                raise DeadlineError(
                    f"{silent} (phase {self._phase}, {self._what}): the process, asked for a sign of life,",
                    self._silence_timeout_s,
                    f"It is stopped, swapped out or unreachable. {silent.log_tail()}",
                )
            if time.monotonic() - started > self._timeout_s:
                first = next(iter(pending.values()))
                raise DeadlineError(
                    f"{first} (phase {self._phase}, {self._what})",
                    self._timeout_s,
                    f"It is alive: raise placement.call_timeout_s if it is only slow. {first.log_tail()}",
                )
        if failed:
            ray.wait(list(refs), num_returns=len(refs), timeout=_SETTLE_S)
            self._raise_first(actors, refs)
        return [ray.get(ref).unwrap() for ref in refs]

    def _raise_first(self, actors: Sequence[RemoteActor], refs: Sequence[Any]) -> None:
        """Raise the likeliest cause of all failures: a death before an error on purpose before a crash, by rank."""
        found: list[tuple[int, int, Exception]] = []
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for rank, (actor, ref) in enumerate(zip(actors, refs)):
            if ref not in ready:
                continue
            try:
                ray.get(ref).unwrap()
            except EngineDeadError as error:
                found.append((0, rank, self._died(actor, error)))
            except SkyrlTrainError as error:
                found.append((1, rank, error))
            except ray.exceptions.RayTaskError as error:
                found.append((2, rank, self._crashed(actor, str(error.cause or error))))
            except ray.exceptions.RayError as error:
                found.append((0, rank, self._died(actor, error)))
        raise min(found, key=lambda entry: entry[:2])[2]

    def _died(self, actor: RemoteActor, error: Exception) -> ActorError:
        return ActorError(f"{actor} died in phase {self._phase} ({self._what}): {reason_of(error)}\n{actor.log_tail()}")

    def _crashed(self, actor: RemoteActor, text: str) -> ActorError:
        lines = [line for line in text.strip().splitlines() if line.strip()][-_TAIL_LINES:]
        listed = "\n".join(f"  | {line}" for line in lines)
        return ActorError(f"{actor} failed in phase {self._phase} ({self._what}):\n{listed}\n{actor.log_tail()}")


def reason_of(error: Exception) -> str:
    """Why an actor is gone, without Ray's list of what may have been the reason."""
    text = " ".join(str(error).split())
    return text.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0][:300]


def _has_failed(ref: Any) -> bool:
    try:
        return ray.get(ref).error is not None
    except ray.exceptions.RayError:
        return True


def ask_for_sign_of_life(actor: RemoteActor) -> Any:
    """On a thread of the actor that its work does not occupy."""
    return actor.handle.ping.options(concurrency_group=HEALTH).remote()


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
