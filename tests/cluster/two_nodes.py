"""A cluster of two nodes on one machine (two raylets), and who writes the rollouts whose arrays lie on both.

    python -m tests.cluster.two_nodes FOLDER

Run by `test_two_nodes.py` in a process of its own: a process can be connected to one Ray session only. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.batch.plane import DataPlane, arrays_of, facts_in, trajectories_of
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.stored import RayPlane, StoredArrays, put_durably
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import SaveError
from skyrl_train.runs import assembler
from skyrl_train.trainers import RolloutLog, steps
from skyrl_train.types import RolloutBatch, Trajectory
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn


class Engine:
    """Has rollouts arise in a process of its own, on some node."""

    def roll_out(self, trajectories: list[Trajectory], file: str) -> tuple[StoredArrays, dict[str, Any]]:
        arrays = arrays_of(trajectories)
        return put_durably(arrays, Path(file)), facts_in(arrays)


def told(function: Callable[..., Any], full: str, *args: Any) -> tuple[Any, str]:
    """What a function gives, and on which node; the disk of the node `full` is so."""
    node = ray.get_runtime_context().get_node_id()
    if node == full:
        raise OSError(28, "No space left on device")
    return function(*args), node


class Listening(RayPlane):
    """Remembers on which node each call of `save` was answered."""

    answered: list[str]
    full = ""

    def save(self, function: Callable[..., Any], calls: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        found = super().save(told, {node: (function, self.full, *args) for node, args in calls.items()})
        self.answered = [node for _, node in found]
        return [each for each, _ in found]


def rollouts() -> RolloutBatch:
    """Groups of two."""
    made = []
    for number, prompt in enumerate(make_prompts(4)):
        first = make_turn((1, number), (3, 4), reward=float(number))
        second = make_turn((1, number, 3, 4, 7), range(5, 9 + number), reward=0.5)
        other = failed_trajectory(sample=1) if number % 2 else make_trajectory(first, sample=1)
        made += [replace(each, prompt_uid=prompt.uid) for each in (make_trajectory(first, second, sample=0), other)]
    return RolloutBatch(prompts=tuple(make_prompts(4)), trajectories=tuple(made), n_samples_per_prompt=2)


def written(folder: Path, plane: DataPlane, made: RolloutBatch) -> None:
    """The log of a step, with advantages."""
    config = make_config(folder, train_batch_size=4, policy_mini_batch_size=2)
    config = replace(config, generator=replace(config.generator, n_samples_per_prompt=2))
    batch = plane.make_rows(assembler(config), made, step=1, weight_version=0)
    batch = plane.add_columns(steps.estimate, batch, config.trainer.algorithm, kl_coef=0.0, seed=1)
    log = RolloutLog(folder, plane=plane)
    log.write(made, batch, step=1)
    try:
        log.flush()
    finally:
        log.close()


def main(folder: Path) -> None:
    made, node = rollouts(), {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(**node)
    placement = PlacementConfig(
        ray_address=cluster.address, start_timeout_s=600.0, call_timeout_s=600.0, silence_timeout_s=120.0
    )
    session = RaySession(placement, num_cpus=0, name="two-nodes")
    nodes = [each["NodeID"] for each in ray.nodes()]
    try:
        plane = Listening(session, placement, num_threads=1, together="prompt")
        owners = []
        for each in nodes:
            there = NodeAffinitySchedulingStrategy(each, soft=False)
            options = {"num_cpus": 0, "runtime_env": session.runtime_env(1), "scheduling_strategy": there}
            owners.append(ray.remote(max_restarts=0)(Engine).options(**options).remote())
        asked = []
        for number in range(4):  # prompts 0 and 2 arise on the first node
            trajectories = list(made.trajectories[2 * number : 2 * number + 2])
            asked.append(owners[number % 2].roll_out.remote(trajectories, str(folder / f"{number}.safetensors")))
        pieces = ray.get(asked, timeout=600)

        def held() -> RolloutBatch:
            return replace(made, trajectories=tuple(each for piece in pieces for each in trajectories_of(*piece)))

        result: dict[str, Any] = {"nodes": nodes, "put": [source.node for source, _ in pieces]}
        written(folder / "here", DataPlane(), made)
        written(folder / "there", plane, held())
        result["answered"] = plane.answered
        plane.full = nodes[1]
        try:
            written(folder / "refused", plane, held())
        except SaveError as error:
            result["refused"] = str(error)
        plane.full = ""
        source, facts = pieces[3]
        pieces[3] = StoredArrays(source.reference, source.file, "of a node that has no worker"), facts
        ray.kill(owners[1])
        written(folder / "after", plane, held())
        of_one = replace(made, trajectories=tuple(plane.hold(made).trajectories))
        written(folder / "one", plane, of_one)
        result["answered_for_one"] = plane.answered
        print(json.dumps(result))
        plane.close()
    finally:
        session.close()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
