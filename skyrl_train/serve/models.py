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

from skyrl_train.config import Config
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.errors import NonFiniteError
from skyrl_train.inference import HFEngine, load_for_engine
from skyrl_train.learner import AdamWStep, AdapterLearners, PolicyLearner, TokenLosses, read_model
from skyrl_train.model import load_tokenizer
from skyrl_train.model.sizes import read_config
from skyrl_train.serve.examples import loss_of, rows_of
from skyrl_train.serve.wire import ForwardBackward, forward_backward_output
from skyrl_train.system.files import sync_folder
from skyrl_train.telemetry import to_values

ALPHA = 32.0
"""Of every adapter, whatever its rank, as the hosted service has it."""
_ADAPTERS_IN_ENGINE = 16


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


class Models:
    """The base model, the adapters on it, and the base's own samples."""

    def __init__(self, config: Config) -> None:
        """Load them. Raises ModelError, EngineError."""
        settings = learner_settings(config, "policy")
        self.learners = AdapterLearners(settings)
        self._trained: dict[str, PolicyLearner] = {}
        tokenizer = load_tokenizer(config.model)
        self.engine = HFEngine(
            load_for_engine(config.model, config.platform.device),
            tokenizer,
            max_batch_size=1 if config.deterministic else config.generator.max_batch_size,
        )
        self.engine.share_weights(self.learners.base_weights())
        architecture = read_config(config.model.path, revision=config.model.revision)
        self.architecture = str(architecture.get("model_type", "unknown"))
        text = self.learners.model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.max_length = int(getattr(text, "max_position_embeddings", 0) or config.generator.max_context_length)
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
        """Forget an adapter."""
        del self._trained[name]
        self.learners.remove(name)

    def forward_backward(self, name: str, request: ForwardBackward) -> bytes:
        """Return the message of a pass, whose gradient is accumulated where there is one. Raises Refused, before anything is
        computed, and NonFiniteError."""
        loss = loss_of(request.loss, request.config)
        rows = rows_of(request, vocabulary=self.vocabulary, max_length=self.max_length)
        zero = torch.zeros(0, dtype=torch.float64)
        found = TokenLosses(logprobs=zero, losses=zero)
        if rows.batch is not None:
            found = self._trained[name].forward_losses(rows.batch, [loss], backward=request.backward)
        columns = {"logprobs": rows.spread(found.logprobs), "elementwise_loss": rows.spread(found.losses)}
        if not all(np.isfinite(array).all() for column in columns.values() for array in column):
            raise NonFiniteError("a loss or a log-probability is not finite; the next optim_step is refused for it")
        outputs = [dict(zip(columns, arrays)) for arrays in zip(*columns.values())]
        return forward_backward_output(outputs, {"loss:sum": float(found.losses.sum())})

    def optim_step(self, name: str, step: AdamWStep) -> Mapping[str, float]:
        """Step, and return the norm of the gradient before clipping. Raises NonFiniteError, with the gradient dropped."""
        metrics = to_values(self._trained[name].optim_step(step))
        return {f"{key.rpartition('/')[2]}:mean": value for key, value in metrics.items()}

    def save(self, name: str, folder: Path, *, with_optimizer: bool) -> int:
        """Write the adapter into a new folder, which is there whole or not at all; returns its bytes. Raises SaveError."""
        unfinished = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a verb that was cut off, and is made again
        held = self._trained[name].engine.hold_state(copies=False, leaves_gradient=True)
        sums = dict(held.write(unfinished))
        if not with_optimizer:
            sums.pop("optimizer.safetensors", None)
            (unfinished / "optimizer.safetensors").unlink(missing_ok=True)
        sync_folder(unfinished)
        unfinished.replace(folder)
        sync_folder(folder.parent)
        return sum(size for size, _ in sums.values())

    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the state of a folder, and drop a gradient. Raises CheckpointError."""
        self._trained[name].engine.load(folder, with_optimizer=with_optimizer)

    async def adapter_for(self, sampler: str, folder: Path, facts: AdapterFacts) -> None:
        """Have the engine answer with what was saved in `folder` under the name `sampler`, until `release`."""
        async with self._loading:
            if sampler not in self._in_engine:
                idle = [each for each in self._in_engine if not self._in_use.get(each)]
                for each in idle[: max(0, len(self._in_engine) - _ADAPTERS_IN_ENGINE + 1)]:
                    del self._in_engine[each]
                    await asyncio.to_thread(self.engine.unload_adapter, each)
                lora = self._lora(facts)
                await asyncio.to_thread(lambda: self.engine.load_adapter(sampler, lora, read_model(folder)))
            self._in_engine[sampler] = None
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
