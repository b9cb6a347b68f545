"""What a run cannot do with images in its data: refused by name, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from skyrl_train.config.models.engines import GeneratorConfig, ships_adapter
from skyrl_train.config.models.models import CriticConfig, ModelConfig, ReferenceConfig
from skyrl_train.errors import Violation
from skyrl_train.registry import part_name

_OWN = ":"
"""In the name of a custom part, which may read images."""


def part_violations(
    model: ModelConfig, generator: GeneratorConfig, critic: CriticConfig, reference: ReferenceConfig
) -> Iterator[Violation]:
    """Yield the parts of a run that would not read the images of its prompts."""
    backend, loop = part_name(generator.backend), part_name(generator.agent_loop)
    if backend == "vllm" and find_spec("torchvision") is None:
        rule = "needs torchvision where prompts have images: vLLM's models that read them import it"
        yield _of(
            "generator.backend", backend, rule, "Install the build of torchvision for this torch, or set generator=hf"
        )
    if ships_adapter(generator):
        rule = "must be merged where prompts have images: vLLM leaves out an adapter of a vision tower"
        yield _of("generator.vllm.lora_sync", "adapter", rule, "Set generator.vllm.lora_sync=merged")
    if backend not in ("hf", "vllm", "http") and _OWN not in backend:
        yield _of("generator.backend", backend, "must be hf where prompts have images", "Set generator=hf")
    if loop != "multi_turn" and _OWN not in loop:
        rule, remedy = "must be multi_turn where prompts have images", "Set generator.agent_loop=multi_turn"
        yield _of("generator.agent_loop", loop, rule, remedy)
    if path := critic.model.path:
        rule, remedy = "must be empty where prompts have images: no value model reads them", "Set critic.model.path=''"
        yield _of("critic.model.path", path, rule, remedy)
    if (path := reference.model.path) not in ("policy", model.path):
        rule = "must be the policy's model where prompts have images"
        yield _of("reference.model.path", path, rule, "Set reference.model.path=policy")
    if column := generator.privileged_context:
        rule, remedy = "must be empty where prompts have images", "Set generator.privileged_context=''"
        yield _of("generator.privileged_context", column, rule, remedy)


def layout_violations(layout: str, sequence_parallel_size: int, backend: str = "hf") -> Iterator[Violation]:
    """Yield what is not exact for a family in which the tokens of an image see one another."""
    reason = "for images of this model's family, whose tokens see one another"
    if layout != "padded":
        yield _of("trainer.layout", layout, f"must be padded {reason}", "Set trainer.layout=padded")
    if sequence_parallel_size > 1:
        remedy = "Set strategy.sequence_parallel_size=1"
        yield _of("strategy.sequence_parallel_size", str(sequence_parallel_size), f"must be 1 {reason}", remedy)
    if backend in ("vllm", "http"):
        yield _of("generator.backend", backend, f"must be hf {reason}", "Set generator=hf")


def _of(field: str, value: str, rule: str, remedy: str) -> Violation:
    return Violation(field=field, rule=rule, value=value, remedy=remedy)
