"""Which syncs are probed: the first of a run always, the others where it was asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from skyrl_train.cluster.transport import RayTransport
from skyrl_train.config.generation import GeneratorConfig, VLLMConfig
from skyrl_train.config.schema import Config, ModelConfig, PlatformConfig
from skyrl_train.errors import EngineError
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.weight_sync.probe import tolerance
from skyrl_train.weight_sync.transport import SyncRecords, Verify


class FakeFleet:
    """One engine that takes whatever it is sent."""

    living = ("engine 0",)

    def wait_ready(self) -> None:
        """At once."""

    def call(self, method: str, phase: str, *args: Any, engines: Sequence[Any] | None = None) -> list[Any]:
        return [args[0]] if method == "finish_update" else []


class FakePool:
    """What the transport tells of its syncs."""

    weight_version = -1

    def __init__(self) -> None:
        self.fleet = FakeFleet()

    def set_version(self, version: int) -> None:
        self.weight_version = version


def transport_in(folder: Path, monkeypatch: pytest.MonkeyPatch, verify: Verify, *, each: bool) -> RayTransport:
    monkeypatch.setattr(ray, "put", lambda value: value)
    turns = DeviceTurns(None, shared=False, record_file=folder / "turns.jsonl")
    records = SyncRecords(folder / "weight_sync.jsonl", verify, verify_each=each)
    return RayTransport(FakePool(), None, turns, records)  # type: ignore[arg-type]


@pytest.mark.parametrize(("each", "probed"), [(False, [0]), (True, [0, 1, 2])])
def test_the_first_sync_is_probed_and_the_others_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: bool, probed: list[int]
) -> None:
    seen: list[int] = []
    transport = transport_in(tmp_path, monkeypatch, lambda version: float(seen.append(version) or 0.25), each=each)
    for version in range(3):
        transport.sync(iter([("weight", torch.ones(4))]), version)
    assert seen == probed
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert [record["probe_difference"] for record in records] == [0.25 if v in probed else None for v in range(3)]
    assert [record["probe_seconds"] is not None for record in records] == [version in probed for version in range(3)]


def test_a_first_sync_that_fails_its_probe_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(version: int) -> float:
        raise EngineError(f"wrong weights in version {version}")

    transport = transport_in(tmp_path, monkeypatch, refuse, each=False)
    with pytest.raises(EngineError, match="wrong weights in version 0"):
        transport.sync(iter([("weight", torch.ones(4))]), 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.001),
        ({"model": ModelConfig(dtype="bfloat16")}, 0.5),
        ({"platform": PlatformConfig(name="gpu", device="cuda")}, 0.5),
        ({"generator": GeneratorConfig(vllm=VLLMConfig(engine_args={"quantization": "fp8"}))}, float("inf")),
        ({"model": ModelConfig(dtype="bfloat16"), "generator": GeneratorConfig(verify_weight_sync=True)}, 0.001),
    ],
)
def test_a_probe_that_nobody_asked_for_allows_what_rounding_makes(changes: dict[str, Any], expected: float) -> None:
    assert tolerance(Config(**changes)) == expected
