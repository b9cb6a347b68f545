"""A session of this machine on a machine that is busy, in a process of its own: this one is connected already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.process_trees import Family

pytestmark = pytest.mark.cluster

SLOW_AT_FIRST = """
import ray, ray._private.services as services
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.schema import PlacementConfig

get_node, calls = services.get_node, []

def slow_at_first(*args, **kwargs):
    calls.append(1)
    if len(calls) == 1:
        raise Exception("The current node timed out during startup. This could happen because ...")
    return get_node(*args, **kwargs)

services.get_node = slow_at_first
session = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=1, name="slow")
print(f"nodes: {len(ray.nodes())}, alive: {ray.nodes()[0]['Alive']}")
session.close()
"""


def test_what_ray_did_not_start_in_time_is_started_once_more_and_nothing_is_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_AT_FIRST],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family = Family(child.pid)
    said, _ = child.communicate(timeout=800)
    assert child.returncode == 0, said
    assert "nodes: 1, alive: True" in said
    assert "once more" in said
    # Of a start that was given up, an agent of Ray's looks for its node only now and then before it ends by itself.
    assert family.left(within_s=45.0) == []
