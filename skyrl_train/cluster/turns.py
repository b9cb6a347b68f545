"""Whose turn it is: the engines', or a model's.

Where they share devices (`placement.colocate_all`) only the one whose turn it is has its memory there, the others keep
theirs in the host:

    generate   engines                              everything else off
    score      one model's parameters               engines asleep
    update     one model, optimizer and gradients   engines asleep
    sync       the policy's parameters              engines awake for weights, without keys and values

Where they do not share them nobody moves; what is left is that weights are read for an engine that was started anew only
while they are those of the last sync.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.cluster.calls import RemoteActor

if TYPE_CHECKING:
    from skyrl_train.cluster.fleet import EngineFleet
    from skyrl_train.cluster.workers import WorkerGroup

_AWAKE = ("weights", "kv_cache")
"""What an engine has on the device, in the order in which it takes it."""


class DeviceTurns:
    """Every move waits for the one before. Moves that change nothing cost nothing."""

    def __init__(self, fleet: EngineFleet | None, *, shared: bool, record_file: Path) -> None:
        """`shared`: all engines and models are on the same devices. Each move is a line of `record_file` then."""
        self._fleet = fleet
        self._shared = shared
        self._record_file = record_file
        self._groups: dict[str, WorkerGroup] = {}
        self._lock = threading.RLock()
        self._awake: tuple[str, ...] = _AWAKE
        self._on_device: dict[str, bool] = {}
        """Models that are there, and whether with their optimizer."""
        self.weights_moved = False
        """Whether a model may have trained since the last sync."""

    @property
    def engines_serve(self) -> bool:
        """Whether it is the engines' turn, so that a request need not ask for it."""
        return not self._shared or (self._awake == _AWAKE and not self._on_device)

    def add(self, group: WorkerGroup) -> None:
        """A model that has just been loaded: it goes off the device at once."""
        with self._lock:
            self._groups[group.role] = group
            if self._shared:
                self._on_device[group.role] = True
                self._put_off(group.role)

    def engines(self) -> None:
        """Requests will be answered. Before the first model is loaded: engines make room for it with `models()`."""
        with self._lock:
            if self._shared:
                for role in list(self._on_device):
                    self._put_off(role)
                self._wake(_AWAKE)

    def models(self, *roles: str, optimizer: bool = False, trains: bool = False) -> None:
        """These models will compute, or be read or written; with their optimizers where asked for."""
        with self._lock:
            self.weights_moved = self.weights_moved or (trains and "policy" in roles)
            if self._shared:
                self._sleep()
                self._put_on(*roles, optimizer=optimizer)

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """The policy's weights will be read for the engines; afterwards both have the same."""
        with self._lock:
            if self._shared:
                if "policy" in self._groups:
                    self._put_on("policy", optimizer=False)
                self._wake(_AWAKE[:1])
            yield
            self.weights_moved = False

    @contextmanager
    def catching_up(self, engine: RemoteActor) -> Iterator[bool]:
        """An engine that was started anew wants the weights of the last sync; whether there are any such still. The
        policy comes to the device beside the engines for it."""
        with self._lock:
            if self._shared and not self.weights_moved and "policy" in self._groups and not self._on_device:
                self._put_on("policy", optimizer=False)
                yield True
                self._put_off("policy")
            else:
                yield not self.weights_moved and not self._on_device
            if self._fleet is not None and self._awake != _AWAKE:
                self._fleet.call("sleep", "restart", engines=[engine])
                for tag in self._awake:
                    self._fleet.call("wake_up", "restart", tag, engines=[engine])

    def _sleep(self) -> None:
        if self._fleet is None or not self._awake:
            return
        self._fleet.wait_ready()
        if self._awake != _AWAKE:
            for role in list(self._on_device):
                self._put_off(role)
            self._wake(_AWAKE)  # vLLM puts to sleep what is wholly awake
        started = time.monotonic()
        self._fleet.call("sleep", "score")
        self._awake = ()
        self._record("engines sleep", started)

    def _wake(self, tags: tuple[str, ...]) -> None:
        if self._fleet is None:
            return
        for tag in tags:
            if tag not in self._awake:
                started = time.monotonic()
                self._fleet.call("wake_up", "sync" if tag == "weights" else "generate", tag)
                self._awake = (*self._awake, tag)
                self._record(f"engines wake: {tag}", started)

    def _put_on(self, *roles: str, optimizer: bool) -> None:
        for other in set(self._on_device) - set(roles):
            self._put_off(other)
        for role in roles:
            if role not in self._on_device or (optimizer and not self._on_device[role]):
                started = time.monotonic()
                self._groups[role].call("onload", "score", args=(optimizer,))
                self._on_device[role] = optimizer
                self._record(f"{role} on" + (", with optimizer" if optimizer else ""), started)

    def _put_off(self, role: str) -> None:
        started = time.monotonic()
        self._groups[role].call("offload", "generate")
        del self._on_device[role]
        self._record(f"{role} off", started)

    def _record(self, move: str, started: float) -> None:
        with self._record_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"move": move, "seconds": round(time.monotonic() - started, 4)}) + "\n")
