"""Which actor gets which share of which node: placement groups, and slots in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.config.schema import Config
from skyrl_train.errors import SkyrlTrainError

_SHARED_GPU = 0.2
"""Of a GPU that policy, reference, critic and engine share; Ray only counts, so it need not add up to one exactly."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one actor goes: options for `ray.remote(...).options`."""

    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one slot reserves."""

    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The groups of a run, before they are reserved. Roles that share devices share a group."""

    groups: Mapping[str, tuple[Bundle, ...]]
    """Group name to its bundles, one per device (or CPU worker)."""
    roles: Mapping[str, tuple[str, int]]
    """Role to (group, number of slots); slot i is in bundle i."""
    num_nodes: Mapping[str, int] = field(default_factory=dict)
    """Group name to the number of nodes it spreads over."""


def plan_layout(config: Config, *, roles: Sequence[str], num_engines: int) -> Layout:
    """One bundle per rank of the models in `roles` (`policy`, `reference`, `critic`). With `colocate_all` all models and
    engines share bundles; with `colocate_policy_ref` policy and reference do; else each role has devices of its own."""
    placement, gpu = config.placement, config.platform.name == "gpu"
    num_workers = {
        "policy": placement.policy_num_workers,
        "reference": placement.ref_num_workers,
        "critic": placement.critic_num_workers,
    }
    sizes = {role: num_workers[role] for role in roles}
    if num_engines:
        sizes["engine"] = num_engines
    shared = {"policy"}
    if placement.colocate_all:
        shared = set(sizes)
    elif placement.colocate_policy_ref:
        shared |= {"reference"}
    groups_of = {role: ("shared" if role in shared else role, count) for role, count in sizes.items()}
    widest = {group: max(n for name, n in groups_of.values() if name == group) for group, _ in groups_of.values()}
    tensor_parallel = config.generator.vllm.tensor_parallel_size
    groups = {
        name: tuple(
            Bundle(
                cpus=float(sum(1 for group, n in groups_of.values() if group == name and index < n)),
                gpus=float(tensor_parallel if name == "engine" else 1) if gpu else 0.0,
            )
            for index in range(count)
        )
        for name, count in widest.items()
    }
    return Layout(groups=groups, roles=groups_of, num_nodes={"shared": placement.policy_num_nodes})


class Placement:
    """Reserved placement groups. `slots(role)` says where a role's actors go."""

    def __init__(self, layout: Layout, *, timeout_s: float) -> None:
        """Raises SkyrlTrainError where the cluster cannot hold the layout within `timeout_s`."""
        self._layout = layout
        self._groups: dict[str, PlacementGroup] = {}
        for name, bundles in layout.groups.items():
            spread = layout.num_nodes.get(name, 1) > 1
            group = placement_group([bundle.resources for bundle in bundles], strategy="SPREAD" if spread else "PACK")
            self._groups[name] = group
            if not ray.get(group.ready(), timeout=None) if timeout_s <= 0 else not group.wait(timeout_s):
                self.close()
                raise SkyrlTrainError(
                    f"the cluster has no room for {len(bundles)} x {bundles[0].resources} (group {name}) within "
                    f"{timeout_s:g} s; it has {ray.cluster_resources()}. Ask for fewer workers or engines"
                )

    def slots(self, role: str) -> list[Slot]:
        """One per rank or engine, in order."""
        name, count = self._layout.roles[role]
        sharing = sum(1 for group, _ in self._layout.roles.values() if group == name)
        return [
            Slot(
                options={
                    "num_cpus": 1,
                    "num_gpus": bundle.gpus if sharing == 1 else bundle.gpus * _SHARED_GPU,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        placement_group=self._groups[name], placement_group_bundle_index=index
                    ),
                }
            )
            for index, bundle in enumerate(self._layout.groups[name][:count])
        ]

    def close(self) -> None:
        """Gives the reservations back."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}


def num_cpus(layout: Layout) -> int:
    """CPUs that a session of one machine must offer for the layout."""
    return int(sum(bundle.cpus for bundles in layout.groups.values() for bundle in bundles))


def all_bundles(layout: Layout) -> Sequence[Bundle]:
    """Every bundle of every group."""
    return [bundle for bundles in layout.groups.values() for bundle in bundles]
