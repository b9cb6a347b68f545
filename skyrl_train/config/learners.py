"""What one model of a run is built from: small settings, made from either kind of configuration.

    Config     --learner_settings-->                    LearnerSettings of the policy, the reference or the critic
    SFTConfig  --config/sft.py: sft_learner_settings--> LearnerSettings of the policy

Nothing behind them sees a whole configuration, so that a learner is the same whatever kind of run trains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from skyrl_train.config.algorithm import AlgorithmConfig, needs_reference
from skyrl_train.config.bundles import Role, roles_of
from skyrl_train.config.micro_batching import MicroBatchConfig
from skyrl_train.config.passes import needs_old_logprobs, reference_is_base
from skyrl_train.config.placement import PlatformConfig, StrategyConfig
from skyrl_train.config.schema import Config, LoopConfig, LoraConfig, ModelConfig, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ScheduleLength:
    """What a learning-rate schedule runs over."""

    optimizer_steps: float = 0.0
    """Where documents drive the schedule, all of them in units of a step's target."""
    documents: int = 0
    """Trajectories that the optimizer steps consume in the run, where they drive the schedule; else 0."""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """What one model of a run is built from, in this process or on ranks."""

    role: Role
    model: ModelConfig
    """Its own weights and adapter."""
    policy_model: ModelConfig
    """The model whose tokenizer made the rows that it reads: the policy's."""
    optimizer: OptimizerConfig | None
    """None for a model that is only scored."""
    schedule: ScheduleLength
    micro_batching: MicroBatchConfig
    merge_turns: bool
    """Whether turns that extend one another are computed together (`generator.merge_stepwise`)."""
    algorithm: AlgorithmConfig
    temperature: float
    """That rollouts are sampled at: the policy whose probabilities count is softmax(logits / temperature)."""
    on_policy: bool
    """Whether mini-batches may lack `old_logprobs`, since the policy that is differentiated is the old one."""
    strategy: StrategyConfig
    collective_timeout_s: float
    platform: PlatformConfig
    deterministic: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class RunModels:
    """The models of a run."""

    learners: tuple[LearnerSettings, ...]
    """The policy first; then the reference and the critic, where there are such."""
    base_is_reference: bool = False
    """Whether the policy's own model, with its adapter off, is the reference."""


def run_models(config: Config, schedule: Callable[[Role], ScheduleLength]) -> RunModels:
    """The models of reinforcement learning: a reference where the algorithm needs one, and a critic where
    `critic.model.path` names one. `schedule` is `BatchPlan.schedule`."""
    return RunModels(
        learners=tuple(learner_settings(config, role, schedule(role)) for role in roles_of(config)),
        base_is_reference=needs_reference(config.trainer.algorithm) and reference_is_base(config),
    )


def learner_settings(config: Config, role: Role, schedule: ScheduleLength | None = None) -> LearnerSettings:
    """Settings of one model of reinforcement learning.

    Args:
        schedule: Of `BatchPlan.schedule`; not needed by a model that takes no optimizer steps.
    """
    models = {
        "policy": config.model,
        "reference": replace(model_at(config.reference.model.path, config.model), lora=LoraConfig()),
        "critic": replace(model_at(config.critic.model.path, config.model), lora=config.critic.model.lora),
    }
    optimizers = {"policy": config.trainer.policy.optimizer, "critic": config.critic.optimizer}
    return LearnerSettings(
        role=role,
        model=models[role],
        policy_model=config.model,
        optimizer=optimizers.get(role),
        schedule=schedule or ScheduleLength(),
        micro_batching=micro_batch_settings(config.trainer),
        merge_turns=config.generator.merge_stepwise == "auto",
        algorithm=config.trainer.algorithm,
        temperature=config.generator.sampling.temperature,
        on_policy=not needs_old_logprobs(config.trainer),
        strategy=config.strategy,
        collective_timeout_s=config.placement.call_timeout_s,
        platform=config.platform,
        deterministic=config.deterministic,
        seed=config.seed,
    )


def model_at(path: str, policy: ModelConfig) -> ModelConfig:
    """The policy's model where `path` is `policy`, else the one at `path`, loaded in the same way."""
    return policy if path == "policy" else replace(policy, path=path, tokenizer_path=None, revision=None)


def micro_batch_settings(trainer: LoopConfig) -> MicroBatchConfig:
    """The part of `trainer` that a learner sees."""
    return MicroBatchConfig(**{each.name: getattr(trainer, each.name) for each in fields(MicroBatchConfig)})
