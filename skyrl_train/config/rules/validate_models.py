"""Rules of the models: their optimizers, the critic, the reference, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from skyrl_train.config.algorithm.settings import (
    AlgorithmConfig,
    estimator_reads,
    is_self_taught,
    needs_critic,
    needs_reference,
)
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import PlatformConfig
from skyrl_train.config.schema import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    StrategyConfig,
    TrainerConfig,
)
from skyrl_train.errors import Violation
from skyrl_train.registry import part_name, split_spec
from skyrl_train.system import install_command


def _policy_betas(trainer: TrainerConfig) -> Iterator[Violation]:
    yield from betas_violations(trainer.policy.optimizer, "trainer.policy.optimizer")


def _critic_betas(critic: CriticConfig) -> Iterator[Violation]:
    yield from betas_violations(critic.optimizer, "critic.optimizer")


def betas_violations(optimizer: OptimizerConfig, field: str) -> Iterator[Violation]:
    """What is wrong with the averaging coefficients of the optimizer at `field`."""
    if not all(0.0 <= beta < 1.0 for beta in optimizer.betas):
        rule, remedy = "must each be at least 0 and below 1", f"try {field}.betas=[0.9,0.999]"
        yield Violation.of(f"{field}.betas", optimizer.betas, rule, remedy)


def _critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if needs_critic(algorithm) and not critic.model.path:
        by_estimator = "values" in estimator_reads(algorithm).columns
        reader = "advantage_estimator" if by_estimator else "policy_loss"
        yield Violation.of(
            "critic.model.path",
            critic.model.path,
            f"must be given: {reader}={split_spec(getattr(algorithm, reader))[0]} needs a value model",
            "try critic.model.path=policy, a copy of the policy with a new value head",
        )


def _reference(reference: ReferenceConfig, model: ModelConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    path = reference.model.path
    if not path.strip():
        yield Violation.of("reference.model.path", path, "must not be empty", "try reference.model.path=policy")
    if estimator_reads(algorithm).teacher == "other_model" and path in ("policy", model.path):
        yield Violation.of(
            "reference.model.path",
            path,
            f"must name another model than the policy: {split_spec(algorithm.advantage_estimator)[0]} learns from where "
            "the two differ",
            "set reference.model.path to the folder or hub name of a teacher",
        )


def _privileged_context(generator: GeneratorConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    context = generator.privileged_context
    if is_self_taught(algorithm) != bool(context):
        yield Violation.of(
            "generator.privileged_context",
            context,
            "names what the teacher of algorithm=self_distillation is shown, and of no other",
            "try algorithm=self_distillation, or generator.privileged_context=''"
            if context
            else "try generator.privileged_context=reward_spec.ground_truth",
        )


def _reference_updates(reference: ReferenceConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    path = reference.model.path
    if algorithm.ref_update_interval and not needs_reference(algorithm):
        yield Violation.of(
            "trainer.algorithm.ref_update_interval",
            algorithm.ref_update_interval,
            "does nothing without a reference, which this algorithm does not read",
            "set trainer.algorithm.kl_loss_coef above 0, or trainer.algorithm.ref_update_interval=0",
        )
    elif algorithm.ref_update_interval and path != "policy":
        yield Violation.of(
            "trainer.algorithm.ref_update_interval",
            algorithm.ref_update_interval,
            f"would replace reference.model.path={path} by the policy",
            "set trainer.algorithm.ref_update_interval=0, or reference.model.path=policy",
        )


def lora_targets(model: ModelConfig) -> Iterator[Violation]:
    """An adapter has layers to adapt, and a package that puts it there."""
    yield from _adapter(model.lora, "model.lora")


def quantization(model: ModelConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    """Numbers of 4 bits are not trained, and not cut into shards."""
    if model.quantization == "none":
        return
    rules = {
        "holds weights that are not trained, and without an adapter all are": (
            not model.lora.rank,
            "set model.lora.rank, e.g. 32",
        ),
        "is not known to strategy=fsdp2, which cuts weights into shards": (
            strategy.kind == "fsdp2",
            "try strategy=ddp: each rank then holds the 4-bit weights whole",
        ),
        "is done by the loader of transformers alone": (
            part_name(model.loader) != "transformers",
            "set model.loader=transformers",
        ),
        "needs bitsandbytes, which is not installed here": (
            find_spec("bitsandbytes") is None,
            install_command("quantization"),
        ),
    }
    for rule, (is_broken, remedy) in rules.items():
        if is_broken:
            yield Violation.of("model.quantization", model.quantization, rule, f"{remedy}, or model.quantization=none")


def _lora_dropout(model: ModelConfig, critic: CriticConfig) -> Iterator[Violation]:
    for prefix, lora in (("model.lora", model.lora), ("critic.model.lora", critic.model.lora)):
        if lora.rank and lora.dropout:
            yield Violation.of(
                f"{prefix}.dropout",
                lora.dropout,
                "must be 0 in reinforcement learning: it would move the ratios of new and old probabilities, and values",
                f"set {prefix}.dropout=0",
            )


def _adapter(lora: LoraConfig, prefix: str) -> Iterator[Violation]:
    if lora.rank and find_spec("peft") is None:
        rule, remedy = "needs PEFT, which is not installed here", install_command("lora")
        yield Violation.of(f"{prefix}.rank", lora.rank, rule, f"{remedy}, or {prefix}.rank=0")
    if lora.rank and not lora.targets:
        rule, remedy = "must name a layer", f"try {prefix}.targets=[all-linear]"
        yield Violation.of(f"{prefix}.targets", lora.targets, rule, remedy)


def _critic_lora(critic: CriticConfig) -> Iterator[Violation]:
    if critic.model.lora.rank and not critic.model.path:
        yield Violation.of(
            "critic.model.lora.rank",
            critic.model.lora.rank,
            "needs a critic, and critic.model.path is empty",
            "set critic.model.path=policy, or critic.model.lora.rank=0",
        )
    yield from _adapter(critic.model.lora, "critic.model.lora")


def _routing_replay(
    trainer: TrainerConfig, generator: GeneratorConfig, model: ModelConfig, platform: PlatformConfig
) -> Iterator[Violation]:
    """What returns where tokens were sent, and what can be told where to send them."""
    engine, vllm = part_name(generator.backend), generator.backend == "vllm"
    caching, compiled = generator.vllm.prefix_caching, model.compile
    cases: tuple[tuple[bool, str, object, str, str], ...] = (
        (engine == "http", "generator.backend", engine, "answers with tokens alone", "add generator=hf"),
        (
            vllm and not platform.on_gpu,
            "generator.backend",
            engine,
            "returns experts on GPUs alone",
            "add generator=hf",
        ),
        (vllm and not caching, "generator.vllm.prefix_caching", caching, "must be true", "leave it out"),
        (compiled, "model.compile", compiled, "must be false: routers are reached into", "set it to false"),
    )
    for holds, field, value, rule, remedy in cases:
        if trainer.moe_routing_replay and holds:
            full = f"{rule}, and trainer.moe_routing_replay=true needs the experts of each token"
            yield Violation.of(field, value, full, f"{remedy}, or set trainer.moe_routing_replay=false")


MODEL_RULES: tuple[Rule, ...] = (
    _policy_betas,
    _critic_betas,
    _critic,
    _reference,
    _privileged_context,
    _reference_updates,
    _lora_dropout,
    _critic_lora,
    _routing_replay,
)
