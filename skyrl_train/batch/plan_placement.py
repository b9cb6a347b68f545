"""Placement as a plan shows it: GPUs needed and found, who shares which, engines, and what is on by default. No Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_train.config.bundles import count_engines, gpus_needed, layout_of, takes_turns
from skyrl_train.config.platform import Devices
from skyrl_train.config.schema import Config
from skyrl_train.registry import part_name


@dataclass(frozen=True, kw_only=True)
class BundleGroup:
    """Devices that are reserved together, and what computes on them."""

    name: str
    num_bundles: int
    gpus_per_bundle: int
    num_nodes: int
    """Nodes that it is bound to; 0 is wherever there is room."""
    slots: tuple[tuple[str, int], ...]
    """Role to the number of its ranks or engines in the group."""


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """What a run reserves, beside what there is."""

    backend: str
    strategy: str
    gpus_needed: int
    gpus_found: int
    found_in: str
    """Where the GPUs that were found were looked for; empty where they were not."""
    in_turns: bool
    """Whether models and engines share devices in turns."""
    groups: tuple[BundleGroup, ...]
    """None without Ray."""
    engines: str
    """What makes rollouts, in words."""
    training: str
    """Layout and micro-batches, in words."""


def placement_report(config: Config, devices: Devices) -> PlacementReport:
    """Of a config whose placement is stated, or has been chosen. `devices`: those that were found."""
    on_ray = config.placement.backend == "ray"
    trainer = config.trainer
    return PlacementReport(
        backend=config.placement.backend,
        strategy=config.strategy.name,
        gpus_needed=gpus_needed(config),
        gpus_found=devices.num_gpus,
        found_in=devices.source,
        in_turns=takes_turns(config.placement, config.generator, config.platform),
        groups=tuple(_groups(config)) if on_ray else (),
        engines=_engines(config),
        training=f"layout {trainer.layout}, micro-batches {part_name(trainer.micro_batching)}",
    )


def placement_lines(report: PlacementReport) -> Iterator[str]:
    """For a terminal."""
    if report.gpus_needed or report.gpus_found:
        found = f", {report.gpus_found} found ({report.found_in})" if report.found_in else ""
        yield f"{'GPUs':<10} {report.gpus_needed} needed{found}"
    yield f"{'backend':<10} {report.backend}, strategy {report.strategy}"
    for group in report.groups:
        each = f"{group.gpus_per_bundle} GPU{'s' * (group.gpus_per_bundle != 1)}" if group.gpus_per_bundle else "1 CPU"
        where = f" on {group.num_nodes} node{'s' * (group.num_nodes != 1)}" if group.num_nodes else ""
        slots = ", ".join(f"{count} {role}" for role, count in group.slots)
        turns = ", in turns" if report.in_turns else ""
        yield f"{group.name:<10} {group.num_bundles} bundle{'s' * (group.num_bundles != 1)} of {each}{where}: {slots}{turns}"
    yield f"{'rollouts':<10} {report.engines}"
    yield f"{'training':<10} {report.training}"


def _groups(config: Config) -> Iterator[BundleGroup]:
    layout = layout_of(config)
    for name, bundles in layout.groups.items():
        nodes = {bundle.node for bundle in bundles if bundle.node is not None}
        yield BundleGroup(
            name=name,
            num_bundles=len(bundles),
            gpus_per_bundle=int(max(bundle.gpus for bundle in bundles)),
            num_nodes=len(nodes),
            slots=tuple((role, len(places)) for role, (group, places) in layout.seats.items() if group == name),
        )


def _engines(config: Config) -> str:
    generator = config.generator
    if generator.backend != "vllm":
        return f"generator={part_name(generator.backend)}"
    vllm, gpu = generator.vllm, config.platform.name == "gpu"
    count = count_engines(config.generator, config.placement)
    parts = [
        f"{count} vLLM engine{'s' * (count != 1)}"
        + (f" of {vllm.devices_per_engine} GPU{'s' * (vllm.devices_per_engine != 1)}" if gpu else ""),
        f"CUDA graphs {'off' if vllm.enforce_eager else 'on'}" if gpu else "",
        f"prefix caching {'on' if vllm.prefix_caching else 'off'}",
        "chunked prefill on" if gpu else "",
        f"{vllm.gpu_memory_utilization:.0%} of a GPU's memory" if gpu else "",
        "its core in a process of its own" if config.placement.backend == "inline" else "",
        "in turns with the models"
        if config.placement.backend == "inline" and takes_turns(config.placement, config.generator, config.platform)
        else "",
    ]
    return ", ".join(part for part in parts if part)
