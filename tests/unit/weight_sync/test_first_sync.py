"""Which syncs are probed: the first of a run always, the others where it was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.generation import GeneratorConfig, VLLMConfig
from skyrl_train.config.schema import Config, ModelConfig, PlatformConfig
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import EngineError
from skyrl_train.runs.build_engines import tolerance
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.receiver import UpdatableEngine
from skyrl_train.weight_sync.transport import SyncRecords, WeightSync
from skyrl_train.weight_sync.transports import RouteSettings, shared_memory
from skyrl_train.weights import Bucket, stored_weights


class FakeEngine(UpdatableEngine):
    """An engine that takes whatever it is sent."""

    def begin_update(self) -> None:
        """At once."""

    def update(self, bucket: Bucket) -> None:
        """At once."""

    def finish_update(self, version: int, num_tensors: int) -> int:
        assert num_tensors == 1
        return version


def sync_in(folder: Path, verify: Callable[[int], float | None], *, each: bool) -> WeightSync:
    engine = LocalEndpoint[UpdatableEngine](FakeEngine())
    records = SyncRecords(folder / "weight_sync.jsonl", lambda _, version: verify(version), verify_each=each)
    sharing = DeviceSharing(None, shared=False, record_file=folder / "turns.jsonl")
    settings = RouteSettings(files=folder / "weights", node_folder=folder, timeout_s=5.0)
    return WeightSync(lambda: engine, shared_memory, settings, sharing, records)


@pytest.mark.parametrize(("each", "probed"), [(False, [0]), (True, [0, 1, 2])])
def test_the_first_sync_is_probed_and_the_others_where_asked(tmp_path: Path, each: bool, probed: list[int]) -> None:
    seen: list[int] = []
    transport = sync_in(tmp_path, lambda version: float(seen.append(version) or 0.25), each=each)
    for version in range(3):
        transport.sync(stored_weights({"weight": torch.ones(4)}), version)
    assert seen == probed
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert [record["probe_difference"] for record in records] == [0.25 if v in probed else None for v in range(3)]
    assert [record["probe_seconds"] is not None for record in records] == [version in probed for version in range(3)]


def test_a_first_sync_that_fails_its_probe_ends_the_run(tmp_path: Path) -> None:
    def refuse(version: int) -> float:
        raise EngineError(f"wrong weights in version {version}")

    transport = sync_in(tmp_path, refuse, each=False)
    with pytest.raises(EngineError, match="wrong weights in version 0"):
        transport.sync(stored_weights({"weight": torch.ones(4)}), 0)


def test_a_version_is_known_before_the_first_engine_answers_with_it(tmp_path: Path) -> None:
    """A request may be answered with the new weights while other engines have yet to confirm them."""
    seen: list[tuple[str, int]] = []

    class Asking(FakeEngine):
        def begin_update(self) -> None:
            seen.append(("begin", transport.version))

        def finish_update(self, version: int, num_tensors: int) -> int:
            seen.append(("finish", transport.version))
            return super().finish_update(version, num_tensors)

    engine = LocalEndpoint[UpdatableEngine](Asking())
    settings = RouteSettings(files=tmp_path / "weights", node_folder=tmp_path, timeout_s=5.0)
    transport = WeightSync(lambda: engine, shared_memory, settings, DeviceSharing(), SyncRecords(None))
    for version in range(2):
        transport.sync(stored_weights({"weight": torch.ones(4)}), version)
    assert seen == [("begin", -1), ("finish", 0), ("begin", 0), ("finish", 1)]


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
