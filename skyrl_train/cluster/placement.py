"""Which actor gets which share of which node: placement groups, and slots in them.

A device is a bundle of its own, so that what shares it shares all of it. Bundles that must lie on certain nodes are bound
to them: first one reservation of whole shares of nodes finds nodes that differ, then the bundles are reserved there.
What the nodes can never hold is refused at once, unless others are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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

from skyrl_train.cluster.session import RaySession
from skyrl_train.config.placement import Bundle, Layout, missing_room
from skyrl_train.errors import DeadlineError, SkyrlTrainError

_SHARED_GPU = 0.2
"""Share of a GPU for each of policy, reference, critic and engine; Ray only counts, so their sum need not be exactly one."""
_ASK_TIMEOUT_S = 120.0
"""Deadline of starting a worker in each bundle of a group."""
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The reservation that one actor takes, and the GPUs that it sees."""

    options: Mapping[str, Any]
    """For `ray.remote(...).options`."""
    visible_devices: tuple[str, ...] = ()
    """Ids of the node's GPUs that the actor is to see in place of the share that Ray gives it; empty leaves that."""


class Placement:
    """Reserved placement groups. `slots(role)` says where a role's actors go."""

    def __init__(self, layout: Layout, *, timeout_s: float, wait_for_nodes_s: float = 0.0) -> None:
        """Raises SkyrlTrainError at once where the nodes that there are can never hold the layout, and after `timeout_s`
        where something else occupies them. With `wait_for_nodes_s` others may join meanwhile, or be added by an
        autoscaler, which looks at what is asked for: the layout is asked for at once, and given up at the later of the
        two deadlines."""
        if not wait_for_nodes_s:
            _require_nodes(layout)
        self._layout = layout
        self._groups: dict[str, PlacementGroup] = {}
        deadline = time.monotonic() + max(timeout_s, wait_for_nodes_s)
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
        """Return one slot per rank or engine. Raises SkyrlTrainError where an engine would lie on several nodes."""
        name, places = self._layout.seats[role]
        sharing = sum(group == name for group, _ in self._layout.seats.values())
        span = self._layout.bundles_per_engine if role == "engine" else 1
        devices = _devices_of(self._groups[name]) if span > 1 and self._layout.groups[name][0].gpus else {}
        return [
            Slot(
                options={
                    "num_cpus": 1,
                    "num_gpus": self._layout.groups[name][place].gpus * (1 if sharing == 1 else _SHARED_GPU),
                    "scheduling_strategy": _in_bundle(self._groups[name], place),
                },
                visible_devices=_on_one_node([devices[place + offset] for offset in range(span)]) if devices else (),
            )
            for place in places
        ]

    def close(self) -> None:
        """Remove the placement groups, so that others may have what they reserve."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}


def _require_nodes(layout: Layout) -> None:
    if problem := missing_room(layout, [node["Resources"] for node in ray.nodes() if node["Alive"]]):
        raise SkyrlTrainError(
            f"the cluster has no room for this run: {problem}. Its nodes have {_free_resources()}. Ask for fewer workers, "
            "engines or nodes (placement=auto takes what there is), or wait for nodes that are still to come "
            "(placement.wait_for_nodes_s=600)"
        )


def _in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _devices_of(group: PlacementGroup) -> dict[int, tuple[str, str]]:
    """Node and GPU of each bundle of one GPU: Ray tells them to whoever runs there."""
    ask, env = ray.remote(_own_device), RaySession.runtime_env(1)
    refs = [
        ask.options(
            num_cpus=0, num_gpus=_SHARED_GPU, runtime_env=env, scheduling_strategy=_in_bundle(group, index)
        ).remote()
        for index in range(group.bundle_count)
    ]
    try:
        return dict(enumerate(ray.get(refs, timeout=_ASK_TIMEOUT_S)))
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError("asking Ray which GPU each bundle has", _ASK_TIMEOUT_S) from None


def _own_device() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_accelerator_ids()["GPU"][0])


def _on_one_node(devices: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The GPUs of an engine. Raises SkyrlTrainError where they are not on one node."""
    if len({node for node, _ in devices}) > 1:
        raise SkyrlTrainError(
            f"the {len(devices)} GPUs of an engine lie on different nodes (generator.vllm.tensor_parallel_size with "
            "placement.colocate_all). State nodes and their GPUs, so that ranks fill one node after the other: "
            "placement.policy_num_nodes and placement.policy_num_gpus_per_node"
        )
    return tuple(device for _, device in devices)


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
        "Ask for fewer workers, engines or nodes, or wait longer (placement.start_timeout_s, placement.wait_for_nodes_s)"
    )


def _free_resources() -> str:
    return "; ".join(
        ", ".join(f"{name} {node['Resources'].get(name, 0.0):g}" for name in ("CPU", "GPU"))
        for node in ray.nodes()
        if node["Alive"]
    )
