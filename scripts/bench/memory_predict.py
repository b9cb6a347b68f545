"""One pass of the real engine under the counting meter, and what was predicted for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from skyrl_train.learner.memory import MemorySettings, Phase, memory_facts, predict, resident_bytes
from skyrl_train.learner.memory_facts import facts_of_model
from torch import nn

from skyrl_train.batch.microbatch import make_micro_batch_strategy
from skyrl_train.batch.minibatch import close_mini_batch
from skyrl_train.batch.training_batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.schema import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.memory.meter import CountingMeter
from skyrl_train.model.lora import add_adapter

Role = Literal["policy", "reference", "critic"]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Of a random model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool = True
    family: str = "qwen2"


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A model, its settings and the rows of one micro-batch."""

    name: str
    size: ModelSize
    lengths: tuple[int, ...]
    role: Role = "policy"
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    eager: bool = False
    lora_rank: int = 0
    layout: Literal["padded", "packed"] = "padded"

    @property
    def positions(self) -> int:
        return sum(self.lengths) if self.layout == "packed" else len(self.lengths) * max(self.lengths)


@dataclass(frozen=True, kw_only=True)
class PassError:
    """Counted and predicted."""

    phase: Phase
    counted_bytes: int
    predicted_bytes: int
    resident_bytes: int
    """What lies there all the time, counted."""

    @property
    def error(self) -> float:
        """Relative, of the whole."""
        return self.predicted_bytes / self.counted_bytes - 1

    @property
    def growing_error(self) -> float:
        """Relative, of what the micro-batch adds."""
        return (self.predicted_bytes - self.resident_bytes) / (self.counted_bytes - self.resident_bytes) - 1


SIZES = (
    ModelSize(name="1M", hidden=192, layers=2, heads=6, kv_heads=6, inner=512, vocabulary=492),
    ModelSize(name="14M", hidden=320, layers=8, heads=10, kv_heads=2, inner=864, vocabulary=8192),
    ModelSize(name="60M", hidden=512, layers=10, heads=8, kv_heads=2, inner=2752, vocabulary=8000, tied=False),
)
SHAPES = ((1, 32), (1, 128), (1, 512), (2, 64), (2, 256), (3, 100), (4, 128), (6, 48), (8, 64), (12, 32))
_MIXED = (200, 160, 90, 40, 17)
_MID = SIZES[1]
_BASE = MemoryCase(name="policy", size=_MID, lengths=_MIXED)
VARIANTS = (
    replace(_BASE, name="float32"),
    replace(_BASE, name="bfloat16", dtype="bfloat16"),
    replace(_BASE, name="checkpointing", checkpointing=True),
    replace(_BASE, name="bfloat16, checkpointing", dtype="bfloat16", checkpointing=True),
    replace(_BASE, name="packed", layout="packed"),
    replace(_BASE, name="packed, bfloat16", layout="packed", dtype="bfloat16"),
    replace(_BASE, name="eager attention", eager=True),
    replace(_BASE, name="adapter of rank 8", lora_rank=8),
    replace(_BASE, name="adapter, bfloat16, checkpointing", lora_rank=8, dtype="bfloat16", checkpointing=True),
    replace(_BASE, name="critic", role="critic"),
    replace(_BASE, name="critic, bfloat16, checkpointing", role="critic", dtype="bfloat16", checkpointing=True),
    replace(_BASE, name="reference", role="reference"),
    replace(_BASE, name="reference, bfloat16", role="reference", dtype="bfloat16"),
    replace(_BASE, name="llama", size=replace(_MID, family="llama")),
    replace(_BASE, name="qwen3, bfloat16", size=replace(_MID, family="qwen3"), dtype="bfloat16"),
)


def sizes_cases(size: ModelSize) -> Iterator[MemoryCase]:
    """The ten shapes."""
    for rows, length in SHAPES:
        yield MemoryCase(name=size.name, size=size, lengths=(length,) * rows)


def measure(case: MemoryCase) -> Iterator[PassError]:
    """Training, where the role is trained, and scoring."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(case)
    sizes = facts_of_model(model)
    learner = _learner(case, model)
    settings = MemorySettings(
        dtype=case.dtype,
        checkpointing=case.checkpointing,
        eager=case.eager and case.layout == "padded",
        optimizer="none" if case.role == "reference" else "adamw",
        lora_rank=case.lora_rank,
        head="values" if case.role == "critic" else "logprobs",
        accelerator=False,
    )
    facts = memory_facts(sizes, settings)
    batch = rows_of_lengths(case.lengths, vocabulary=case.size.vocabulary)
    phases: tuple[Phase, ...] = ("scoring",) if case.role == "reference" else ("training", "scoring")
    for phase in phases:
        meter = CountingMeter(1 << 62)
        _prepare(learner.engine, training=phase == "training")
        meter.adopt(tensors_of(learner.engine))
        resident = meter.in_use_bytes()
        meter.reset_peak()
        closed = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64)
        with meter.counting():
            if phase == "training":
                learner.forward_backward(closed)
            else:
                learner.forward(batch)
        estimate = predict(facts, phase, len(case.lengths), max(case.lengths), case.positions)
        expected = sum(resident_bytes(facts, training=phase == "training").values())
        if abs(expected - resident) > max(0.01 * resident, 20_000):
            raise SystemExit(f"{case}: {resident} bytes lie there all the time, {expected} were predicted")
        yield PassError(
            phase=phase,
            counted_bytes=meter.peak_bytes(),
            predicted_bytes=estimate.peak_bytes,
            resident_bytes=resident,
        )


def rows_of_lengths(lengths: tuple[int, ...], *, vocabulary: int) -> TrainingInputBatch:
    """Every token but a row's first is trained; all columns that any loss reads."""
    batch = batch_of_lengths(list(lengths))
    tokens = batch.num_tokens
    first = torch.zeros(tokens, dtype=torch.bool)
    first[batch.row_offsets[:-1]] = True
    numbers = {
        name: torch.full((tokens,), -1.0)
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "values", "returns")
    }
    ids = torch.randint(vocabulary, (tokens,)).int()
    return batch.with_columns(input_ids=ids, loss_mask=~first, **numbers)


def tensors_of(engine: ModelEngine) -> Iterator[torch.Tensor]:
    """What lies there all the time."""
    yield from engine.model.parameters()
    yield from engine.model.buffers()
    yield from (parameter.grad for parameter in engine.parameters.values() if parameter.grad is not None)
    if engine._optimizer is not None:
        for state in engine._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _prepare(engine: ModelEngine, *, training: bool) -> None:
    """Optimizer state, and gradients where a pass adds to them."""
    if engine._optimizer is not None and not engine._optimizer.state:
        _zero_gradients(engine)
        engine._optimizer.step()
    engine.zero_grad()
    if training:
        _zero_gradients(engine)


def _zero_gradients(engine: ModelEngine) -> None:
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)


def _model(case: MemoryCase) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    size = case.size
    config = AutoConfig.for_model(
        size.family,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.inner,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.tied,
        max_position_embeddings=4096,
    )
    attention = "eager" if case.eager else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def _learner(case: MemoryCase, model: Any) -> PolicyLearner | CriticLearner:
    if case.role == "critic":
        del model.lm_head
        model.score = nn.Linear(case.size.hidden, 1)
    if case.lora_rank:
        add_adapter(model, LoraConfig(rank=case.lora_rank), seed=0)
    if case.checkpointing:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    one_micro_batch = TrainerConfig(micro_train_batch_size_per_gpu=10**6, micro_forward_batch_size_per_gpu=10**6)
    engine = ModelEngine(
        model,
        name=case.role,
        micro_batching=make_micro_batch_strategy(one_micro_batch),
        optimizer=None if case.role == "reference" else OptimizerConfig(lr=1e-9),
        total_optimizer_steps=10,
        dtype=torch.bfloat16 if case.dtype == "bfloat16" else torch.float32,
        layout=case.layout,
    )
    algorithm = AlgorithmConfig(kl_loss_coef=0.01, entropy_coef=0.01)
    if case.role == "critic":
        return CriticLearner(engine, model=ModelConfig(), algorithm=algorithm)
    return PolicyLearner(engine, model=ModelConfig(), algorithm=algorithm, temperature=1.0)
