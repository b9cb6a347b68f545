"""Devices as a plan shows them: GPUs needed and found, and who shares which. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_train.errors import counted


@dataclass(frozen=True, kw_only=True)
class BundleGroup:
    """Devices that are reserved together, and what computes on them."""

    name: str
    num_bundles: int
    gpus_per_bundle: int
    num_nodes: int
    """Nodes that it is bound to; 0 is any node with room."""
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
    shares_devices: bool
    """Whether models and engines share devices, one of them computing at a time."""
    groups: tuple[BundleGroup, ...]
    """None without Ray."""
    engines: str
    """What makes rollouts, in words."""
    training: str
    """Layout and micro-batches, in words."""


def placement_lines(report: PlacementReport) -> Iterator[str]:
    """Yield the lines of a terminal on placement."""
    if report.gpus_needed or report.gpus_found:
        found = f", {report.gpus_found} found ({report.found_in})" if report.found_in else ""
        yield f"{'GPUs':<10} {report.gpus_needed} needed{found}"
    yield f"{'backend':<10} {report.backend}, strategy {report.strategy}"
    for group in report.groups:
        each = f"{counted(group.gpus_per_bundle, 'GPU')}" if group.gpus_per_bundle else "1 CPU"
        where = f" on {counted(group.num_nodes, 'node')}" if group.num_nodes else ""
        slots = ", ".join(f"{count} {role}" for role, count in group.slots)
        shared = ", one at a time" if report.shares_devices else ""
        bundles = f"{counted(group.num_bundles, 'bundle')} of {each}"
        yield f"{group.name:<10} {bundles}{where}: {slots}{shared}"
    yield f"{'rollouts':<10} {report.engines}"
    yield f"{'training':<10} {report.training}"
