"""Rules of distributed runs: placement on Ray, engines, servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from skyrl_train.config.schema import Config
from skyrl_train.config.validate_placement import PLACEMENT_RULES
from skyrl_train.errors import Violation

LARGEST_VLLM_RANK = 512
"""Of an adapter that vLLM applies."""
LARGEST_VLLM_TEMPERATURE = 2.0


def cluster_violations(config: Config) -> Iterator[Violation]:
    """What contradicts itself in `placement`, `generator.vllm` and `generator.http`."""
    for rule in CLUSTER_RULES:
        yield from rule(config)


def _verify_weight_sync(config: Config) -> Iterator[Violation]:
    if config.generator.verify_weight_sync and config.generator.backend != "vllm":
        yield Violation(
            field="generator.verify_weight_sync",
            rule="needs generator.backend=vllm, whose engines compute apart from the trainer",
            value="True",
            remedy="add generator=vllm, or drop generator.verify_weight_sync",
        )


def _temperature(config: Config, name: str) -> Iterator[Violation]:
    """Of `generator.sampling` or `generator.eval_sampling`."""
    if config.generator.backend not in ("vllm", "http"):
        return
    temperature = getattr(config.generator, name).temperature
    if temperature > LARGEST_VLLM_TEMPERATURE:
        yield Violation(
            field=f"generator.{name}.temperature",
            rule=f"must be at most {LARGEST_VLLM_TEMPERATURE:g} with generator.backend={config.generator.backend}: "
            "vLLM refuses a request with more",
            value=repr(temperature),
            remedy=f"try generator.{name}.temperature={LARGEST_VLLM_TEMPERATURE:g}, or generator=hf",
        )


def _lora_sync(config: Config) -> Iterator[Violation]:
    """Rules of `generator.vllm.lora_sync=adapter`."""
    if config.generator.vllm.lora_sync != "adapter":
        return
    rank = config.model.lora.rank
    field, value = "generator.vllm.lora_sync", "adapter"
    if config.generator.backend != "vllm":
        remedy = "add generator=vllm, or set generator.vllm.lora_sync=merged"
        yield Violation(field=field, rule="needs generator.backend=vllm", value=value, remedy=remedy)
    if not rank:
        remedy = "set model.lora.rank=16, or generator.vllm.lora_sync=merged"
        yield Violation(field=field, rule="needs an adapter, and model.lora.rank is 0", value=value, remedy=remedy)
    if rank > LARGEST_VLLM_RANK:
        yield Violation(
            field="model.lora.rank",
            rule=f"must be at most {LARGEST_VLLM_RANK} with generator.vllm.lora_sync=adapter",
            value=str(rank),
            remedy="set generator.vllm.lora_sync=merged, which knows no limit",
        )


def _vllm(config: Config) -> Iterator[Violation]:
    if config.generator.backend != "vllm":
        return
    sampling = config.generator.sampling
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    if truncated and sampling.temperature not in (0.0, 1.0):
        yield Violation(
            field="generator.sampling.temperature",
            rule=(
                "must be 1 where top_p, top_k or min_p truncate: vLLM reports log-probabilities either before the "
                "temperature or after truncation, and training needs those in between"
            ),
            value=repr(sampling.temperature),
            remedy="try generator.sampling.temperature=1.0, or top_p=1.0 top_k=-1 min_p=0.0",
        )


def _http(config: Config) -> Iterator[Violation]:
    url = config.generator.http.url
    if config.generator.backend == "http" and not url.startswith(("http://", "https://")):
        yield Violation(
            field="generator.http.url",
            rule="must begin with http:// or https://",
            value=repr(url),
            remedy=f"try generator.http.url=http://{url}",
        )


CLUSTER_RULES: tuple[Callable[[Config], Iterator[Violation]], ...] = (
    *PLACEMENT_RULES,
    _vllm,
    _http,
    *(partial(_temperature, name=name) for name in ("sampling", "eval_sampling")),
    _lora_sync,
    _verify_weight_sync,
)
"""Those of placement are part of them."""
