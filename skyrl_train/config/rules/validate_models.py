"""Rules of the models: the critic, the reference, adapters; and what a run cannot do with images in its data, refused by
name before a model is loaded."""

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
from skyrl_train.config.models.engines import GeneratorConfig, ships_adapter
from skyrl_train.config.models.models import CriticConfig, LoraConfig, ModelConfig, ReferenceConfig
from skyrl_train.config.models.placement import PlatformConfig, StrategyConfig
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import Violation
from skyrl_train.registry import part_name, split_spec
from skyrl_train.system import install_command


def _critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if needs_critic(algorithm) and not critic.model.path:
        by_estimator = "values" in estimator_reads(algorithm).columns
        reader = "advantage_estimator" if by_estimator else "policy_loss"
        rule = f"must be given: {reader}={split_spec(getattr(algorithm, reader))[0]} needs a value model"
        remedy = "try critic.model.path=policy, a copy of the policy with a new value head"
        yield Violation.of("critic.model.path", critic.model.path, rule, remedy)


def _reference(reference: ReferenceConfig, model: ModelConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    path = reference.model.path
    if not path.strip():
        yield Violation.of("reference.model.path", path, "must not be empty", "try reference.model.path=policy")
    if estimator_reads(algorithm).teacher == "other_model" and path in ("policy", model.path):
        rule = (
            f"must name another model than the policy: {split_spec(algorithm.advantage_estimator)[0]} learns from where "
            "the two differ"
        )
        remedy = "set reference.model.path to the folder or hub name of a teacher"
        yield Violation.of("reference.model.path", path, rule, remedy)


def _privileged_context(generator: GeneratorConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    context = generator.privileged_context
    if is_self_taught(algorithm) != bool(context):
        rule = "names what the teacher of algorithm=self_distillation is shown, and of no other"
        remedy = (
            "try algorithm=self_distillation, or generator.privileged_context=''"
            if context
            else "try generator.privileged_context=reward_spec.ground_truth"
        )
        yield Violation.of("generator.privileged_context", context, rule, remedy)


def _reference_updates(reference: ReferenceConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    path = reference.model.path
    if algorithm.ref_update_interval and not needs_reference(algorithm):
        rule = "does nothing without a reference, which this algorithm does not read"
        remedy = "set trainer.algorithm.kl_loss_coef above 0, or trainer.algorithm.ref_update_interval=0"
        yield Violation.of("trainer.algorithm.ref_update_interval", algorithm.ref_update_interval, rule, remedy)
    elif algorithm.ref_update_interval and path != "policy":
        rule = f"would replace reference.model.path={path} by the policy"
        remedy = "set trainer.algorithm.ref_update_interval=0, or reference.model.path=policy"
        yield Violation.of("trainer.algorithm.ref_update_interval", algorithm.ref_update_interval, rule, remedy)


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
            rule = (
                "must be 0 in reinforcement learning: it would move the ratios of new and old probabilities, and values"
            )
            yield Violation.of(f"{prefix}.dropout", lora.dropout, rule, f"set {prefix}.dropout=0")


def _adapter(lora: LoraConfig, prefix: str) -> Iterator[Violation]:
    if lora.rank and find_spec("peft") is None:
        rule, remedy = "needs PEFT, which is not installed here", install_command("lora")
        yield Violation.of(f"{prefix}.rank", lora.rank, rule, f"{remedy}, or {prefix}.rank=0")
    if lora.rank and not lora.targets:
        rule, remedy = "must name a layer", f"try {prefix}.targets=[all-linear]"
        yield Violation.of(f"{prefix}.targets", lora.targets, rule, remedy)


def _critic_lora(critic: CriticConfig) -> Iterator[Violation]:
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
    _critic,
    _reference,
    _privileged_context,
    _reference_updates,
    _lora_dropout,
    _critic_lora,
    _routing_replay,
)


_OWN = ":"
"""In the name of a custom part, which may read images."""


def part_violations(
    model: ModelConfig, generator: GeneratorConfig, critic: CriticConfig, reference: ReferenceConfig
) -> Iterator[Violation]:
    """Yield the parts of a run that would not read the images of its prompts."""
    backend, loop = part_name(generator.backend), part_name(generator.agent_loop)
    if backend == "vllm" and find_spec("torchvision") is None:
        rule = "needs torchvision where prompts have images: vLLM's models that read them import it"
        yield Violation.of(
            "generator.backend", backend, rule, "Install the build of torchvision for this torch, or set generator=hf"
        )
    if ships_adapter(generator):
        rule = "must be merged where prompts have images: vLLM leaves out an adapter of a vision tower"
        yield Violation.of("generator.vllm.lora_sync", "adapter", rule, "Set generator.vllm.lora_sync=merged")
    if backend not in ("hf", "vllm", "http") and _OWN not in backend:
        yield Violation.of("generator.backend", backend, "must be hf where prompts have images", "Set generator=hf")
    if loop != "multi_turn" and _OWN not in loop:
        rule, remedy = "must be multi_turn where prompts have images", "Set generator.agent_loop=multi_turn"
        yield Violation.of("generator.agent_loop", loop, rule, remedy)
    if path := critic.model.path:
        rule, remedy = "must be empty where prompts have images: no value model reads them", "Set critic.model.path=''"
        yield Violation.of("critic.model.path", path, rule, remedy)
    if (path := reference.model.path) not in ("policy", model.path):
        rule = "must be the policy's model where prompts have images"
        yield Violation.of("reference.model.path", path, rule, "Set reference.model.path=policy")
    if column := generator.privileged_context:
        rule, remedy = "must be empty where prompts have images", "Set generator.privileged_context=''"
        yield Violation.of("generator.privileged_context", column, rule, remedy)


def layout_violations(layout: str, sequence_parallel_size: int, backend: str = "hf") -> Iterator[Violation]:
    """Yield what is not exact for a family in which the tokens of an image see one another."""
    reason = "for images of this model's family, whose tokens see one another"
    if layout != "padded":
        yield Violation.of("trainer.layout", layout, f"must be padded {reason}", "Set trainer.layout=padded")
    if sequence_parallel_size > 1:
        remedy = "Set strategy.sequence_parallel_size=1"
        yield Violation.of("strategy.sequence_parallel_size", sequence_parallel_size, f"must be 1 {reason}", remedy)
    if backend in ("vllm", "http"):
        yield Violation.of("generator.backend", backend, f"must be hf {reason}", "Set generator=hf")
