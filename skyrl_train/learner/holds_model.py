"""A learner's model between steps: what checkpoints, exports and engines are given of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.interfaces import HeldState
from skyrl_train.learner import state
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.optimizer import load_optimizer_tensors, optimizer_tensors
from skyrl_train.learner.state_files import HostCopy, StateFiles
from skyrl_train.model.lora import by_layer, has_adapter, merged_weights
from skyrl_train.parts import OPTIMIZERS
from skyrl_train.weight_sync import RankSender
from skyrl_train.weights import ModelWeights, WeightSender


class HoldsModel:
    """The part of a `Learner` that knows nothing of losses and steps."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self._host_copy = HostCopy()

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Return `[num_tokens]` on the CPU, as `Learner.forward`."""
        raise NotImplementedError

    def weights(self) -> ModelWeights:
        """Return the parameters under their Hugging Face names, tied ones once, an adapter merged."""
        return ModelWeights(LocalEndpoint(self.sender()), role=self.engine.name, scores=self.forward)

    def sender(self) -> WeightSender:
        """Return this process's part in handing over the weights."""
        engine = self.engine
        return RankSender(
            engine.model,
            engine.strategy,
            engine.passes.device,
            require_there=lambda: engine.offloader.require(optimizer=False),
        )

    def hold_state(self, *, copies: bool, leaves_gradient: bool = False) -> HeldState:
        """What this rank writes of the files of `learner/state_files.py`; exact. Raises CheckpointError where a gradient is
        pending, which it does not write, unless it `leaves_gradient` to whoever keeps what it was made of."""
        engine, strategy = self.engine, self.engine.strategy
        if engine.has_gradient and not leaves_gradient:
            raise CheckpointError(f"save between optimizer steps; the {engine.name} model has a pending gradient")
        engine.offloader.require(optimizer=True)
        if strategy.rank and not strategy.sharded:
            return HeldState(is_copied=True, write=lambda folder: {})  # noqa: ARG005 - rank 0 has all of it
        files = StateFiles.of(
            role=engine.name,
            model=self._saved_tensors(),
            optimizer=optimizer_tensors(engine.optimizer, engine.parameters) if engine.optimizer_config else None,
            optimizer_name=self._optimizer_name,
            steps=engine.num_optimizer_steps,
            documents=engine.num_documents,
            budgets=engine.oom_retry.budgets(),
            sharded=strategy.sharded,
            rank=strategy.rank,
        )
        num_ranks = strategy.num_ranks if strategy.sharded else 1
        copy = self._host_copy.take(files, num_ranks=num_ranks) if copies else None
        return HeldState(is_copied=copy is not None, write=(copy or files).write)

    def save(self, folder: Path) -> None:
        """Write the state of a model whose ranks call this together. Raises CheckpointError, and SaveError where the disk
        refuses one of them."""
        strategy, reason = self.engine.strategy, ""
        try:
            self.hold_state(copies=False).write(folder)
        except SaveError as error:
            reason = str(error)
        # Ranks that share a model return when all of its shards are there, or raise when one of them is not.
        if reason := strategy.first_reason(reason) if strategy.sharded else reason:
            raise SaveError(reason)

    def load(self, folder: Path, *, with_optimizer: bool = True) -> None:
        """Inverse of `save`; without the optimizer it begins anew. Raises CheckpointError, before anything changes, where
        names, shapes or types differ."""
        engine = self.engine
        engine.offloader.require(optimizer=True)
        trains = engine.optimizer_config is not None
        stored = state.read(
            folder,
            role=engine.name,
            model=self._saved_tensors(),
            with_optimizer=trains and with_optimizer,
            optimizer_name=self._optimizer_name,
        )
        # Checked while it is taken, and so ahead of the weights: where it is refused nothing has moved.
        if trains:
            load_optimizer_tensors(engine.optimizer, engine.parameters, stored.optimizer, in_host=engine.state_in_host)
        with torch.no_grad():
            for name, tensor in self._saved_tensors().items():
                # Into what is there: the optimizer, and FSDP2 where it shards, hold on to these tensors.
                tensor.copy_(stored.model[name])
        facts = stored.facts
        steps, documents = (facts.num_optimizer_steps, facts.num_documents) if with_optimizer else (0, 0)
        engine.num_optimizer_steps, engine.num_documents = steps, documents
        engine.oom_retry.restore(facts.budgets)
        engine.zero_grad()

    @property
    def _optimizer_name(self) -> str:
        config = self.engine.optimizer_config
        return OPTIMIZERS.name_of(config.name) if config else ""

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Return the parameters, tied ones once, and what else the model keeps (persistent buffers), unless it is shared."""
        engine = self.engine
        if engine.adapter:
            return dict(engine.parameters)
        # Other buffers, such as those of rotary positions, follow from the configuration.
        persistent = engine.model.state_dict().keys()
        buffers = {name: value for name, value in engine.model.named_buffers() if name in persistent}
        return {**engine.parameters, **buffers}

    def whole_state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, on the CPU of rank 0; nothing on the others. Called by all.

        An adapter is part of what it adapts. Tied parameters are one tensor under several names.
        """
        engine = self.engine
        engine.offloader.require(optimizer=False)
        gather, rank = engine.strategy.gather, engine.strategy.rank
        if has_adapter(engine.model):
            return {name: whole.to("cpu") for name, whole in merged_weights(engine.model, gather) if rank == 0}
        gathered: dict[int, Tensor] = {}
        # With keep_vars: detached, tied parameters would be tensors of identities of their own, and gathered twice.
        named = engine.model.state_dict(keep_vars=True)
        for names in by_layer(named):
            new = {id(named[name]): named[name] for name in names if id(named[name]) not in gathered}
            for key, whole in zip(new, gather(list(new.values()), [None] * len(new))):
                # Other ranks take part in the gathering and keep nothing, or each would have the whole model in the host.
                gathered[key] = whole.to("cpu") if rank == 0 else whole.new_empty(0)
        return {name: gathered[id(tensor)] for name, tensor in named.items() if rank == 0}

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""
