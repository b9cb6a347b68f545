"""What the server computes with: learners of adapters on one base, and of a copy of it of which all weights are trained; the
engines that sample from what they saved.

    ServedModels      what the server asks of a base
      Models          in this process
      RayModels       the same in workers on Ray, each of which has `Models` of its own (`cluster/served_models.py`)

Everything here blocks, or belongs to the engine's loop; `service.py` decides what is called when.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.steps import TargetRows
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.data import ImagesConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import GeneratorConfig, LoraConfig, OptimizerConfig
from skyrl_train.data.sources import ImageReading
from skyrl_train.errors import EngineError, NonFiniteError, SaveError
from skyrl_train.images import ImageSpans
from skyrl_train.inference import EngineSettings, HFEngine, ScoredSequence, load_for_engine
from skyrl_train.learner import AdamWStep, AdapterLearners, AdapterPass, RowLossLearner, TokenLosses, read_model
from skyrl_train.model import empty_causal_lm, load_tokenizer
from skyrl_train.model.files import export_model
from skyrl_train.model.sizes import read_config
from skyrl_train.serve.examples import loss_of, rows_of
from skyrl_train.serve.images import RequestImages, served_images
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import ForwardBackward, forward_backward_output
from skyrl_train.system import WorkerThread
from skyrl_train.system.files import make_folder, sync_folder
from skyrl_train.telemetry import to_values
from skyrl_train.types import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.inference.vllm import VLLMEngine

ALPHA = 32.0
"""Of every adapter, whatever its rank, as the hosted service has it."""
MAX_RANK = 256
"""Of an adapter, whatever samples from it."""
_ADAPTERS_IN_ENGINE = 16
_RANK_IN_VLLM = 64
"""Of adapters that vLLM makes room for, all of them at once, unless `model.lora.rank` says more."""
_GATHER_S = 0.005
"""How long the engine waits for another request before it begins a batch."""
_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a model is beside its base, as it is journaled and as a checkpoint states it."""

    rank: int
    """Of its adapter; 0 for a model of which all weights are trained."""
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    base: str = ""
    """Its base, as `Bases.recorded` has it."""

    def line(self) -> dict[str, Any]:
        """Return what is journaled: nothing of a base that has no name."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained, rather than an adapter."""
        return self.rank == 0

    @property
    def shape(self) -> tuple[int, bool, bool]:
        """What models have in common whose tensors fit one another."""
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


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is sampled from."""

    folder: Path
    facts: ModelFacts

    @property
    def name(self) -> str:
        """What engines call it."""
        return f"s{'-'.join(self.folder.parts[-3:])}"


class Sampled(ABC):
    """Weights that answer requests."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the answer to a request, of which the seed decides. Raises EngineError."""

    @abstractmethod
    async def score(
        self, tokens: Sequence[int], *, top_k: int = 0, targets: NDArray[np.int64] | None = None, spans: ImageSpans = ()
    ) -> ScoredSequence:
        """As `HFEngine.score`."""


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """What a base is, for who checks what is asked of it."""

    architecture: str
    vocabulary: int
    max_length: int
    """Tokens of a context."""
    full_bytes: int
    """What is taken where all weights are trained: they, their gradients and AdamW's two averages, in float32."""
    is_deterministic: bool
    max_rank: int = MAX_RANK
    """Of an adapter."""


class ServedModels(ABC):
    """A base model, the adapters on it, and the base's own samples. All but `sampled_from` blocks."""

    about: BaseFacts
    tokenizer: Any
    images: ImageReading | None = None
    """How the model reads images; None where it takes none."""

    @abstractmethod
    def create(self, name: str, facts: ModelFacts) -> None:
        """Make a model's learner and its optimizer, if they are not there. Raises ModelError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget a model's learner, its optimizer and what they hold on the device, if it is there."""

    @abstractmethod
    def has_gradient(self, name: str) -> bool:
        """Whether something was added to an adapter's gradient since its last step."""

    @abstractmethod
    def forward_backward(self, name: str, rows: Rows) -> bytes:
        """Return the message of a pass, whose gradient is accumulated where there is one. Raises NonFiniteError."""

    @abstractmethod
    def together(self, asked: Mapping[str, Rows]) -> dict[str, bytes]:
        """Return the messages of passes of several adapters, computed as one pass; all have rows, and gradients, or none of
        them. Of adapters that are not in what it returns, and of all where it raises, the gradients are what they were."""

    @abstractmethod
    def optim_step(self, name: str, step: AdamWStep) -> Mapping[str, float]:
        """Step, and return the norm of the gradient before clipping. Raises NonFiniteError, with the gradient dropped."""

    @abstractmethod
    def save(self, name: str, folder: Path, *, with_optimizer: bool) -> int:
        """Write the adapter, or all weights, into a new folder, there whole or not at all; returns its bytes. Raises
        SaveError."""

    @abstractmethod
    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """Take the state of a folder, and drop a gradient. Raises CheckpointError."""

    @abstractmethod
    def export(self, saved: Path, folder: Path) -> None:
        """Write all weights that were saved, as `from_pretrained` reads them. Raises CheckpointError, ModelError."""

    @abstractmethod
    def sampled_from(self, saved: Saved | None) -> AbstractAsyncContextManager[Sampled]:
        """Within it, what answers with a checkpoint, or with the base where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Raises DeadlineError."""

    def take_lost(self) -> frozenset[str]:
        """Return the models that were lost with a worker since the last time; none in one process."""
        return frozenset()

    def rows(self, request: ForwardBackward, images: RequestImages | None = None) -> Rows:
        """Return what a pass computes. `images`: of passes that are held beside it. Raises Refused, BatchError."""
        loss = loss_of(request.loss, request.config)
        about, images = self.about, images or RequestImages(self.images)
        found = rows_of(request, vocabulary=about.vocabulary, max_length=about.max_length, images=images)
        return Rows(of_targets=found, loss=loss, backward=request.backward)


class Bases:
    """The base models of a server, by the names that clients know them by."""

    def __init__(self, by_name: Mapping[str, ServedModels]) -> None:
        """The first is the one of whatever was recorded without a name."""
        self.by_name, self._first = by_name, next(iter(by_name))

    def recorded(self, name: object) -> str:
        """Return how a base is recorded that a client names: without a name where it is the only one, which may be renamed.
        Raises Refused for one that is not served."""
        if str(name) not in self.by_name:
            served = ", ".join(map(repr, self.by_name))
            raise Refused(f"base_model {str(name)[:100]!r} is not served here; {served} is", status=404)
        return str(name) if len(self.by_name) > 1 else ""

    def name(self, recorded: str) -> str:
        """Return the name of a base that was recorded."""
        return recorded or self._first

    def of(self, recorded: str) -> ServedModels:
        """Return a base that was recorded. Raises Refused for one that this server was started without."""
        found = self.by_name.get(self.name(recorded))
        if found is None:
            message = (
                f"its base model {recorded!r} is not served at present; the server has to be started with it (--also)"
            )
            raise Refused(message, status=503, category="server")
        return found

    def require_same(self, path: str, one: str, other: str) -> None:
        """Raises Refused where a checkpoint at `path`, of the base `one`, would be loaded into a model of another."""
        if self.name(one) != self.name(other):
            message = f"{path} is of base_model {self.name(one)!r}, and fits no model of {self.name(other)!r}"
            raise Refused(message)


class Models(ServedModels):
    """They, in this process."""

    def __init__(
        self, settings: LearnerSettings, generator: GeneratorConfig, images: ImagesConfig | None = None
    ) -> None:
        """Load them. `images`: what bounds those that clients send. Raises ModelError, EngineError."""
        self._settings, self._generator = settings, generator
        self.learners = AdapterLearners(settings)
        self._base_weights = self.learners.base_weights()
        self._trained: dict[str, RowLossLearner] = {}
        self.tokenizer = load_tokenizer(settings.model)
        self.images = served_images(settings, images or ImagesConfig())
        self.engine = self._new_engine()
        self.engine.share_weights(self._base_weights)
        max_rank = MAX_RANK if generator.backend == "hf" else max(settings.model.lora.rank, _RANK_IN_VLLM)
        self._sampler = None if generator.backend == "hf" else self._new_sampler(max_rank)
        self._full_engine = _FullEngine()
        architecture = read_config(settings.model.path, revision=settings.model.revision)
        text = self.learners.model.config.get_text_config()
        self.about = BaseFacts(
            architecture=str(architecture.get("model_type", "unknown")),
            vocabulary=int(text.vocab_size),
            max_length=int(getattr(text, "max_position_embeddings", 0) or generator.max_context_length),
            full_bytes=sum(16 * weight.numel() for weight in self._base_weights.values()),
            is_deterministic=settings.deterministic,
            max_rank=max_rank,
        )
        self._in_engine: OrderedDict[str, None] = OrderedDict()
        self._in_use: dict[str, int] = {}
        self._loading = asyncio.Lock()

    def create(self, name: str, facts: ModelFacts) -> None:
        """Make it on the device, beside the others."""
        if name in self._trained:
            return
        optimizer = OptimizerConfig(name="adamw")
        if facts.is_full:
            self._trained[name] = self.learners.create_full(name, optimizer)
        else:
            lora = self._lora(facts)
            self._trained[name] = self.learners.create(name, lora, seed=facts.seed, optimizer=optimizer)

    def remove(self, name: str) -> None:
        """Forget it, and what it holds on the device."""
        if self._trained.pop(name, None) is not None:
            self.learners.remove(name)

    def has_gradient(self, name: str) -> bool:
        """Whether its learner is here, and has one."""
        return name in self._trained and self._trained[name].engine.has_gradient

    def forward_backward(self, name: str, rows: Rows) -> bytes:
        """Compute the pass; one without rows has the message of an empty one."""
        batch, zero = rows.of_targets.batch, torch.zeros(0, dtype=torch.float64)
        if batch is None:
            return rows.message(TokenLosses(logprobs=zero, losses=zero))
        return rows.message(self._trained[name].forward_losses(batch, [rows.loss], backward=rows.backward))

    def together(self, asked: Mapping[str, Rows]) -> dict[str, bytes]:
        """Compute all of them, or none: raises what one of them would."""
        backward = any(rows.backward for rows in asked.values())
        passes = {
            name: AdapterPass(batch=rows.of_targets.batch, loss=rows.loss)
            for name, rows in asked.items()
            if rows.of_targets.batch is not None
        }
        found = self.learners.forward_losses(passes, backward=backward)
        return {name: rows.message(found[name]) for name, rows in asked.items()}

    def optim_step(self, name: str, step: AdamWStep) -> Mapping[str, float]:
        """Step with the settings that the client sent."""
        metrics = to_values(self._trained[name].optim_step(step))
        return {f"{key.rpartition('/')[2]}:mean": value for key, value in metrics.items()}

    def save(self, name: str, folder: Path, *, with_optimizer: bool) -> int:
        """Write beside `folder`, and rename."""
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
        """Read what `save` wrote."""
        self._trained[name].load(folder, with_optimizer=with_optimizer)

    @asynccontextmanager
    async def sampled_from(self, saved: Saved | None) -> AsyncIterator[Sampled]:
        """One engine answers with the base and with adapters, another one with all weights of a checkpoint. vLLM, where it
        is asked for, samples in the place of the first, which scores what is given."""
        if saved is None:
            yield _InEngine(self.engine, sampler=self._sampler)
        elif saved.facts.is_full:
            async with self.full_weights(saved.folder) as engine:
                yield _InEngine(engine)
        else:
            await self.adapter_for(saved.name, saved.folder, saved.facts)
            try:
                yield _InEngine(self.engine, saved.name, sampler=self._sampler)
            finally:
                self.release(saved.name)

    async def adapter_for(self, sampler: str, folder: Path, facts: ModelFacts) -> None:
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

    async def _take(self, sampler: str, folder: Path, facts: ModelFacts, wanted: list[str]) -> None:
        """`wanted` is empty when nobody waits for it any more, and it is not loaded, or not held, then."""
        async with self._loading:
            if wanted and sampler not in self._in_engine:
                idle = [each for each in self._in_engine if not self._in_use.get(each)]
                for each in idle[: max(0, len(self._in_engine) - _ADAPTERS_IN_ENGINE + 1)]:
                    del self._in_engine[each]
                    await asyncio.to_thread(self._unload, each)
                await asyncio.to_thread(self._load, sampler, folder, self._lora(facts))
                self._in_engine[sampler] = None
            if wanted:
                self._in_engine.move_to_end(sampler)
                self._in_use[sampler] = self._in_use.get(sampler, 0) + 1

    def _load(self, name: str, folder: Path, lora: LoraConfig) -> None:
        tensors = read_model(folder)
        self.engine.load_adapter(name, lora, tensors)
        if self._sampler is not None:
            try:
                self._sampler.load_adapter(name, lora, tensors)
            except EngineError:
                self.engine.unload_adapter(name)
                raise

    def _unload(self, name: str) -> None:
        self.engine.unload_adapter(name)
        if self._sampler is not None:
            self._sampler.unload_adapter(name)

    def release(self, sampler: str) -> None:
        """Tell that one user of `adapter_for` is done."""
        self._in_use[sampler] -= 1
        if not self._in_use[sampler]:
            del self._in_use[sampler]

    @asynccontextmanager
    async def full_weights(self, folder: Path) -> AsyncIterator[HFEngine]:
        """Within it, the engine that is given answers with all weights that were saved in `folder`."""

        def loaded(engine: HFEngine | None) -> HFEngine:
            made = engine or self._new_engine()
            saved = self._all_weights(folder)
            made.load_weights({name: saved[name] for name in self._base_weights}.items(), version=0)
            return made

        async with self._full_engine.holding(folder, loaded) as engine:
            yield engine

    def export(self, saved: Path, folder: Path) -> None:
        """Write them with the base's configuration and tokenizer."""
        model = self._settings.model
        export_model(folder, empty_causal_lm(model), self._all_weights(saved), model)

    def close(self) -> None:
        """End all engines."""
        if self._sampler is not None:
            self._sampler.close()
        self._full_engine.close()
        self.engine.close()

    def _all_weights(self, saved: Path) -> dict[str, Tensor]:
        """What was saved, and the base's own parameters where some stayed frozen (`model.freeze`)."""
        return {**{name: weight.detach() for name, weight in self._base_weights.items()}, **read_model(saved)}

    def _new_engine(self) -> HFEngine:
        settings = self._settings
        return HFEngine(
            load_for_engine(settings.model, settings.platform.device),
            self.tokenizer,
            max_batch_size=1 if settings.deterministic else self._generator.max_batch_size,
            gather_s=0.0 if settings.deterministic else _GATHER_S,
        )

    def _new_sampler(self, max_rank: int) -> VLLMEngine:
        from skyrl_train.inference.vllm import VLLMEngine

        settings, generator = self._settings, self._generator
        # Requests have temperatures of their own, at which vLLM tells log-probabilities where the engine's is not 1.
        generator = replace(
            generator,
            vllm=replace(generator.vllm, lora_sync="adapter"),
            sampling=replace(generator.sampling, temperature=0.5),
        )
        of_engine = EngineSettings(
            model=replace(settings.model, lora=LoraConfig(rank=max_rank, alpha=ALPHA)),
            generator=generator,
            platform=settings.platform,
            seed=settings.seed,
            deterministic=settings.deterministic,
            num_adapters=_ADAPTERS_IN_ENGINE,
        )
        return VLLMEngine(of_engine)

    def _lora(self, facts: ModelFacts) -> LoraConfig:
        targets = self.learners.targets(attention=facts.train_attn, mlp=facts.train_mlp)
        return LoraConfig(rank=facts.rank, alpha=ALPHA, targets=targets)


@dataclass(frozen=True)
class _InEngine(Sampled):
    engine: HFEngine
    adapter: str = ""
    sampler: VLLMEngine | None = None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await (self.sampler or self.engine).generate(replace(request, adapter=self.adapter))

    async def score(
        self, tokens: Sequence[int], *, top_k: int = 0, targets: NDArray[np.int64] | None = None, spans: ImageSpans = ()
    ) -> ScoredSequence:
        return await self.engine.score(tokens, adapter=self.adapter, top_k=top_k, targets=targets, spans=spans)


class _FullEngine:
    """An engine, made when it is first asked for, that holds all weights of one checkpoint at a time. On one event loop."""

    def __init__(self) -> None:
        self._engine: HFEngine | None = None
        self._held: Path | None = None
        self._turn, self._num_users, self._changed = asyncio.Lock(), 0, asyncio.Condition()
        self._thread = WorkerThread("full-engine")
        """Loads one after the other: of one that nobody waits for any more it is not known when it ends."""

    @asynccontextmanager
    async def holding(self, folder: Path, load: Callable[[HFEngine | None], HFEngine]) -> AsyncIterator[HFEngine]:
        """Within it, the engine that is given has what `load` gave it; others wait for it in the order of asking."""
        async with self._turn:
            if self._held != folder:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._num_users)
                self._held = None
                await asyncio.get_running_loop().run_in_executor(self._thread, self._load, load)
                self._held = folder
            assert self._engine is not None, "it was loaded"
            self._num_users += 1
        try:
            yield self._engine
        finally:
            self._num_users -= 1
            async with self._changed:
                self._changed.notify_all()

    def _load(self, load: Callable[[HFEngine | None], HFEngine]) -> None:
        self._engine = load(self._engine)

    def close(self) -> None:
        """Raises DeadlineError."""
        self._thread.close(_CLOSE_TIMEOUT_S)
        if self._engine is not None:
            self._engine.close()
