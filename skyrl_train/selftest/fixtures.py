"""The small model and step that the learner's cases compute, and the float64 result that they are compared with.

The reference is the padded layout in float64 on the CPU: layouts, types, kernels and ranks may change speed and memory,
never the gradient.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, PolicyLearner, compile_layers
from skyrl_train.model import load_causal_lm, place_model, quiet_transformers, resolve_model_path
from skyrl_train.model.layers import set_numerics
from skyrl_train.model.parallel import expert_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from skyrl_train.distributed import ModelStrategy

BUILTIN = "builtin:tiny_qwen2"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_FIRST_WORD = 10
"""Token ids below are special."""
_PROMPT, _SAMPLES = 40, 2
LENGTHS = (90, 120, 70, 140, 50, 75, 110, 60)
"""Tokens of the rows of a step; neighbours share a prompt of 40."""
GRADIENT_BOUNDS = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest relative error of the gradient, in its L2 norm. bfloat16 has 8 bits: rounding alone is 2 to 3 %."""
LOGPROB_BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of a token's log-probability."""


def save_model(folder: Path, *, window: int | None = None, experts: int = 0) -> Path:
    """Write a random Qwen2 (2 layers, 4 heads of 64 with grouped keys, 1 million parameters) and a tokenizer.

    Heads of 64 are what fused kernels take. `window`: sliding attention over so many tokens in every layer. `experts`: a
    Qwen3-MoE of these sizes instead, with so many of them in a layer, of which a token is sent to two.
    """
    source = resolve_model_path(BUILTIN)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen2",
        vocab_size=AutoConfig.from_pretrained(source).vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=2,
        pad_token_id=0,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
        **(mixture if experts else {}),
    )
    make: Any = AutoModelForCausalLM.from_config
    with quiet_transformers():
        make(config, dtype=torch.float32).save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path) -> Path:
    """Put the bundled tokenizer into the folder, whose tokens every model here has; return it."""
    for name in _TOKENIZER_FILES:
        shutil.copy(resolve_model_path(BUILTIN) / name, folder / name)
    return folder


def make_rows(lengths: tuple[int, ...] = LENGTHS, *, prompt: int = _PROMPT, seed: int = 0) -> TrainingInputBatch:
    """Rows of random tokens; each pair of neighbours begins with the same `prompt` tokens, without loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    tokens = [torch.randint(_FIRST_WORD, 400, (length,), generator=generator).int() for length in lengths]
    for row in range(1, rows, _SAMPLES):
        tokens[row][:prompt] = tokens[row - 1][:prompt]
    position = torch.cat([torch.arange(length) for length in lengths])
    advantage = torch.randn(rows, generator=generator)
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.cat(tokens),
            "loss_mask": position >= prompt,
            "rewards": torch.zeros(len(position)),
            "advantages": advantage.repeat_interleave(torch.tensor(lengths)),
        },
        row_columns={
            "prompt_index": torch.arange(rows).div(_SAMPLES, rounding_mode="floor").int(),
            "trajectory_index": torch.arange(rows).int(),
            "step_index": torch.zeros(rows, dtype=torch.int32),
            "is_last_step": torch.ones(rows, dtype=torch.bool),
            "is_padding": torch.zeros(rows, dtype=torch.bool),
        },
        row_offsets=offsets_of(torch.tensor(lengths)),
        metadata=BatchMetadata(
            uids=tuple(f"p{row // _SAMPLES}" for row in range(rows)), global_step=1, weight_version=1
        ),
    )


def make_learner(
    source: Path | PreTrainedModel,
    device: str,
    *,
    layout: LayoutChoice = "packed",
    dtype: str = "float32",
    checkpointing: bool = True,
    compiled: bool = False,
    strategy: ModelStrategy | None = None,
    state_in_host: bool = False,
    rows: int = 4,
) -> PolicyLearner:
    """A policy on `device`, as a run would build it of a folder or a model, with micro-batches of so many `rows`; `dtype`
    float64 computes all of it in float64."""
    set_numerics(deterministic=False)
    model_config = ModelConfig(path=str(source), gradient_checkpointing=checkpointing)
    if isinstance(source, Path):
        model = load_causal_lm(model_config, "cpu" if strategy is not None and strategy.sharded else device)
    else:
        model = source
        place_model(model, model_config, device)
        model.train()
    if dtype == "float64":
        _make_double(model)
    if compiled:
        compile_layers(model, name=type(model).__name__)
    trainer = TrainerConfig(micro_train_batch_size_per_gpu=rows, micro_forward_batch_size_per_gpu=rows, layout=layout)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=make_micro_batch_strategy(trainer),
        dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
        optimizer=OptimizerConfig(lr=1e-3),
        state_in_host=state_in_host,
        total_optimizer_steps=10,
        strategy=strategy,
    )
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01)
    return PolicyLearner(engine, model=model_config, algorithm=algorithm, temperature=1.0)


def _make_double(model: PreTrainedModel) -> None:
    """Norms of transformers round to float32 inside, whatever the type of their input: replace them by torch's. Grouped
    products of experts know no float64."""
    if expert_modules(model):
        model.set_experts_implementation("eager")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("Qwen2RMSNorm", "Qwen3MoeRMSNorm"):
                own: Any = child
                norm = nn.RMSNorm(own.weight.shape[0], eps=own.variance_epsilon)
                norm.weight = own.weight
                setattr(parent, name, norm)
    model.double()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A step and what it must give."""

    step: MiniBatch
    logprobs: Tensor
    """float64 `[num_tokens]`."""
    gradient: Tensor
    """float64, of all parameters, one after the other."""


def make_reference(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Reference:
    """A step as a run would make it, whose old log-probabilities are near the model's own, and its float64 result."""
    learner = make_learner(folder, "cpu", layout="padded", dtype="float64", checkpointing=False)
    rows = make_rows(lengths)
    logprobs = learner.forward(rows)
    generator = torch.Generator().manual_seed(1)

    def near(spread: float) -> Tensor:
        return (logprobs + spread * torch.randn(len(logprobs), generator=generator)).float()

    rows = rows.with_columns(old_logprobs=near(0.02), rollout_logprobs=near(0.02), ref_logprobs=near(0.1))
    step = close_mini_batch(rows, loss_reduction="token_mean", max_sequence_length_for_norm=256)
    learner.forward_backward(step)
    return Reference(step=step, logprobs=logprobs, gradient=gradient_of(learner))


def gradient_of(learner: PolicyLearner) -> Tensor:
    """float64 on the CPU, gathered from all ranks where it is sharded."""
    full = learner.engine.strategy.full
    gradients = [parameter.grad for parameter in learner.engine.parameters.values() if parameter.grad is not None]
    return torch.cat([full(gradient).detach().cpu().double().flatten() for gradient in gradients])


def weights_of(learner: PolicyLearner) -> Tensor:
    """All parameters on the CPU, gathered from all ranks where they are sharded."""
    full = learner.engine.strategy.full
    return torch.cat([full(each.detach()).cpu().flatten() for each in learner.engine.parameters.values()])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of `found` in its L2 norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def require_gradient(found: Tensor, reference: Reference, dtype: str) -> float:
    """The relative error. Raises AssertionError where it is larger than rounding to `dtype` explains."""
    error = relative_error(found, reference.gradient)
    assert error < GRADIENT_BOUNDS[dtype], f"the gradient is {error:.2e} off, at most {GRADIENT_BOUNDS[dtype]} is right"
    return error


def require_logprobs(found: Tensor, reference: Reference, dtype: str) -> float:
    """The largest difference. Raises AssertionError where it is larger than rounding to `dtype` explains."""
    difference = float((found.double() - reference.logprobs).abs().max())
    bound = LOGPROB_BOUNDS[dtype]
    assert difference < bound, f"a log-probability is {difference:.2e} off, at most {bound} is right"
    return difference
