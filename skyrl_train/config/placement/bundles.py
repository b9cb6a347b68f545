"""Which devices a run reserves: bundles of them, and the seat of each rank and engine. No Ray: a plan shows the same.

A device is a bundle of its own, so that what shares it shares all of it. `cluster/placement.py` reserves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig
from skyrl_train.errors import counted

Role = Literal["policy", "reference", "critic"]
_SETTINGS = {"policy": "policy", "reference": "ref", "critic": "critic"}
"""Role to the first part of its settings' names."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What is reserved together: the share of one device, or of one node."""

    cpus: float
    gpus: float
    node: int | None = None
    """Which of the layout's nodes it must lie on; None is any."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The groups of a run, before they are reserved. Roles that share devices share a group."""

    groups: Mapping[str, tuple[Bundle, ...]]
    """Group name to its bundles, one per device (or CPU worker)."""
    seats: Mapping[str, tuple[str, tuple[int, ...]]]
    """Role to its group and the bundle of each of its slots."""
    bundles_per_engine: int = 1
    """Bundles, from its seat on, on whose devices one engine computes: more than one where it shares them with ranks."""

    @property
    def num_gpus(self) -> int:
        """All that are reserved; 0 on a CPU."""
        return int(sum(bundle.gpus for bundles in self.groups.values() for bundle in bundles))

    @property
    def nodes(self) -> tuple[Bundle, ...]:
        """What must be free on nodes that differ, for the bundles that are bound to one."""
        bound = [bundle for bundles in self.groups.values() for bundle in bundles if bundle.node is not None]
        return tuple(
            Bundle(
                cpus=sum(bundle.cpus for bundle in bound if bundle.node == node),
                gpus=sum(bundle.gpus for bundle in bound if bundle.node == node),
                node=node,
            )
            for node in sorted({bundle.node for bundle in bound if bundle.node is not None})
        )


def plan_layout(
    placement: PlacementConfig, *, roles: Sequence[str], gpu: bool, num_engines: int = 0, devices_per_engine: int = 1
) -> Layout:
    """One bundle per rank of the models in `roles` (`policy`, `reference`, `critic`). With `colocate_all` all models and
    engines share bundles; with `colocate_policy_ref` policy and reference do; else each role has devices of its own.

    Models whose nodes are stated lie there, node by node in the order of ranks; different models may share a node.
    Engines for which `inference_num_nodes` asks have nodes on which nothing else is. An engine of several devices that it
    shares with nobody has them in one bundle; else it lies on the bundles of consecutive ranks.
    """
    sizes = {role: getattr(placement, f"{_SETTINGS[role]}_num_workers") for role in roles}
    if num_engines:
        sizes["engine"] = num_engines
    members: dict[str, dict[str, int]] = {}
    for role, count in sizes.items():
        members.setdefault("shared" if role in _sharing(placement) else role, {})[role] = count
    num_model_nodes = max((_nodes_of(placement, group) for group in members if group != "engine"), default=0)
    span = devices_per_engine if "engine" in _sharing(placement) else 1
    groups, seats = {}, {}
    for group, roles_in_group in members.items():
        counts = {role: count * (span if role == "engine" else 1) for role, count in roles_in_group.items()}
        nodes = _nodes_of(placement, group)
        first = num_model_nodes if group == "engine" else 0
        gpus = devices_per_engine if group == "engine" else 1
        per_node = max(counts.values()) // max(1, nodes)
        taken = {
            role: tuple(_spread(count, max(1, nodes), per_node))[:: span if role == "engine" else 1]
            for role, count in counts.items()
        }
        seats.update({role: (group, places) for role, places in taken.items()})
        groups[group] = tuple(
            Bundle(
                cpus=float(sum(index in places for places in taken.values())),
                gpus=float(gpus) if gpu else 0.0,
                node=first + index // per_node if nodes else None,
            )
            for index in range(max(1, nodes) * per_node)
        )
    return Layout(groups=groups, seats=seats, bundles_per_engine=span if num_engines else 1)


def _sharing(placement: PlacementConfig) -> set[str]:
    if placement.colocate_all:
        return {"policy", "reference", "critic", "engine"}
    return {"policy", "reference"} if placement.colocate_policy_ref else {"policy"}


def _nodes_of(placement: PlacementConfig, group: str) -> int:
    """How many nodes a group is bound to; 0 if any node with room will do."""
    if group == "engine":
        return placement.inference_num_nodes
    setting = "policy" if group == "shared" else _SETTINGS[group]
    nodes: int = getattr(placement, f"{setting}_num_nodes")
    stated = nodes > 1 or getattr(placement, f"{setting}_num_gpus_per_node") or placement.inference_num_nodes
    return nodes if stated else 0


def _spread(count: int, nodes: int, per_node: int) -> Iterable[int]:
    """The bundle of each of `count` slots: equally many on each node, the first bundles of it."""
    share = max(1, count // nodes)
    for slot in range(count):
        node, place = divmod(slot, share)
        yield node * per_node + place


def count_engines(generator: GeneratorConfig, placement: PlacementConfig) -> int:
    """Engines that the run starts on devices that it reserves; 0 for every other generator."""
    return generator.vllm.count(placement) if generator.has_own_devices else 0


def shares_devices(placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig) -> bool:
    """Whether models and engines are on the same devices, one of them at a time: on Ray where the placement says so, without
    it also where an engine of this machine would fill the GPU that the models are on."""
    if placement.backend == "inline":
        return count_engines(generator, placement) > 0 and (placement.colocate_all or platform.name == "gpu")
    return placement.colocate_all


def leaves_devices(placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig) -> bool:
    """Whether models and engines that share devices are off them while others work; where nobody has decided they are."""
    return placement.offload is not False and shares_devices(placement, generator, platform)


def num_cpus(layout: Layout) -> int:
    """CPUs that a session of one machine must offer for the layout."""
    return int(sum(bundle.cpus for bundles in layout.groups.values() for bundle in bundles))


def missing_room(layout: Layout, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What of the layout can never be placed on nodes with these `CPU` and `GPU`, whatever else runs there; None where
    nothing forbids it. The answer names what is too large; it errs on the side of letting Ray try."""
    for name, bundles in layout.groups.items():
        for bundle in bundles:
            if not any(_holds(node, bundle) for node in nodes):
                if name == "engine" and bundle.gpus > 1:
                    return (
                        f"an engine needs {bundle.gpus:g} GPUs of one node (generator.vllm.tensor_parallel_size): engines "
                        "over several nodes are not supported"
                    )
                return f"group {name} needs {_amount(bundle)} on one node"
    for share in layout.nodes:
        at_least = [other for other in layout.nodes if other.gpus >= share.gpus and other.cpus >= share.cpus]
        if sum(_holds(node, share) for node in nodes) < len(at_least):
            return f"{counted(len(at_least), 'node')} with {_amount(share)} each are needed"
    for resource in ("GPU", "CPU"):
        wanted = sum(bundle.resources.get(resource, 0.0) for bundles in layout.groups.values() for bundle in bundles)
        there = sum(node.get(resource, 0.0) for node in nodes)
        if wanted > there:
            return f"{wanted:g} {resource}s are needed, and there are {there:g}"
    return None


def _holds(node: Mapping[str, float], bundle: Bundle) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.resources.items())


def _amount(bundle: Bundle) -> str:
    return " and ".join(f"{amount:g} {name}s" for name, amount in bundle.resources.items())
