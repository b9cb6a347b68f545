"""Which actor gets which share of which node: placement groups, and slots in them.

A device is a bundle of its own, so that what shares it shares all of it. Bundles that must lie on certain nodes are bound
to them: first one reservation of whole shares of nodes finds nodes that differ (a cluster that grows by itself grows for
it), then the bundles are reserved there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.config.placement import PlacementConfig
from skyrl_train.config.schema import Config
from skyrl_train.errors import SkyrlTrainError

_SHARED_GPU = 0.2
"""Of a GPU that policy, reference, critic and engine share; Ray only counts, so it need not add up to one exactly."""
_NODE_ID = "ray.io/node-id"
_SETTINGS = {"policy": "policy", "reference": "ref", "critic": "critic"}


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one actor goes: options for `ray.remote(...).options`."""

    options: Mapping[str, Any]


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


def plan_layout(config: Config, *, roles: Sequence[str], num_engines: int) -> Layout:
    """One bundle per rank of the models in `roles` (`policy`, `reference`, `critic`). With `colocate_all` all models and
    engines share bundles; with `colocate_policy_ref` policy and reference do; else each role has devices of its own.

    Models whose nodes are stated lie there, node by node in the order of ranks; different models may share a node.
    Engines for which `inference_num_nodes` asks have nodes on which nothing else is.
    """
    placement, gpu = config.placement, config.platform.name == "gpu"
    sizes = {role: getattr(placement, f"{_SETTINGS[role]}_num_workers") for role in roles}
    if num_engines:
        sizes["engine"] = num_engines
    members: dict[str, dict[str, int]] = {}
    for role, count in sizes.items():
        members.setdefault("shared" if role in _sharing(placement) else role, {})[role] = count
    num_model_nodes = max((_nodes_of(placement, group) for group in members if group != "engine"), default=0)
    groups, seats = {}, {}
    for group, counts in members.items():
        nodes = _nodes_of(placement, group)
        first = num_model_nodes if group == "engine" else 0
        gpus = config.generator.vllm.tensor_parallel_size if group == "engine" else 1
        per_node = max(counts.values()) // max(1, nodes)
        taken = {role: tuple(_spread(count, max(1, nodes), per_node)) for role, count in counts.items()}
        seats.update({role: (group, places) for role, places in taken.items()})
        groups[group] = tuple(
            Bundle(
                cpus=float(sum(index in places for places in taken.values())),
                gpus=float(gpus) if gpu else 0.0,
                node=first + index // per_node if nodes else None,
            )
            for index in range(max(1, nodes) * per_node)
        )
    return Layout(groups=groups, seats=seats)


def _sharing(placement: PlacementConfig) -> set[str]:
    if placement.colocate_all:
        return {"policy", "reference", "critic", "engine"}
    return {"policy", "reference"} if placement.colocate_policy_ref else {"policy"}


def _nodes_of(placement: PlacementConfig, group: str) -> int:
    """How many nodes a group is bound to; 0 where it goes wherever there is room."""
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


class Placement:
    """Reserved placement groups. `slots(role)` says where a role's actors go."""

    def __init__(self, layout: Layout, *, timeout_s: float) -> None:
        """Raises SkyrlTrainError where the cluster cannot hold the layout within `timeout_s`."""
        self._layout = layout
        self._groups: dict[str, PlacementGroup] = {}
        deadline = time.monotonic() + timeout_s
        node_ids = _find_nodes(layout.nodes, deadline)
        try:
            for name, bundles in layout.groups.items():
                self._groups[name] = _reserve(
                    bundles,
                    "PACK",
                    deadline,
                    what=f"group {name}",
                    node_ids=[None if bundle.node is None else node_ids[bundle.node] for bundle in bundles],
                )
        except BaseException:
            self.close()
            raise

    def slots(self, role: str) -> list[Slot]:
        """One per rank or engine, in order."""
        name, places = self._layout.seats[role]
        sharing = sum(group == name for group, _ in self._layout.seats.values())
        return [
            Slot(
                options={
                    "num_cpus": 1,
                    "num_gpus": self._layout.groups[name][place].gpus * (1 if sharing == 1 else _SHARED_GPU),
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        placement_group=self._groups[name], placement_group_bundle_index=place
                    ),
                }
            )
            for place in places
        ]

    def close(self) -> None:
        """Gives the reservations back."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}


def num_cpus(layout: Layout) -> int:
    """CPUs that a session of one machine must offer for the layout."""
    return int(sum(bundle.cpus for bundles in layout.groups.values() for bundle in bundles))


def _find_nodes(nodes: Sequence[Bundle], deadline: float) -> dict[int, str]:
    """Ids of nodes that differ and have room, by their number in the layout."""
    if not nodes:
        return {}
    group = _reserve(nodes, "STRICT_SPREAD", deadline, what="nodes that differ")
    try:
        placed: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return {bundle.node: placed[index] for index, bundle in enumerate(nodes) if bundle.node is not None}
    finally:
        remove_placement_group(group)


def _reserve(
    bundles: Sequence[Bundle],
    strategy: str,
    deadline: float,
    *,
    what: str,
    node_ids: Sequence[str | None] = (),
) -> PlacementGroup:
    selectors = [{_NODE_ID: node} if node else {} for node in node_ids]
    group = placement_group(
        [bundle.resources for bundle in bundles],
        strategy=strategy,
        **({"bundle_label_selector": selectors} if any(selectors) else {}),
    )
    if group.wait(max(0.1, deadline - time.monotonic())):
        return group
    remove_placement_group(group)
    wanted = ", ".join(f"{bundle.resources}" for bundle in {replace(bundle, node=None): None for bundle in bundles})
    raise SkyrlTrainError(
        f"the cluster has no room for {len(bundles)} x {wanted} ({what}) in time; its nodes have {_free_resources()}. "
        "Ask for fewer workers, engines or nodes, or wait longer (placement.start_timeout_s)"
    )


def _free_resources() -> str:
    return "; ".join(
        ", ".join(f"{name} {node['Resources'].get(name, 0.0):g}" for name in ("CPU", "GPU"))
        for node in ray.nodes()
        if node["Alive"]
    )
