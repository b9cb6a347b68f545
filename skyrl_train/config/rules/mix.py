"""`data.mix`: several data sets in one run, each with a weight, and settings of its own where it states them.

An entry is a mapping. `train`, `validation` and the other settings of `data` stand in it as they do there; `environment`
holds settings of `environment`, `sampling` and `eval_sampling` those of `generator`. The rest is as in the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config.data.sources import DataConfig, EnvironmentConfig
from skyrl_train.config.door.load import read_root, show
from skyrl_train.config.models.engines import SamplingConfig
from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation

T = TypeVar("T")
_OF_THE_RUN = ("mix", "shuffle", "order", "curriculum", "prompt_format", "template_kwargs")
"""Settings of `data` that hold for all data sets alike."""
_OWN = ("name", "weight", "environment", "sampling", "eval_sampling")


@dataclass(frozen=True, kw_only=True)
class MixedDataset:
    """One entry of `data.mix`, complete."""

    name: str
    weight: float
    """Share of each batch, in proportion to those of the others."""
    data: DataConfig
    environment: EnvironmentConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What it states of `generator.sampling`."""
    eval_sampling: Mapping[str, Any] = field(default_factory=dict)
    """What it states of `generator.eval_sampling`, and else of `generator.sampling`, but for the temperature."""


def mixed_datasets(
    data: DataConfig, environment: EnvironmentConfig, sampling: SamplingConfig
) -> tuple[list[MixedDataset], list[Violation]]:
    """Return the data sets of `data.mix`, with what they do not state taken from the run, and what is wrong with them."""
    found: list[MixedDataset] = []
    violations: list[Violation] = []
    for index, entry in enumerate(data.mix):
        dataset, problems = _read(entry, f"data.mix[{index}]", data, environment, sampling.temperature)
        violations += problems
        if dataset.name in {each.name for each in found}:
            rule, remedy = (
                "must be another name than that of the data set before it",
                "give each entry a name of its own",
            )
            violations.append(Violation.of(f"data.mix[{index}].name", dataset.name, rule, remedy))
        found.append(dataset)
    return found, violations


def _read(
    entry: Mapping[str, Any],
    path: str,
    data_of_run: DataConfig,
    environment_of_run: EnvironmentConfig,
    temperature: float,
) -> tuple[MixedDataset, list[Violation]]:
    violations: list[Violation] = []

    def section(schema: type[T], node: object, at: str) -> T:
        loaded = read_root(node, schema, at=at, root=Config)
        violations.extend(loaded.violations)
        return loaded.config

    own = {key: value for key, value in entry.items() if key not in _OWN}
    for key in [key for key in own if key in _OF_THE_RUN]:
        violations.append(
            Violation.of(f"{path}.{key}", show(own.pop(key)), "holds for all data sets", f"set data.{key} instead")
        )
    if not own.get("train"):
        remedy = "give each entry its data: {train: FILE, weight: 0.5}"
        violations.append(Violation.of(f"{path}.train", own.get("train"), "must name at least one source", remedy))
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        violations.append(Violation.of(f"{path}.weight", weight, "must be a number greater than 0", "try weight: 0.5"))
        weight = 1.0
    environment = entry.get("environment", {})
    if isinstance(environment, str):
        environment = {"env_class": environment}
    laid = {"max_train_prompts": 0, "max_validation_prompts": 0, "validation": ()}
    data = section(DataConfig, {**_plain(data_of_run), **laid, **own}, path)
    name = entry.get("name", Path(data.train[0]).stem if data.train else path)
    if not isinstance(name, str) or not name or "/" in name:
        violations.append(Violation.of(f"{path}.name", name, "must be a text without /", "try name: maths"))
    sampling, eval_sampling = (
        _stated(part, section(SamplingConfig, part, f"{path}.{name}"))
        for name, part in ((name, entry.get(name, {})) for name in ("sampling", "eval_sampling"))
    )
    dataset = MixedDataset(
        name=str(name),
        weight=float(weight),
        data=data,
        environment=section(
            EnvironmentConfig,
            {**_plain(environment_of_run), **environment} if isinstance(environment, Mapping) else environment,
            f"{path}.environment",
        ),
        sampling=sampling,
        eval_sampling={**{key: sampling[key] for key in sampling if key != "temperature"}, **eval_sampling},
    )
    if dataset.environment.placement == "ray":
        rule, remedy = "must be local in a mix", "set environment.placement=local"
        violations.append(Violation.of(f"{path}.environment.placement", "ray", rule, remedy))
    if dataset.sampling.get("temperature", temperature) != temperature:
        rule = "must be that of the run: the trainer's probabilities are those of one temperature"
        remedy = "set generator.sampling.temperature"
        violations.append(Violation.of(f"{path}.sampling.temperature", dataset.sampling["temperature"], rule, remedy))
    return dataset, violations


def _stated(entry: object, read: SamplingConfig) -> Mapping[str, Any]:
    return {key: getattr(read, key) for key in entry if hasattr(read, key)} if isinstance(entry, Mapping) else {}


def _plain(section: Any) -> dict[str, Any]:
    return {each.name: _value(getattr(section, each.name)) for each in dataclasses.fields(section)}


def _value(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
