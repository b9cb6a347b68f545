"""Devices as a plan shows them: GPUs needed and found, who shares which, what each pass holds on one. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyrl_train.errors import Violation


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """One pass of one model at the largest micro-batch that fits; where none does, at one row of the longest."""

    role: str
    phase: str
    """`training` or `scoring`."""
    budget: int
    """Computed positions of a micro-batch that fit whatever the lengths of its rows; 0: not even one row does."""
    rows_of_longest: int
    """Rows of the longest length that the budget holds."""
    moment: str
    """When most is held."""
    kinds: Mapping[str, int]
    """Bytes by kind at that moment, of this model."""
    limit_bytes: int
    """What the pass may hold: the device, less the margin and what else lies on it."""
    measured_tokens: int = 0
    """The budget that a run of the same configuration measured in `output_dir`; 0 where there is none."""
    predicted_tokens: int = 0
    """What is predicted for the memory that it had."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the plan assumes of one device."""

    device_bytes: int
    longest: int
    """Tokens of the longest row: `generator.max_context_length`."""
    margin_bytes: int
    """Left free for fragmentation and the kernels' own space."""
    context_bytes: int
    """CUDA contexts of the processes that share a device."""
    passes: tuple[PassMemory, ...]
    engine_bytes: int
    """What an inference engine that shares the device takes while it generates."""
    resident_bytes: int
    """What models keep on that device meanwhile."""
    effort: str = ""
    """How passes were predicted and how long that took; empty where they were counted."""

    @property
    def engine_fits(self) -> bool:
        """Whether an engine that shares the device has its share beside what the models keep."""
        return self.engine_bytes + self.resident_bytes + self.context_bytes <= self.device_bytes

    def violations(self) -> tuple[Violation, ...]:
        """Return what cannot run on the device."""
        return (*self._too_long(), *self._no_engine())

    def _too_long(self) -> Iterator[Violation]:
        for each in self.passes:
            if not each.budget:
                yield Violation(
                    field="generator.max_context_length",
                    rule=f"one row must fit a device of {gigabytes(self.device_bytes)}: {each.role} {each.phase} of one "
                    f"such row takes {gigabytes(each.peak_bytes)}, and {gigabytes(max(0, each.limit_bytes))} are there",
                    value=str(self.longest),
                    remedy="shorter rows, strategy=fsdp2 over more ranks, model.gradient_checkpointing=true, "
                    "strategy.cpu_offload=true, model.lora.rank=32, or devices that the models do not share",
                )

    def _no_engine(self) -> Iterator[Violation]:
        if not self.engine_fits:
            room = max(0.0, 1 - (self.resident_bytes + self.context_bytes) / self.device_bytes)
            yield Violation(
                field="generator.vllm.gpu_memory_utilization",
                rule=f"must leave the {gigabytes(self.resident_bytes + self.context_bytes)} that models keep on the "
                "device they share with the engine",
                value=f"{self.engine_bytes / self.device_bytes:g}",
                remedy=f"try generator.vllm.gpu_memory_utilization={int(room * 100) / 100:g}, "
                "strategy.cpu_offload=true, or another placement",
            )


def memory_lines(memory: DeviceMemory) -> Iterator[str]:
    """Yield the lines of a terminal on memory."""
    if memory.effort:
        yield f"activations {memory.effort}"
    for each in memory.passes:
        yield (
            f"{each.role:<10} {each.phase:<9} {each.budget:>11,} positions ({each.rows_of_longest:,} rows of "
            f"{memory.longest:,}), {gigabytes(each.peak_bytes)} of {gigabytes(each.limit_bytes)}, most {each.moment}"
        )
        kinds = sorted(each.kinds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {gigabytes(count)}" for kind, count in kinds if count >= 1e6)
        yield from textwrap.wrap(parts, 116, initial_indent=" " * 21, subsequent_indent=" " * 21)
        if each.measured_tokens:
            difference = each.predicted_tokens / each.measured_tokens - 1
            yield (
                f"{'':<21}measured by the run in output_dir: {each.measured_tokens:,} positions; predicted for the memory "
                f"it had: {each.predicted_tokens:,} ({difference:+.1%})"
            )
    if memory.engine_bytes:
        yield (
            f"{'engine':<10} {gigabytes(memory.engine_bytes)} while it generates, beside "
            f"{gigabytes(memory.resident_bytes)} of models"
        )


def gigabytes(count: int) -> str:
    """Return a count of bytes as text, in units of 10^9."""
    return f"{count / 1e9:.3g} GB"


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
        each = f"{group.gpus_per_bundle} GPU{'s' * (group.gpus_per_bundle != 1)}" if group.gpus_per_bundle else "1 CPU"
        where = f" on {group.num_nodes} node{'s' * (group.num_nodes != 1)}" if group.num_nodes else ""
        slots = ", ".join(f"{count} {role}" for role, count in group.slots)
        shared = ", one at a time" if report.shares_devices else ""
        bundles = f"{group.num_bundles} bundle{'s' * (group.num_bundles != 1)} of {each}"
        yield f"{group.name:<10} {bundles}{where}: {slots}{shared}"
    yield f"{'rollouts':<10} {report.engines}"
    yield f"{'training':<10} {report.training}"
