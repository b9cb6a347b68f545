"""Placement on a real Ray cluster of three nodes, which all are on this machine and pretend to have four GPUs each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.several_nodes import VARIABLES
from tests.support.learner_cases import policy_of
from tests.support.ray_learners import make_config, three_steps, weights_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(model_folder: Path) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.several_nodes", str(model_folder)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    seats: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seats


def test_ranks_fill_the_nodes_they_were_given_in_order(found: dict[str, Any]) -> None:
    first, second, third, fourth = found["spread"]["policy"]
    assert first == second
    assert third == fourth
    assert first != third
    assert found["spread"]["reference"] == found["spread"]["policy"]


def test_what_shares_a_device_is_on_the_same_one(found: dict[str, Any]) -> None:
    together = found["together"]
    assert together["policy"] == together["engine"]
    assert len(set(together["policy"])) == 2, "each rank has a GPU of its own"
    assert all(" GPU " in place and place[-1].isdigit() for place in together["policy"])


def test_an_engine_of_two_devices_sees_those_of_two_ranks_of_one_node(found: dict[str, Any]) -> None:
    ranks, engines = found["in_groups"]["policy"], found["in_groups"]["engine"]
    assert len(set(ranks)) == 8
    pairs = [f"{first},{second.rpartition(' ')[2]}" for first, second in zip(ranks[::2], ranks[1::2])]
    assert [first.partition(" ")[0] == second.partition(" ")[0] for first, second in zip(ranks[::2], ranks[1::2])] == [
        True
    ] * 4
    assert engines == pairs


def test_engines_with_nodes_of_their_own_are_on_none_where_a_model_is(found: dict[str, Any]) -> None:
    apart = found["apart"]
    assert len(set(apart["engine"])) == 2
    assert set(apart["engine"]).isdisjoint(apart["policy"])


def test_more_nodes_than_there_are_is_an_error_that_says_what_there_is(found: dict[str, Any]) -> None:
    assert "no room for this run: 4 nodes with" in found["refusal"]
    assert "CPU 10, GPU 4; CPU 10, GPU 4; CPU 10, GPU 4" in found["refusal"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a folder of its own")
def test_ranks_without_the_runs_folder_are_named_before_a_model_is_loaded(found: dict[str, Any]) -> None:
    said = found["not_shared"]
    assert "output_dir: must be on a file system that all nodes share" in said
    assert "policy worker rank 0" in said
    assert "does not find" in said
    assert said.endswith("[]"), "nothing is left in the folder"


def test_actors_on_a_joined_cluster_get_the_commands_variables_and_no_log_its_secrets(found: dict[str, Any]) -> None:
    assert found["environment"] == VARIABLES
    assert found["told"] == []


def test_two_ranks_on_two_nodes_train_as_one_process_does(found: dict[str, Any], model_folder: Path) -> None:
    config = make_config(model_folder)
    alone = policy_of(config)
    three_steps(alone)
    total = sum(float(tensor.double().abs().sum()) for tensor in weights_of(alone).values())
    assert found["trained"] == pytest.approx(total, rel=1e-6)
