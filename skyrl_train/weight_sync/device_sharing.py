"""Device sharing: engines and models on the same devices, one of them at a time.

Where they share devices (`config/placement/bundles.py: shares_devices`), on Ray or in this process, only the one that
works has its memory there; the others keep theirs in the host:

    generate   engines                              everything else off
    score      one model's parameters               engines asleep
    update     one model, optimizer and gradients   engines asleep
    sync       the policy's parameters              engines awake for weights, without keys and values

Engines sleep without a copy of their weights where the sync that follows brings all of them: after they have answered, as
in every step. Should they be asked before, they are sent those of the last sync first.

Where there is room for all at once (`placement.offload=false`) turns are taken and nothing moves. Where they do not share
devices nobody waits either; what is left is that weights are read for an engine that was started again only while they are
those of the last sync.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.endpoints import Endpoint, Phase
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.receiver import UpdatableEngine

_AWAKE = ("weights", "kv_cache")
"""What an engine has on the device, in the order in which it takes it."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model that can leave its devices and come back to them, in this process or on ranks."""

    onload: Callable[[bool], object]
    """Brings it back, with its optimizer's state where asked for."""
    offload: Callable[[], object]
    """Moves parameters, gradients and the optimizer's state to the host."""
    release: Callable[[], object]
    """Gives memory that it has freed back to the device, where it stays."""


class DeviceSharing:
    """Every move waits for the one before. Moves that change nothing cost nothing."""

    def __init__(
        self,
        engines: Callable[[], Endpoint[UpdatableEngine]] | None = None,
        *,
        shared: bool = False,
        moves: bool = True,
        record_file: Path | None = None,
        wait_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            engines: Gives those that live; None where a run has none of its own.
            shared: Whether all engines and models are on the same devices.
            moves: Whether they leave them for others.
            record_file: Gets a line for each move; None writes nothing.
            wait_ready: Returns once the engines have loaded the model.
        """
        self._engines, self.wait_ready = engines, wait_ready
        self._shared, self._moves = shared, moves
        self._record_file = record_file
        self._models: dict[str, _Model] = {}
        # Reentrant: while it is held, engines are sent weights by a sync, which takes it too.
        self._lock = threading.RLock()
        # On the same lock, which waiting lets go: models could not leave otherwise.
        self._models_left = threading.Condition(self._lock)
        self._awake: tuple[str, ...] = _AWAKE
        self._on_device: dict[str, bool] = {}
        """Models that are there, and whether with their optimizer."""
        self._weights_moved = False
        self._resend: Callable[[], None] | None = None
        self._was_synced = self._discarded = False
        """Whether engines have had a sync, and whether they have no weights since."""

    def resends(self, resend: Callable[[], None]) -> None:
        """Let engines sleep without weights, since each sync brings all. `resend` brings those of the last one again."""
        self._resend = resend

    @property
    def weights_moved(self) -> bool:
        """Whether the policy may have trained since the last sync."""
        return self._weights_moved

    @property
    def shared(self) -> bool:
        """Whether engines and models are on the same devices."""
        return self._shared

    @property
    def engines_serve(self) -> bool:
        """Whether it is the engines' turn, so that a request need not ask for it."""
        return not self._shared or (self._awake == _AWAKE and not self._on_device)

    def add(
        self,
        role: str,
        onload: Callable[[bool], object],
        offload: Callable[[], object],
        release: Callable[[], object] = lambda: None,
    ) -> None:
        """Take in a model that has just been loaded: it leaves the device at once.

        `onload` brings it back, with its optimizer's state where asked for; `offload` moves everything to the host; where
        nothing moves, `release` gives back what it has freed.
        """
        with self._lock:
            self._models[role] = _Model(onload=onload, offload=offload, release=release)
            if self._shared:
                self._on_device[role] = True
                self._put_off(role)

    def engines(self) -> None:
        """Bring the engines to the devices, since requests will be answered."""
        with self._lock:
            if self._shared:
                # Ahead of the models' leaving, since weights are read from the policy on its device.
                if self._discarded and self._resend is not None:
                    self._resend()
                # Models first: there is no room for keys and values beside one.
                for role in list(self._on_device):
                    self._put_off(role)
                self._wake(_AWAKE)

    def models(self, *roles: str, optimizer: bool = False, trains: bool = False) -> None:
        """Bring these models to the devices, with their optimizers where asked for; with none, engines make room.

        `trains`: whether they may change there.
        """
        with self._lock:
            # Said before the update and not taken back by one that failed: weights may be half changed
            # then, and an engine that is started again must not get those, wherever it computes.
            self._weights_moved = self._weights_moved or (trains and "policy" in roles)
            if self._shared:
                self._sleep()
                self._put_on(*roles, optimizer=optimizer)

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Have policy and engines ready for a sync, after which both have the same weights."""
        with self._lock:
            if self._shared:
                if "policy" in self._models:
                    self._put_on("policy", optimizer=False)
                # Without keys and values, whose room the policy takes.
                self._wake(_AWAKE[:1])
            yield
            # Not where the sync failed: nobody knows then which weights engines have.
            self._weights_moved = self._discarded = False
            self._was_synced = True

    @contextmanager
    def starting_engine(self, is_given_up: Callable[[], bool]) -> Iterator[None]:
        """Keep models off the devices while an engine is started again, which finds none of the memory it needs beside them.
        Waits until they have left, and has them wait for its end. Raises EngineError where `is_given_up` meanwhile."""
        with self._lock:
            while self._shared and self._on_device:
                if is_given_up():
                    raise EngineError("the engines were closed")
                self._models_left.wait(_LOOK_EVERY_S)
            yield

    @contextmanager
    def catching_up(self, engine: Endpoint[UpdatableEngine]) -> Iterator[bool]:
        """An engine that was started again wants the weights of the last sync; whether there are any such still. The
        policy comes to the device beside the engines for it."""
        with self._lock:
            if self._shared and not self._weights_moved and "policy" in self._models and not self._on_device:
                self._put_on("policy", optimizer=False)
                yield True
                self._put_off("policy")
            else:
                yield not self._weights_moved and not self._on_device
            # It came up wholly awake. It has to be as the others are, whose state the next move takes for that of all.
            if self._moves and self._awake != _AWAKE:
                engine.call(UpdatableEngine.sleep, "restart")
                for tag in self._awake:
                    engine.call(UpdatableEngine.wake_up, "restart", tag)

    def _sleep(self) -> None:
        if self._engines is None or not self._awake:
            return
        self.wait_ready()
        if not self._moves:
            self._awake = ()
            return
        # Those that have not answered since the last sync are about to.
        self._discarded = self._resend is not None and self._was_synced and self._awake == _AWAKE
        if self._awake != _AWAKE:
            for role in list(self._on_device):
                self._put_off(role)
            self._wake(_AWAKE)  # vLLM puts to sleep what is wholly awake
        started = time.monotonic()
        # A copy in the host would cost a transfer each way, of weights that the coming sync replaces.
        sleep = UpdatableEngine.sleep_without_weights if self._discarded else UpdatableEngine.sleep
        self._engines().call(sleep, "score")
        self._awake = ()
        self._record("engines sleep" + (", without weights" if self._discarded else ""), started)

    def _wake(self, tags: tuple[str, ...]) -> None:
        if self._engines is None:
            return
        for tag in tags:
            if tag not in self._awake:
                started = time.monotonic()
                phase: Phase = "sync" if tag == _AWAKE[0] else "generate"
                if self._moves:
                    self._engines().call(UpdatableEngine.wake_up, phase, tag)
                self._awake = (*self._awake, tag)
                self._record(f"engines wake: {tag}", started)

    def _put_on(self, *roles: str, optimizer: bool) -> None:
        # Others leave first: the device has room for what is asked for, not for them as well.
        for other in set(self._on_device) - set(roles):
            self._put_off(other)
        for role in roles:
            # One that is there with its optimizer does for both; the optimizer leaves with the model.
            if role not in self._on_device or (optimizer and not self._on_device[role]):
                started = time.monotonic()
                if self._moves:
                    self._models[role].onload(optimizer)
                self._on_device[role] = optimizer
                self._record(f"{role} on" + (", with optimizer" if optimizer else ""), started)

    def _put_off(self, role: str) -> None:
        started = time.monotonic()
        leave = self._models[role].offload if self._moves else self._models[role].release
        leave()
        # Only now: a model that could not leave still counts as there.
        del self._on_device[role]
        self._models_left.notify_all()
        self._record(f"{role} off", started)

    def _record(self, move: str, started: float) -> None:
        if self._moves and self._record_file is not None:
            with self._record_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"move": move, "seconds": round(time.monotonic() - started, 4)}) + "\n")
