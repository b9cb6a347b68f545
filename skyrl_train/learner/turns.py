"""Whose turn it is: the engines', or a model's.

Where they share devices (`config/bundles.py: takes_turns`), on Ray or in this process, only the one whose turn it is has its
memory there; the others keep theirs in the host:

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from skyrl_train.batch.minibatch import MiniBatch
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.learner.sizing import make_meter, size_micro_batches
from skyrl_train.telemetry.metrics import StepMetrics

if TYPE_CHECKING:
    from skyrl_train.learner.sizing import SizingLimits, SizingReport

_AWAKE = ("weights", "kv_cache")
"""What an engine has on the device, in the order in which it takes it."""


class SleepingEngines(Protocol):
    """Engines that can leave a device and come back to it: all of a run, or one of them."""

    def wait_ready(self) -> None:
        """Returns once they have loaded the model."""
        ...

    def sleep(self) -> None:
        """Weights to the host, keys and values dropped; of engines that are wholly awake."""
        ...

    def wake_up(self, tag: str) -> None:
        """Back on the device with `weights`, or with room for the `kv_cache`."""
        ...


class MovableModel(Protocol):
    """A model that can leave its devices and come back to them (`learner/residence.py`), in this process or on ranks."""

    @property
    def role(self) -> str:
        """`policy`, `reference` or `critic`."""
        ...

    def onload(self, optimizer: bool) -> None:
        """Back on its devices, with its optimizer's state where asked for."""
        ...

    def offload(self) -> None:
        """Everything to the host."""
        ...


class DeviceTurns:
    """Every move waits for the one before. Moves that change nothing cost nothing."""

    def __init__(self, engines: SleepingEngines | None, *, shared: bool, record_file: Path) -> None:
        """`shared`: all engines and models are on the same devices. Each move is a line of `record_file` then."""
        self._engines = engines
        self._shared = shared
        self._record_file = record_file
        self._models: dict[str, MovableModel] = {}
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

    def add(self, model: MovableModel) -> None:
        """A model that has just been loaded: it goes off the device at once."""
        with self._lock:
            self._models[model.role] = model
            if self._shared:
                self._on_device[model.role] = True
                self._put_off(model.role)

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
                if "policy" in self._models:
                    self._put_on("policy", optimizer=False)
                self._wake(_AWAKE[:1])
            yield
            self.weights_moved = False

    @contextmanager
    def catching_up(self, engine: SleepingEngines) -> Iterator[bool]:
        """An engine that was started anew wants the weights of the last sync; whether there are any such still. The
        policy comes to the device beside the engines for it."""
        with self._lock:
            if self._shared and not self.weights_moved and "policy" in self._models and not self._on_device:
                self._put_on("policy", optimizer=False)
                yield True
                self._put_off("policy")
            else:
                yield not self.weights_moved and not self._on_device
            if self._awake != _AWAKE:
                engine.sleep()
                for tag in self._awake:
                    engine.wake_up(tag)

    def _sleep(self) -> None:
        if self._engines is None or not self._awake:
            return
        self._engines.wait_ready()
        if self._awake != _AWAKE:
            for role in list(self._on_device):
                self._put_off(role)
            self._wake(_AWAKE)  # vLLM puts to sleep what is wholly awake
        started = time.monotonic()
        self._engines.sleep()
        self._awake = ()
        self._record("engines sleep", started)

    def _wake(self, tags: tuple[str, ...]) -> None:
        if self._engines is None:
            return
        for tag in tags:
            if tag not in self._awake:
                started = time.monotonic()
                self._engines.wake_up(tag)
                self._awake = (*self._awake, tag)
                self._record(f"engines wake: {tag}", started)

    def _put_on(self, *roles: str, optimizer: bool) -> None:
        for other in set(self._on_device) - set(roles):
            self._put_off(other)
        for role in roles:
            if role not in self._on_device or (optimizer and not self._on_device[role]):
                started = time.monotonic()
                self._models[role].onload(optimizer)
                self._on_device[role] = optimizer
                self._record(f"{role} on" + (", with optimizer" if optimizer else ""), started)

    def _put_off(self, role: str) -> None:
        started = time.monotonic()
        self._models[role].offload()
        del self._on_device[role]
        self._record(f"{role} off", started)

    def _record(self, move: str, started: float) -> None:
        with self._record_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"move": move, "seconds": round(time.monotonic() - started, 4)}) + "\n")


class LearnerInTurn:
    """A learner of this process that shares its device: takes its turn before it computes, is read or is written, as the
    ranks of a `RayLearner` do. Implements `Learner` and, around a policy, `Reference` and `ScoresDistributions`."""

    def __init__(self, learner: PolicyLearner | CriticLearner, turns: DeviceTurns) -> None:
        """`learner` has just been loaded; it leaves the device."""
        self._learner, self._turns = learner, turns
        self.role = learner.engine.name
        turns.add(self)

    def onload(self, optimizer: bool) -> None:
        """See `Residence.onload`."""
        self._learner.engine.residence.onload(optimizer=optimizer)

    def offload(self) -> None:
        """See `Residence.offload`."""
        self._learner.engine.residence.offload()

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Log-probabilities or values, `[num_tokens]`."""
        self._take_turn()
        return self._learner.forward(batch)

    def forward_base(self, batch: TrainingInputBatch) -> Tensor:
        """As `forward`, with the policy's adapter off."""
        self._take_turn()
        return self._policy().forward_base(batch)

    def forward_entropy(self, batch: TrainingInputBatch) -> Tensor:
        """Entropies in place of log-probabilities."""
        self._take_turn()
        return self._policy().forward_entropy(batch)

    def forward_sum_pi_squared(self, batch: TrainingInputBatch) -> Tensor:
        """Sums of squared probabilities in place of log-probabilities."""
        self._take_turn()
        return self._policy().forward_sum_pi_squared(batch)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        """Adds the gradient of the mini-batch's loss."""
        self._take_turn(optimizer=True, trains=True)
        return self._learner.forward_backward(mini_batch)

    def optim_step(self) -> StepMetrics:
        """One step; raises NonFiniteError before any weight moves."""
        self._take_turn(optimizer=True, trains=True)
        return self._learner.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whoever iterates them sees to the turn, as `DeviceTurns.syncing` does."""
        return self._learner.weights()

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, of the adapter by itself."""
        return self._learner.adapter_weights()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Those of the policy, which is on the device beside this one then."""
        self._take_turn("policy")
        self._policy().load_weights(weights)

    def size_micro_batches(
        self, limits: SizingLimits, stored: Mapping[str, tuple[SizingReport, ...]]
    ) -> list[SizingReport]:
        """Finds what fits while the others are away. `stored`: reports of an earlier run, by model."""
        self._take_turn(optimizer=True, trains=True)
        engine, own = self._learner.engine, stored.get(self.role, ())
        meter = make_meter(engine.passes.device, limits)
        return [size_micro_batches(self._learner, meter, limits, stored=own[0] if len(own) == 1 else None)]

    def save(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self._take_turn(optimizer=True)
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self._take_turn(optimizer=True, trains=True)
        self._learner.load(folder)

    def export_hf(self, folder: Path) -> None:
        """Raises ModelError."""
        self._take_turn()
        self._learner.export_hf(folder)

    def close(self) -> None:
        """Nothing to release."""
        self._learner.close()

    def _policy(self) -> PolicyLearner:
        if not isinstance(self._learner, PolicyLearner):
            raise SkyrlTrainError(f"the {self.role} model has no log-probabilities")
        return self._learner

    def _take_turn(self, *others: str, optimizer: bool = False, trains: bool = False) -> None:
        self._turns.models(self.role, *others, optimizer=optimizer, trains=trains)
