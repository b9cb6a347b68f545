"""vLLM with its core and worker in processes of their own, as it always is on a GPU: updates under way, deaths, orphans."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.inference.vllm import VLLMEngine, vllm_environment
from skyrl_train.telemetry.logs import stacks
from tests.support.vllm_apart import (
    check_death,
    check_orphans,
    check_updates_under_way,
    endless,
    settings_apart,
)

pytestmark = pytest.mark.cluster

__all__ = ["endless"]


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    stacks.begin("tests")
    opened = VLLMEngine(settings_apart())
    yield opened
    opened.close()


def test_no_token_is_computed_by_a_mixture_of_weights_over_twenty_updates_under_way(
    engine: VLLMEngine, endless: None
) -> None:
    check_updates_under_way(engine, tolerance=2e-4)


def test_its_processes_say_what_they_are_doing_or_that_they_are_stopped(engine: VLLMEngine) -> None:
    pids = {title: pid for pid, title in engine._processes._titles.items() if title.startswith("VLLM::")}
    told = stacks.here()
    for title, pid in pids.items():
        assert f"vLLM, pid {pid}:\n" in told, title
    assert "run_busy_loop" in told, "what the core does"
    victim = max(pids.values())
    os.kill(victim, signal.SIGSTOP)
    try:
        assert f"vLLM, pid {victim}: is stopped by a signal (state T)" in stacks.here()
    finally:
        os.kill(victim, signal.SIGCONT)


def test_a_stopped_core_is_silent_and_a_killed_one_is_noticed_at_once(engine: VLLMEngine, endless: None) -> None:
    check_death(engine)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_vllm_knows_every_variable_that_an_engine_sets(device: str) -> None:
    """Of one that it does not know it says a line, and goes on with its default: cores would be forked, without the mark."""
    from vllm import envs

    environment = vllm_environment(settings_apart(device))
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert {name for name in environment if name.startswith("VLLM_")} <= set(envs.environment_variables)


@pytest.mark.parametrize("when", [pytest.param("while it starts", marks=pytest.mark.nightly), "while it serves"])
def test_nothing_of_vllm_outlives_its_actor_by_five_seconds(tmp_path: Path, when: str) -> None:
    check_orphans(tmp_path, when, device="cpu")
