"""A cluster of three nodes on one machine (three raylets with pretended GPUs), and where ranks and engines come to lie.

Run by `test_several_nodes.py` in a process of its own: a process can be connected to one Ray session only. Prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Placement, Slot
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.config.models import PlacementConfig
from skyrl_train.config.placement import plan_layout
from skyrl_train.errors import SkyrlTrainError
from tests.support.learner_cases import settings_of
from tests.support.ray_learners import make_config, three_steps, weights_of

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
NUM_NODES, NUM_CPUS, NUM_GPUS = 3, 10, 4
Seats = dict[str, list[str]]


TOKEN = "hf_" + "A1b2C3d4" * 4
VARIABLES = {"NCCL_DEBUG": "VERSION", "GLOO_X": "1", "HF_HOME": "/models", "WANDB_MODE": "offline", "HF_TOKEN": TOKEN}
"""Of the command, set after the nodes were started."""


class Probe:
    """Says where it is."""

    def __init__(self, visible_devices: tuple[str, ...] = ()) -> None:
        self._visible_devices = visible_devices

    def where(self) -> str:
        context = ray.get_runtime_context()
        devices = self._visible_devices or context.get_accelerator_ids()["GPU"]
        return f"{context.get_node_id()} GPU {','.join(map(str, devices))}"


def reserved(
    address: str, *, engines: int = 0, tensor_parallel: int = 1, timeout_s: float = 60.0, **settings: Any
) -> Placement:
    layout = plan_layout(
        PlacementConfig(backend="ray", ray_address=address, **settings),
        roles=("policy", "reference"),
        gpu=True,
        num_engines=engines,
        devices_per_engine=tensor_parallel,
    )
    return Placement(layout, timeout_s=timeout_s)


def nodes(address: str, **settings: Any) -> Seats:
    """Role to the node of each of its slots, as Ray reserved them."""
    placement = reserved(address, **settings)
    found: Seats = {}
    for role in ("policy", "reference", "engine")[: 3 if settings.get("engines") else 2]:
        strategies = [slot.options["scheduling_strategy"] for slot in placement.slots(role)]
        found[role] = [
            placement_group_table(strategy.placement_group)["bundles_to_node_id"][strategy.placement_group_bundle_index]
            for strategy in strategies
        ]
    placement.close()
    return found


def devices(address: str, **settings: Any) -> Seats:
    """Role to the node and GPU of each of its actors."""
    placement = reserved(address, **settings)
    probes = {
        role: [ray.remote(Probe).options(**slot.options).remote(slot.visible_devices) for slot in placement.slots(role)]
        for role in ("policy", "engine")
    }
    found = {role: ray.get([probe.where.remote() for probe in own], timeout=120) for role, own in probes.items()}
    for probe in (probe for own in probes.values() for probe in own):
        ray.kill(probe)
    placement.close()
    return found


class Environment:
    """Says which of `VARIABLES` it has."""

    def __init__(self, *, secrets: dict[str, str]) -> None:
        os.environ.update(secrets)

    def found(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def environment() -> dict[str, str]:
    """Of an actor that is started as the workers are."""
    os.environ.update(VARIABLES)
    options = {"runtime_env": RaySession.runtime_env(1), "num_cpus": 0}
    actor = ray.remote(Environment).options(**options).remote(secrets=forwarded_environment(secret=True))
    found: dict[str, str] = ray.get(actor.found.remote(), timeout=120)
    ray.kill(actor)
    for name in VARIABLES:
        del os.environ[name]
    return found


def logs_with(text: str) -> list[str]:
    """Files of Ray's session that hold the text."""
    folder = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    return [str(file) for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def refusal(address: str) -> str:
    try:
        reserved(address, policy_num_nodes=4, policy_num_gpus_per_node=1, ref_num_workers=4, timeout_s=600.0)
    except SkyrlTrainError as error:
        return str(error)
    return ""


def not_shared(session: RaySession, address: str, model: Path) -> str:
    """What a learner over two nodes says where the run's folder is on a file system of this process alone. Called last,
    since it hides the folder from the nodes, which were started before, by a mount of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    config = make_config(model, strategy="fsdp2")
    placed = replace(config.placement, ray_address=address, policy_num_workers=2, policy_num_nodes=2)
    placement = Placement(plan_layout(placed, roles=("policy",), gpu=False), timeout_s=30.0)
    with tempfile.TemporaryDirectory() as parent:
        for failed in (
            libc.unshare(_CLONE_NEWNS),
            libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
            libc.mount(b"tmpfs", parent.encode(), b"tmpfs", 0, None),
        ):
            assert not failed, os.strerror(ctypes.get_errno())
        folder = Path(parent) / "run"
        folder.mkdir()
        try:
            slots = placement.slots("policy")
            start_learner(settings_of(config, "policy"), placed, session, slots, output_dir=folder)()
        except SkyrlTrainError as error:
            return f"{error} {os.listdir(folder)}"
        finally:
            libc.umount(parent.encode())
            placement.close()
    return ""


def trained(session: RaySession, address: str, folder: Path) -> float:
    """FSDP2 over two nodes: the sum of all weights after three steps."""
    config = make_config(folder, strategy="fsdp2")
    config = replace(
        config, placement=replace(config.placement, ray_address=address, policy_num_workers=2, policy_num_nodes=2)
    )
    placement = Placement(plan_layout(config.placement, roles=("policy",), gpu=False), timeout_s=30.0)
    slots: list[Slot] = placement.slots("policy")
    learner = start_learner(settings_of(config, "policy"), config.placement, session, slots)()
    three_steps(learner)
    total = sum(float(tensor.double().abs().sum()) for tensor in weights_of(learner).values())
    learner.close()
    placement.close()
    return total


def main() -> None:
    cluster = Cluster()
    for _ in range(NUM_NODES):
        cluster.add_node(num_cpus=NUM_CPUS, num_gpus=NUM_GPUS, object_store_memory=100 * 2**20)
    address = cluster.address
    session = RaySession(PlacementConfig(ray_address=address, start_timeout_s=120.0), num_cpus=0, name="several")
    try:
        spread = {"policy_num_nodes": 2, "policy_num_gpus_per_node": 2, "ref_num_workers": 4}
        result = {
            "spread": nodes(address, **spread, engines=2),
            "apart": nodes(
                address,
                policy_num_gpus_per_node=2,
                ref_num_gpus_per_node=2,
                inference_num_nodes=2,
                inference_num_gpus_per_node=2,
                engines=4,
            ),
            "together": devices(address, policy_num_gpus_per_node=2, colocate_all=True, engines=2),
            "in_groups": devices(
                address,
                policy_num_nodes=2,
                policy_num_gpus_per_node=4,
                ref_num_nodes=2,
                ref_num_gpus_per_node=4,
                colocate_all=True,
                engines=4,
                tensor_parallel=2,
            ),
            "refusal": refusal(address),
            "environment": environment(),
            "told": logs_with(TOKEN),
            "trained": trained(session, address, Path(sys.argv[1])),
        }
        if os.geteuid() == 0:
            result["not_shared"] = not_shared(session, address, Path(sys.argv[1]))
        print(json.dumps(result))
    finally:
        session.close()
        cluster.shutdown()


if __name__ == "__main__":
    main()
