"""A run that lost a worker or a node goes on by itself from its last checkpoint, as if the same command were given again.

    attempt --ActorLostError--> everything of it is closed: actors, reservations, the session
            <--- the next one --- the configuration; where the cluster lost nodes for good and it is allowed, on fewer ranks

An attempt is the whole of a run behind its data: it looks for the checkpoint, builds and trains, so that what follows a
restart is what follows a resume by hand. Only processes that died or hang, and nodes, are answered so. Whatever else ends a
run would end it again: a mistake of the user's, a loss that raises, memory that does not suffice.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.config import AnyConfig, Config, LoopConfig
from skyrl_train.config.derived import layout_of
from skyrl_train.config.models import ROLES, PlacementConfig
from skyrl_train.config.placement import missing_room
from skyrl_train.errors import ActorLostError, ConfigError, SkyrlTrainError, StopRequested, counted
from skyrl_train.runs.cli.placement import rule_violations
from skyrl_train.telemetry.logs import RunConsole

C = TypeVar("C", bound=AnyConfig)
OnEnd = Callable[[BaseException | None], None]
"""Told how a run ended, before any part of it is closed."""

logger = logging.getLogger(__name__)


def tell_nobody(error: BaseException | None) -> None:
    """The `OnEnd` of a caller who handles errors himself."""


@dataclass(kw_only=True)
class Restarts:
    """What attempts of one run know of those before them."""

    file: Path
    """`restarts.jsonl`, a line for each restart."""
    count: int = 0
    """Restarts of this process so far."""
    reason: str = ""
    """What the last one answers."""
    recorded: int = 0
    """Restarts whose line is written."""
    limit: int = 0
    """Most restarts of this process: `trainer.max_restarts`."""
    on_end: OnEnd = tell_nobody
    """Told of how the run ends, before the last attempt's parts are closed."""

    def ends(self, error: BaseException | None) -> None:
        """Pass on how an attempt ended; where another one follows, say why before anything is closed."""
        lost = None if error is None else self.answered(error)
        if lost is None:
            self.on_end(error)
        else:
            logger.warning("%s: %s", type(lost).__name__, lost)

    def answered(self, error: BaseException) -> ActorLostError | None:
        """The loss among the causes of an error that is answered by another attempt, if there is one."""
        lost = _lost_worker(error)
        never_worked = lost is not None and lost.phase == "start" and not self.count
        return None if never_worked or self.count >= self.limit else lost

    def resume(self, trainer: LoopConfig) -> LoopConfig:
        """Return `trainer` as this attempt looks for its start: after a restart from the newest checkpoint of this run,
        where it has one."""
        is_begun = next((self.file.parent / "checkpoints").glob("step_*"), None) is not None
        return replace(trainer, resume_mode="latest", resume_path="") if self.count and is_begun else trainer

    def begun(self, global_step: int, *, policy_num_workers: int) -> None:
        """Write the line of a restart that goes on after `global_step` on so many ranks, once the run's folder is prepared
        for it."""
        if self.recorded == self.count:
            return
        self.recorded = self.count
        line = {
            "restart": self.count,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "after_step": global_step,
            "policy_num_workers": policy_num_workers,
            "reason": self.reason,
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _lost_worker(error: BaseException) -> ActorLostError | None:
    """The loss that ended an attempt, be it that closing what was left of it failed as well."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (StopRequested, ConfigError)):
        if isinstance(seen, ActorLostError):
            return seen
        seen = seen.__context__
    return None


def with_room(config: C, console: RunConsole) -> C:
    """Return the configuration with as many ranks as the cluster has room for, where `placement.allow_fewer_workers`.

    Raises SkyrlTrainError where the nodes that are left hold no number of ranks that the batch sizes allow.
    """
    if not config.placement.allow_fewer_workers:
        return config
    from skyrl_train.cluster import wait_for_room

    nodes = wait_for_room(config.placement, lambda found: missing_room(layout_of(config), found) is None)
    candidates: Iterator[C] = itertools.chain([config], smaller(config))
    for candidate in candidates:
        if missing_room(layout_of(candidate), nodes) is None:
            if candidate is not config:
                was, now = config.placement.policy_num_workers, candidate.placement.policy_num_workers
                console.warn(
                    f"what is left, {counted(len(nodes), 'node')}, holds {counted(now, 'rank')} of the policy in place of "
                    f"{was}"
                )
            return candidate
    raise SkyrlTrainError(
        f"what is left, {counted(len(nodes), 'node')}, has no room for any number of ranks that the batch sizes allow: "
        f"{missing_room(layout_of(config), nodes)}. Wait for others with placement.wait_for_nodes_s"
    )


def smaller(config: C) -> Iterator[C]:
    """Yield the configuration on fewer ranks, or with fewer nodes for engines, as far as its rules allow: the most ranks
    first, and of as many ranks the most engines."""
    placement = config.placement
    nodes = placement.policy_num_nodes
    each = max(1, placement.policy_num_workers // nodes)
    sizes = [
        (node_count * per_node, engine_nodes, node_count)
        for node_count in range(1, nodes + 1)
        for per_node in range(1, each + 1)
        for engine_nodes in range(min(1, placement.inference_num_nodes), placement.inference_num_nodes + 1)
    ]
    for num_ranks, engine_nodes, node_count in sorted(sizes, reverse=True):
        if (num_ranks, engine_nodes) == (nodes * each, placement.inference_num_nodes):
            continue
        candidate = _resized(config, node_count, num_ranks // node_count, engine_nodes)
        if not rule_violations(candidate):
            yield candidate


def _resized(config: C, num_nodes: int, per_node: int, engine_nodes: int) -> C:
    # Each rank holds more, beside which others may have no room.
    changes: dict[str, Any] = {"inference_num_nodes": engine_nodes, "offload": True}
    for role in ROLES:
        own_nodes = getattr(config.placement, f"{role}_num_nodes")
        own_each = max(1, getattr(config.placement, f"{role}_num_workers") // own_nodes)
        nodes, each = min(num_nodes, own_nodes), min(per_node, own_each)
        stated = getattr(config.placement, f"{role}_num_gpus_per_node")
        changes |= {
            f"{role}_num_nodes": nodes,
            f"{role}_num_gpus_per_node": min(each, stated),
            f"{role}_num_workers": nodes * each,
        }
    placement: PlacementConfig = replace(config.placement, **changes)
    if isinstance(config, Config):
        # as many engines as the devices that are left hold
        vllm = replace(config.generator.vllm, num_engines=0) if _follows(placement) else config.generator.vllm
        generator = replace(config.generator, vllm=vllm)
        return replace(config, placement=placement, generator=generator)
    return replace(config, placement=placement)


def _follows(placement: PlacementConfig) -> bool:
    """Whether engines lie where nodes or ranks were lost, so that their number follows from what is left."""
    return placement.colocate_all or placement.inference_num_nodes > 0
