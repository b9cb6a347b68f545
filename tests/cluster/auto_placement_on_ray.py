"""`placement=auto` on Ray clusters with stated numbers of GPUs: what is counted, chosen and reserved, and the tiny model
trained in the very bundles, on the CPU over gloo.

Run by `test_auto_placement.py` in a process of its own: a process can be connected to one Ray session only. Prints a line
of JSON for each number of GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112

import ray
from ray.cluster_utils import Cluster

from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Placement
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.derived import layout_of
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.runs.cli import place
from tests.cluster.several_nodes import Probe
from tests.support.auto_placement_cases import COUNTS, gpu_config
from tests.support.learner_cases import settings_of
from tests.support.ray_learners import make_config, three_steps, weights_of


def reserved(config: Config) -> Placement:
    return Placement(layout_of(config), timeout_s=config.placement.start_timeout_s)


def devices(placement: Placement, role: str) -> list[str]:
    """Node and GPU of each of the role's actors."""
    probes = [ray.remote(Probe).options(**slot.options).remote() for slot in placement.slots(role)]
    found: list[str] = ray.get([probe.where.remote() for probe in probes], timeout=120)
    for probe in probes:
        ray.kill(probe)
    return found


def trained(session: RaySession, placement: Placement, folder: Path, num_ranks: int) -> float:
    """The sum of all weights after three steps of FSDP2 ranks in the policy's bundles."""
    config = make_config(folder, strategy="fsdp2")
    config = replace(config, placement=replace(config.placement, policy_num_workers=num_ranks))
    learner = start_learner(settings_of(config, "policy"), config.placement, session, placement.slots("policy"))()
    three_steps(learner)
    total = sum(float(tensor.double().abs().sum()) for tensor in weights_of(learner).values())
    learner.close()
    return total


def refusal() -> dict[str, Any]:
    """Of a stated placement for more GPUs than the cluster has: what it says and after how long."""
    began = time.monotonic()
    try:
        reserved(gpu_config("placement=gpu_8_colocated", "placement.policy_num_gpus_per_node=9"))
    except SkyrlTrainError as error:
        return {"says": str(error), "seconds": time.monotonic() - began}
    return {"says": "", "seconds": 0.0}


def on_cluster(count: int, folder: Path) -> dict[str, Any]:
    cluster = Cluster()
    cluster.add_node(num_cpus=32, num_gpus=count, object_store_memory=100 * 2**20)
    config = place(gpu_config("model.path=Qwen/Qwen2.5-0.5B", f"placement.ray_address={cluster.address}"))
    address = PlacementConfig(ray_address=cluster.address, start_timeout_s=120.0)
    session = RaySession(address, num_cpus=0, name="auto")
    try:
        placement = reserved(config)
        found = {role: devices(placement, role) for role in ("policy", "engine")}
        result = {**found, "trained": trained(session, placement, folder, count)}
        placement.close()
        return {**result, "refusal": refusal()}
    finally:
        session.close()
        cluster.shutdown()


if __name__ == "__main__":
    for count in COUNTS:
        print(json.dumps({"count": count, **on_cluster(count, Path(sys.argv[1]))}), flush=True)
