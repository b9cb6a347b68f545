"""What the server computes with: learners of adapters on one base, and the engine that samples from what they saved.

Everything here blocks, or belongs to the engine's loop; `service.py` decides what is called when.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from skyrl_train.batch.steps import TargetRows
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import GeneratorConfig, LoraConfig, OptimizerConfig
from skyrl_train.errors import NonFiniteError, SaveError
from skyrl_train.inference import HFEngine, load_for_engine
from skyrl_train.learner import AdamWStep, AdapterLearners, AdapterPass, RowLossLearner, TokenLosses, read_model
from skyrl_train.model import load_tokenizer
from skyrl_train.model.sizes import read_config
from skyrl_train.serve.examples import loss_of, rows_of
from skyrl_train.serve.wire import ForwardBackward, forward_backward_output
from skyrl_train.system.files import make_folder, sync_folder
from skyrl_train.telemetry import to_values

ALPHA = 32.0
"""Of every adapter, whatever its rank, as the hosted service has it."""
_ADAPTERS_IN_ENGINE = 16
_GATHER_S = 0.005
"""How long the engine waits for another request before it begins a batch."""


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """What an adapter is, as it is journaled and as a checkpoint states it."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True

    @property
    def shape(self) -> tuple[int, bool, bool]:
        """What adapters have in common whose tensors fit one another."""
        return self.rank, self.train_attn, self.train_mlp


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a pass of one adapter computes."""

    of_targets: TargetRows
    loss: AlgorithmConfig
    backward: bool

    def message(self, found: TokenLosses) -> bytes:
        """Return the pass's message. Raises NonFiniteError."""
        columns = {
            "logprobs": self.of_targets.spread(found.logprobs),
            "elementwise_loss": self.of_targets.spread(found.losses),
        }
        if not all(np.isfinite(array).all() for column in columns.values() for array in column):
            raise NonFiniteError("a loss or a log-probability is not finite; the next optim_step is refused for it")
        outputs = [dict(zip(columns, arrays)) for arrays in zip(*columns.values())]
        return forward_backward_output(outputs, {"loss:sum": float(found.losses.sum())})


class Models:
    """The base model, the adapters on it, and the base's own samples."""

    def __init__(self, settings: LearnerSettings, generator: GeneratorConfig) -> None:
        """Load them. Raises ModelError, EngineError."""
        self.learners = AdapterLearners(settings)
        self._trained: dict[str, RowLossLearner] = {}
        self.is_deterministic = settings.deterministic
        self.tokenizer = tokenizer = load_tokenizer(settings.model)
        self.engine = HFEngine(
            load_for_engine(settings.model, settings.platform.device),
            tokenizer,
            max_batch_size=1 if settings.deterministic else generator.max_batch_size,
            gather_s=0.0 if settings.deterministic else _GATHER_S,
        )
        self.engine.share_weights(self.learners.base_weights())
        architecture = read_config(settings.model.path, revision=settings.model.revision)
        self.architecture = str(architecture.get("model_type", "unknown"))
        text = self.learners.model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.max_length = int(getattr(text, "max_position_embeddings", 0) or generator.max_context_length)
        self._in_engine: OrderedDict[str, None] = OrderedDict()
        self._in_use: dict[str, int] = {}
        self._loading = asyncio.Lock()

    def create(self, name: str, facts: AdapterFacts) -> None:
        """Make an adapter and its optimizer, if they are not there. Raises ModelError."""
        if name in self._trained:
            return
        self._trained[name] = self.learners.create(
            name, self._lora(facts), seed=facts.seed, optimizer=OptimizerConfig(name="adamw")
        )

    def remove(self, name: str) -> None:
        """Forget an adapter, its optimizer and what they hold on the device, if it is there."""
        if self._trained.pop(name, None) is not None:
            self.learners.remove(name)

    def has_gradient(self, name: str) -> bool:
        """Whether something was added to an adapter's gradient since its last step."""
        return name in self._trained and self._trained[name].engine.has_gradient

    def rows(self, request: ForwardBackward) -> Rows:
        """Return what a pass computes. Raises Refused, BatchError."""
        loss = loss_of(request.loss, request.config)
        found = rows_of(request, vocabulary=self.vocabulary, max_length=self.max_length)
        return Rows(of_targets=found, loss=loss, backward=request.backward)

    def forward_backward(self, name: str, rows: Rows) -> bytes:
        """Return the message of a pass, whose gradient is accumulated where there is one. Raises NonFiniteError."""
        batch, zero = rows.of_targets.batch, torch.zeros(0, dtype=torch.float64)
        if batch is None:
            return rows.message(TokenLosses(logprobs=zero, losses=zero))
        return rows.message(self._trained[name].forward_losses(batch, [rows.loss], backward=rows.backward))

    def together(self, asked: Mapping[str, Rows]) -> dict[str, bytes]:
        """Return the messages of passes of several adapters, computed as one pass; all have rows, and gradients, or none of
        them. Raises what one of them would, and all gradients are what they were then."""
        backward = any(rows.backward for rows in asked.values())
        passes = {
            name: AdapterPass(batch=rows.of_targets.batch, loss=rows.loss)
            for name, rows in asked.items()
            if rows.of_targets.batch is not None
        }
        found = self.learners.forward_losses(passes, backward=backward)
        return {name: rows.message(found[name]) for name, rows in asked.items()}

    def optim_step(self, name: str, step: AdamWStep) -> Mapping[str, float]:
        """Step, and return the norm of the gradient before clipping. Raises NonFiniteError, with the gradient dropped."""
        metrics = to_values(self._trained[name].optim_step(step))
        return {f"{key.rpartition('/')[2]}:mean": value for key, value in metrics.items()}

    def save(self, name: str, folder: Path, *, with_optimizer: bool) -> int:
        """Write the adapter into a new folder, which is there whole or not at all; returns its bytes. Raises SaveError."""
        unfinished = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            make_folder(folder.parent)
            shutil.rmtree(folder, ignore_errors=True)  # of a verb that was cut off, and is made again
            held = self._trained[name].hold_state(copies=False, leaves_gradient=True)
            sums = dict(held.write(unfinished))
            if not with_optimizer:
                sums.pop("optimizer.safetensors", None)
                (unfinished / "optimizer.safetensors").unlink(missing_ok=True)
            sync_folder(unfinished)
            unfinished.replace(folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise SaveError(f"{folder} could not be written: {error}") from error
        return sum(size for size, _ in sums.values())

    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the state of a folder, and drop a gradient. Raises CheckpointError."""
        self._trained[name].load(folder, with_optimizer=with_optimizer)

    async def adapter_for(self, sampler: str, folder: Path, facts: AdapterFacts) -> None:
        """Have the engine answer with what was saved in `folder` under the name `sampler`, until `release`."""
        wanted = [sampler]
        taking = asyncio.create_task(self._take(sampler, folder, facts, wanted))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:  # a thread loads on: the engine must not have an adapter that nobody knows of
            wanted.clear()
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                self.release(sampler)
            raise

    async def _take(self, sampler: str, folder: Path, facts: AdapterFacts, wanted: list[str]) -> None:
        """`wanted` is empty when nobody waits for it any more, and it is not loaded, or not held, then."""
        async with self._loading:
            if wanted and sampler not in self._in_engine:
                idle = [each for each in self._in_engine if not self._in_use.get(each)]
                for each in idle[: max(0, len(self._in_engine) - _ADAPTERS_IN_ENGINE + 1)]:
                    del self._in_engine[each]
                    await asyncio.to_thread(self.engine.unload_adapter, each)
                lora = self._lora(facts)
                await asyncio.to_thread(lambda: self.engine.load_adapter(sampler, lora, read_model(folder)))
                self._in_engine[sampler] = None
            if wanted:
                self._in_engine.move_to_end(sampler)
                self._in_use[sampler] = self._in_use.get(sampler, 0) + 1

    def release(self, sampler: str) -> None:
        """Tell that one user of `adapter_for` is done."""
        self._in_use[sampler] -= 1
        if not self._in_use[sampler]:
            del self._in_use[sampler]

    def close(self) -> None:
        """Raises DeadlineError."""
        self.engine.close()

    def _lora(self, facts: AdapterFacts) -> LoraConfig:
        targets = self.learners.targets(attention=facts.train_attn, mlp=facts.train_mlp)
        return LoraConfig(rank=facts.rank, alpha=ALPHA, targets=targets)
