"""Which models a run holds and where, and what one of them is built from: small settings, of either kind of run.

    Config     --learner_settings-->     LearnerSettings of the policy, the reference or the critic
    SFTConfig  --sft_learner_settings--> LearnerSettings of the policy

Nothing behind them sees a whole configuration, so that a learner is the same whatever kind of run trains it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from skyrl_train.config.algorithm.settings import (
    AlgorithmConfig,
    estimator_reads,
    loss_reads,
    needs_reference,
    reads_whole_step,
)
from skyrl_train.config.models.models import LoraConfig, ModelConfig, OptimizerConfig
from skyrl_train.config.models.placement import PlatformConfig, StrategyConfig
from skyrl_train.config.placement.bundles import Layout, Role, count_engines, plan_layout
from skyrl_train.config.schema import Config, MicroBatchConfig, RunConfig, TrainerConfig
from skyrl_train.config.sft import SFTConfig

OldLogprobsScored = Literal["none", "later", "all"]
"""Rows of a training batch that the policy scores before the update; `later`: those behind the first optimizer step."""


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
    """`trainer`, of which a learner reads this part."""
    merge_turns: bool
    """Whether turns that extend one another are computed together (`generator.merge_stepwise`)."""
    algorithm: AlgorithmConfig
    temperature: float
    """That rollouts are sampled at: the policy whose probabilities count is softmax(logits / temperature)."""
    on_policy: bool
    """Whether mini-batches may lack `old_logprobs`: the policy that is differentiated is then the old one."""
    strategy: StrategyConfig
    collective_timeout_s: float
    platform: PlatformConfig
    deterministic: bool
    seed: int
    replays_routing: bool = False
    """Whether tokens go to the experts that were recorded for them (`trainer.moe_routing_replay`)."""
    profile_steps: tuple[int, ...] = ()
    """Training steps that are profiled."""
    profiles: str = ""
    """The folder for that."""

    @property
    def frozen(self) -> bool:
        """Whether the weights that are loaded stay as they are: only scored, or under an adapter."""
        return self.optimizer is None or self.model.lora.rank > 0


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
        "reference": replace(
            model_at(config.reference.model.path, config.model), lora=LoraConfig(), quantization="none"
        ),
        "critic": replace(
            model_at(config.critic.model.path, config.model), lora=config.critic.model.lora, quantization="none"
        ),
    }
    optimizers = {"policy": config.trainer.policy.optimizer, "critic": config.critic.optimizer}
    return LearnerSettings(
        role=role,
        model=models[role],
        policy_model=config.model,
        optimizer=optimizers.get(role),
        schedule=schedule or ScheduleLength(),
        micro_batching=config.trainer,
        merge_turns=config.generator.merge_stepwise == "auto",
        algorithm=config.trainer.algorithm,
        temperature=config.generator.sampling.temperature,
        on_policy=old_logprobs_scored(config.trainer) != "all",
        strategy=config.strategy,
        collective_timeout_s=config.placement.call_timeout_s,
        platform=config.platform,
        deterministic=config.deterministic,
        seed=config.seed,
        replays_routing=role == "policy" and config.trainer.moe_routing_replay,
        profile_steps=config.trainer.profile_steps,
        profiles=os.path.abspath(f"{config.output_dir}/profiles"),
    )


def sft_learner_settings(config: SFTConfig, *, total_steps: int = 0) -> LearnerSettings:
    """What the model is built from: a policy with the loss `cross_entropy`, for so many optimizer steps."""
    return LearnerSettings(
        role="policy",
        model=config.model,
        policy_model=config.model,
        optimizer=config.trainer.optimizer,
        schedule=ScheduleLength(optimizer_steps=total_steps),
        micro_batching=config.trainer,
        merge_turns=False,
        algorithm=AlgorithmConfig(policy_loss="cross_entropy", loss_reduction="token_mean"),
        temperature=1.0,
        on_policy=True,
        strategy=config.strategy,
        collective_timeout_s=config.placement.call_timeout_s,
        platform=config.platform,
        deterministic=config.deterministic,
        seed=config.seed,
        profile_steps=config.trainer.profile_steps,
        profiles=os.path.abspath(f"{config.output_dir}/profiles"),
    )


def model_at(path: str, policy: ModelConfig) -> ModelConfig:
    """The policy's model where `path` is `policy`, else the one at `path`, loaded in the same way."""
    return policy if path == "policy" else replace(policy, path=path, tokenizer_path=None, revision=None)


def roles_of(config: Config) -> tuple[Role, ...]:
    """The models that the run holds: `policy`, and `reference` and `critic` where there are such."""
    has_reference = needs_reference(config.trainer.algorithm) and not reference_is_base(config)
    return (
        "policy",
        *(("reference",) if has_reference else ()),
        *(("critic",) if config.critic.model.path else ()),
    )


def reference_is_base(config: Config) -> bool:
    """Whether the reference is the model under the policy's adapter, so that none of its own is held: not where another
    model is named, or where it becomes the policy on the way."""
    own = config.reference.model.path == "policy" and not config.trainer.algorithm.ref_update_interval
    return config.model.lora.rank > 0 and own


def old_logprobs_scored(trainer: TrainerConfig) -> OldLogprobsScored:
    """Which rows of a batch the policy has to score before it is updated on them.

    `later`: those behind the first optimizer step, in which the old policy is the one that is differentiated, so that
    each ratio is 1 by construction. Of a batch that is one step these are none. Further epochs compare the first rows,
    too, with the policy before the first step. `none`: the loss never reads them, or is given those of the engine. `all`
    wherever rewards, advantages or weights over the whole step are made of them.
    """
    algorithm = trainer.algorithm
    if algorithm.kl_reward_coef > 0 or "old_logprobs" in estimator_reads(algorithm).columns:
        return "all"
    if algorithm.off_policy.enabled and reads_whole_step(algorithm):
        return "all"
    if algorithm.proximal == "behaviour" or "old_logprobs" not in loss_reads(algorithm).columns:
        return "none"
    return "all" if trainer.update_epochs_per_batch > 1 else "later"


def scores_entropies(config: Config) -> bool:
    """Whether the policy scores the entropies of trained tokens, which the files of rollouts have and no loss reads."""
    return config.trainer.dump_rollouts and "entropies" in config.rollouts.columns


def layout_of(config: RunConfig) -> Layout:
    """What a run of either kind reserves on Ray."""
    on_gpu = config.platform.name == "gpu"
    if not isinstance(config, Config):
        return plan_layout(config.placement, roles=("policy",), gpu=on_gpu)
    return plan_layout(
        config.placement,
        roles=roles_of(config),
        gpu=on_gpu,
        num_engines=count_engines(config.generator, config.placement),
        devices_per_engine=config.generator.vllm.devices_per_engine,
    )


def gpus_needed(config: Config) -> int:
    """GPUs that a run of reinforcement learning takes; 0 on a CPU."""
    if config.placement.backend == "ray":
        return layout_of(config).num_gpus
    engines = count_engines(config.generator, config.placement)
    return max(1, config.generator.vllm.devices_per_engine * engines) if config.platform.on_gpu else 0
