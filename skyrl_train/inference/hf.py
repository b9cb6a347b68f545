"""`HFEngine`: a Hugging Face model in this process, generating in waves.

Requests gather until each leased trajectory waits for tokens or has ended; then all that wait are generated, in batches
of at most `max_batch_size`, sorted, so that the batches (and with them the last bits of every number) are the same on
every run. Price of that order: a slow environment delays its wave. The forward passes run on a thread of their own; the
event loop stays free for environments.

New weights wait for the batch that is being generated, or come between two of its tokens (`in_flight_cache`).

Beside its own weights it may have adapters, which come and go while it answers; a batch may be of several of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.errors import DeadlineError, EngineError, ModelError
from skyrl_train.images import ImageSpans
from skyrl_train.inference.decode import Decoder, Response
from skyrl_train.inference.grouped_attention import use_grouped_attention
from skyrl_train.inference.kv_cache import num_attention_layers
from skyrl_train.inference.scoring import ScoredSequence, score_sequence
from skyrl_train.inference.settings import EngineSettings
from skyrl_train.model import load_causal_lm
from skyrl_train.model.layers import weight_dtype
from skyrl_train.model.lora import adapter_slots, adapter_tensors, adapters_at, add_adapter, remove_adapter, runs_of
from skyrl_train.model.parallel import record_routing
from skyrl_train.model.vision import shown, shown_prompts
from skyrl_train.rollout import listener
from skyrl_train.system import WorkerThread, return_free_memory
from skyrl_train.telemetry import TellsWhenBusy
from skyrl_train.types import GenerationOutput, GenerationRequest, Tokenizer
from skyrl_train.weight_sync import Rounding, rounded

CLOSE_TIMEOUT_S = 30.0
"""For the batch that is being generated when the engine is closed."""


class _Waiting:
    """A request and the future that its asker awaits."""

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.listener = listener()
        self.future: asyncio.Future[GenerationOutput] = loop.create_future()

    @property
    def order(self) -> tuple[str, int, str]:
        return self.request.adapter, len(self.request.prompt_token_ids), self.request.request_id

    def fail(self, error: EngineError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def succeed(self, response: Response) -> None:
        if not self.future.done():
            self.future.set_result(
                GenerationOutput(
                    token_ids=response.token_ids,
                    logprobs=response.logprobs,
                    stop_reason=response.stop_reason,
                    weight_versions=response.weight_versions,
                    routed_experts=response.routed_experts,
                )
            )


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """An adapter of the model, whose tensors may be exchanged for those of another of the same shape: to add one to the
    layers and to take it from them costs many times what copying does."""

    name: str
    lora: LoraConfig
    tensors: Mapping[str, Tensor]


class HFEngine(TellsWhenBusy):
    """Implements `InferenceEngine`. Use from one event loop at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        max_batch_size: int,
        gather_s: float = 0.0,
        weight_version: int = -1,
        in_flight_cache: Literal["recompute", "keep"] | None = None,
        rounding: Rounding = "none",
    ) -> None:
        """
        Args:
            model: Owned by the engine from here on; `load_weights` writes into it.
            tokenizer: Gives the end-of-sequence and padding tokens, and text where stop strings are used.
            max_batch_size: Sequences generated together.
            gather_s: Seconds to wait for another request before a batch is begun, where requests come over a network.
            weight_version: Version of the weights that the model has now.
            in_flight_cache: As of `EngineSettings`.
            rounding: What weights are rounded to as they are loaded; the model's first ones are as they are.
        """
        self._model = model.requires_grad_(False)
        self._model.train(False)
        eos_token_ids = _eos_token_ids(model, tokenizer)
        pad_token_id = tokenizer.pad_token_id
        self._decoder = Decoder(
            model,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id if pad_token_id is not None else min(eos_token_ids, default=0),
            decode_text=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
            keeps_older_cache=in_flight_cache == "keep",
        )
        self._takes_in_flight = in_flight_cache is not None
        self._rounding: Rounding = rounding
        self._max_batch_size, self._gather_s = max_batch_size, gather_s
        self._weight_version = weight_version
        self._num_leases = 0
        self._fresh_start = False
        self._waiting: dict[_Waiting, None] = {}
        self._generating = False
        self._wave: asyncio.Task[None] | None = None
        self._weights_lock = threading.Lock()
        """Held while the model computes, and while its weights change."""
        self._turn_lock = threading.Lock()
        """Taken before the other one by whoever waits for it, so that an update comes before the next batch, or token."""
        self._executor = WorkerThread("hf-engine")
        self._closed = False
        self._slots: dict[str, _Slot] = {}
        """By an adapter's name: where the model holds it."""
        self._free: _Slot | None = None
        """What the last adapter that was unloaded leaves."""
        self._gone: set[str] = set()
        """Adapters that were unloaded, of which the decoder may still keep keys."""
        self._num_slots = 0

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Announces a trajectory. Enter and leave on the event loop's thread."""
        # A rollout starts from nothing, whatever was generated before it: a resumed run must give the same.
        self._fresh_start = self._fresh_start or self._num_leases == 0
        self._num_leases += 1
        try:
            yield
        finally:
            self._num_leases -= 1
            if not self._num_leases and not self._generating:
                self._decoder.forget()  # no turn follows: the learner has the memory
            self._start_wave_if_due()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError where the model breaks, or the request cannot be answered."""
        if self._closed:
            raise EngineError("the engine is closed")
        if not request.prompt_token_ids:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if request.sampling.max_generate_length < 1:
            raise EngineError(f"request {request.request_id} asks for no tokens")
        self._require_adapter(request.adapter)
        waiting = _Waiting(request, asyncio.get_running_loop())
        self._waiting[waiting] = None
        self._start_wave_if_due()
        try:
            return await waiting.future
        finally:
            self._waiting.pop(waiting, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes all weights, or none: names and shapes are checked before the first is copied.

        Waits for the batch, or the token, that is being generated; what comes after that waits for it. Raises EngineError
        naming what is missing, unknown or misshapen.
        """
        given = dict(weights)
        own = dict(self._model.named_parameters(remove_duplicate=False))
        required = dict(self._model.named_parameters())
        problems = [f"missing {name}" for name in required if name not in given]
        problems += [f"unknown {name}" for name in given if name not in own]
        problems += [
            f"{name} has shape {tuple(tensor.shape)} instead of {tuple(own[name].shape)}"
            for name, tensor in given.items()
            if name in own and tensor.shape != own[name].shape
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise EngineError(f"weights of another model; nothing was loaded: {'; '.join(problems[:5])}{more}")
        with self._turn_lock, self._weights_lock, torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(rounded(name, tensor, self._rounding))
            self._weight_version = version
            self._decoder.forget()

    def share_weights(self, weights: Mapping[str, Tensor]) -> int:
        """Has parameters lie where those of another model do that never change, under their Hugging Face names, as far as
        types and devices agree, so that both take the memory of one; the others are copied. To be called before the first
        request. Returns the bytes that are shared. Raises EngineError for weights of another model."""
        shared = 0
        for name, own in self._model.named_parameters():
            if name not in weights or weights[name].shape != own.shape:
                raise EngineError(f"weights of another model: {name} is missing or of another shape")
            if weights[name].dtype == own.dtype and weights[name].device == own.device:
                own.data = weights[name].detach()
                shared += own.nbytes
            else:
                own.data.copy_(weights[name].detach())
        return shared

    def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Takes an adapter beside the others; requests name it. It stays as it is until it is unloaded.

        Args:
            name: A new one.
            lora: Its rank and the layers that it adapts, spelled out.
            tensors: As `AdapterLearners.tensors` gives them; they are copied.

        Waits as `load_weights` unless it has the shape of the last that was unloaded: then nothing that computes reads
        where it goes. Raises EngineError where they do not fit.
        """
        free, self._free = self._free, None
        slot = free if free is not None and free.lora == lora else self._new_slot(lora, instead_of=free)
        own = slot.tensors
        if own.keys() != tensors.keys() or any(own[key].shape != each.shape for key, each in tensors.items()):
            self._free = slot
            raise EngineError(
                f"adapter {name!r}: its tensors are not those of rank {lora.rank} on {len(lora.targets)} layers"
            )
        with torch.no_grad():
            for key, tensor in tensors.items():
                own[key].copy_(tensor)
        self._slots[name] = slot
        adapter_slots(self._model)[name] = slot.name

    def _new_slot(self, lora: LoraConfig, *, instead_of: _Slot | None) -> _Slot:
        """Have the model hold another adapter of this shape."""
        self._num_slots += 1
        slot = f"slot{self._num_slots}"
        with self._turn_lock, self._weights_lock:
            if instead_of is not None:
                remove_adapter(self._model, instead_of.name)
            add_adapter(self._model, lora, seed=0, name=slot)
            self._model.requires_grad_(False)
            return _Slot(name=slot, lora=lora, tensors=adapter_tensors(self._model, slot))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; one that comes after it takes its memory. Waits as `load_weights` where two have gone."""
        if (slot := self._slots.pop(name, None)) is None:
            return
        del adapter_slots(self._model)[name]
        self._gone.add(name)
        if self._weights_lock.acquire(
            blocking=False
        ):  # else the running batch does it, which may still keep keys of it
            try:
                self._forget_gone()
            finally:
                self._weights_lock.release()
        before, self._free = self._free, slot
        if before is not None:
            with self._turn_lock, self._weights_lock:
                remove_adapter(self._model, before.name)

    def _forget_gone(self) -> None:
        while self._gone:
            self._decoder.forget(self._gone.pop())

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str = "",
        top_k: int = 0,
        targets: NDArray[np.int64] | None = None,
        spans: ImageSpans = (),
    ) -> ScoredSequence:
        """Return log-probabilities of given tokens, at temperature 1, each after those before it, as `score_sequence` does;
        `spans`: images among them. Raises EngineError."""

        def computed() -> ScoredSequence:
            with self._turn_lock:
                self._weights_lock.acquire()
            try:
                self._require_adapter(adapter)  # it may have gone meanwhile
                count = len(token_ids)
                given = shown_prompts(self._model, [(count, 0, spans)], width=count, device=self._model.device)
                with shown(self._model, given), adapters_at(self._model, {count: runs_of([adapter], [count])}):
                    return score_sequence(self._model, token_ids, top_k=top_k, targets=targets)
            finally:
                self._weights_lock.release()

        if self._closed:
            raise EngineError("the engine is closed")
        self._require_adapter(adapter)
        return await asyncio.get_running_loop().run_in_executor(self._executor, computed)

    def close(self) -> None:
        """Ends the thread after the batch that is being generated; what still waits gets an EngineError. Idempotent.

        Raises DeadlineError where that batch does not end within CLOSE_TIMEOUT_S; it is left to end with the process.
        """
        self._closed = True
        for waiting in list(self._waiting):
            loop = waiting.future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(waiting.fail, EngineError("the engine was closed"))
        if not self._executor.close(CLOSE_TIMEOUT_S):
            raise DeadlineError("closing the engine: its forward pass", CLOSE_TIMEOUT_S)

    def _start_wave_if_due(self) -> None:
        if self._generating or not self._waiting or len(self._waiting) < self._num_leases:
            return
        loop = next(iter(self._waiting)).future.get_loop()
        if not loop.is_closed():
            self._generating = True
            self._wave = loop.create_task(self._run_wave())

    async def _run_wave(self) -> None:
        try:
            # Whoever asks in the same turn of the loop joins, or while others do.
            await asyncio.sleep(0)
            count = 0
            while self._gather_s and len(self._waiting) != count:
                count = len(self._waiting)
                await asyncio.sleep(self._gather_s)
            if len(self._waiting) < self._num_leases:
                return
            wave = sorted(self._waiting, key=lambda waiting: waiting.order)
            self._waiting.clear()
            self.on_busy(True)
            batches = [
                wave[start : start + self._max_batch_size] for start in range(0, len(wave), self._max_batch_size)
            ]
            for number, batch in enumerate(batches):
                await self._run_batch(batch, begins_wave=number == 0)
        finally:
            self.on_busy(False)
            self._generating = False
            self._start_wave_if_due()

    async def _run_batch(self, batch: list[_Waiting], *, begins_wave: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            responses = await loop.run_in_executor(self._executor, self._generate, batch, begins_wave)
        except Exception as error:
            broken = EngineError(f"generation failed: {type(error).__name__}: {error}")
            broken.__cause__ = error
            for waiting in batch:
                waiting.fail(broken)
            return
        for waiting, response in zip(batch, responses):
            if response is None:
                waiting.fail(_without_adapter(waiting.request.adapter))
            else:
                waiting.succeed(response)

    def _generate(self, batch: list[_Waiting], begins_wave: bool) -> list[Response | None]:
        """On the engine's thread. Stops early once nobody waits any more. None for a request whose adapter has gone
        meanwhile."""
        with self._turn_lock:
            self._weights_lock.acquire()
        try:
            if self._fresh_start:
                self._fresh_start = False
                self._decoder.forget()
            if begins_wave:
                self._decoder.start_wave()
            here = [waiting for waiting in batch if self._has_adapter(waiting.request.adapter)]
            if not here:
                return [None] * len(batch)
            responses = self._decoder.run(
                [waiting.request for waiting in here],
                wanted=lambda: not all(waiting.future.done() for waiting in here),
                version=self._version_between_tokens,
                listeners=[waiting.listener for waiting in here],
            )
            found = dict(zip(here, responses))
            return [found.get(waiting) for waiting in batch]
        finally:
            self._forget_gone()
            self._weights_lock.release()
            return_free_memory()  # between kept keys lie holes that no larger tensor fits in

    def _has_adapter(self, name: str) -> bool:
        return not name or name in self._slots

    def _require_adapter(self, name: str) -> None:
        if not self._has_adapter(name):
            raise _without_adapter(name)

    def _version_between_tokens(self) -> int:
        """The version of the weights, after an update that waits for them, where one may come now."""
        if self._takes_in_flight:
            self._weights_lock.release()
            with self._turn_lock:
                self._weights_lock.acquire()
        return self._weight_version


def build_hf_engine(settings: EngineSettings, tokenizer: Tokenizer) -> HFEngine:
    """Load the model and return its engine. Raises ModelError where the model cannot record routing or cannot be loaded."""
    model = load_for_engine(settings.model, settings.device)
    if settings.records_routing:
        if num_attention_layers(model) is None:
            raise ModelError(
                f"model path {settings.model.path!r}: generator=hf records routing of models with attention layers alone. "
                "Set trainer.moe_routing_replay=false"
            )
        record_routing(model, name=settings.model.path)
    return HFEngine(
        model,
        tokenizer,
        max_batch_size=settings.generator.max_batch_size,
        in_flight_cache=settings.in_flight_cache,
        rounding=settings.rounding,
    )


def load_for_engine(model: ModelConfig, device: str) -> PreTrainedModel:
    """The model of an engine, which is given whole weights and trains none. Raises ModelError."""
    whole = replace(model, quantization="none")
    loaded = load_causal_lm(whole, device, dtype=weight_dtype(whole, frozen=True))
    use_grouped_attention(loaded)
    return loaded


def _without_adapter(name: str) -> EngineError:
    return EngineError(f"the engine has no adapter {name!r}")


def _eos_token_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Every token that ends a response, by the model's generation config and by the tokenizer."""
    config = getattr(model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id} | (set(listed) if isinstance(listed, (list, tuple)) else {listed})
    return frozenset(int(token_id) for token_id in ids if token_id is not None)
