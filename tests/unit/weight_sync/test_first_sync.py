"""Which syncs are probed: the first of a run always, the first ten and every 50th unless something else was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlatformConfig, VLLMConfig
from skyrl_train.endpoints import LocalEndpoint
from skyrl_train.errors import EngineError
from skyrl_train.runs.construction import tolerance
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.receiver import UpdatableEngine
from skyrl_train.weight_sync.transport import Probed, SyncRecords, WeightSync
from skyrl_train.weight_sync.transports import RouteContext, shared_memory
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


def sync_in(folder: Path, verify: Callable[[int], Probed | None], *, each: bool | None) -> WeightSync:
    engine = LocalEndpoint[UpdatableEngine](FakeEngine())
    records = SyncRecords(folder / "weight_sync.jsonl", lambda _, version: verify(version), verify_each=each)
    sharing = DeviceSharing(None, shared=False, record_file=folder / "turns.jsonl")
    settings = RouteContext(files=folder / "weights", node_folder=folder, timeout_s=5.0)
    return WeightSync(lambda: engine, shared_memory, settings, sharing, records)


@pytest.mark.parametrize(
    ("each", "probed"), [(None, [-1, *range(10), 50, 100]), (False, [0]), (True, list(range(101)))]
)
def test_the_first_syncs_are_probed_and_others_now_and_then(
    tmp_path: Path, each: bool | None, probed: list[int]
) -> None:
    seen: list[int] = []

    def verify(version: int) -> Probed:
        seen.append(version)
        return Probed(probe_difference=0.25, probe_moved=0.5)

    transport = sync_in(tmp_path, verify, each=each)
    for version in range(101):
        transport.sync(stored_weights({"weight": torch.ones(4)}), version)
    assert seen == probed, "-1 is of the engines as they were loaded"
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    expected = [(0.25, 0.5) if version in probed else (None, None) for version in range(101)]
    assert [(record["probe_difference"], record["probe_moved"]) for record in records] == expected
    assert [record["probe_seconds"] is not None for record in records] == [version in probed for version in range(101)]


def test_an_engine_that_cannot_answer_before_its_first_weights_gets_them(tmp_path: Path) -> None:
    def verify(version: int) -> None:
        if version < 0:
            raise EngineError("no weights yet")

    transport = sync_in(tmp_path, verify, each=None)
    transport.sync(stored_weights({"weight": torch.ones(4)}), 0)
    assert transport.version == 0


def test_a_first_sync_that_fails_its_probe_ends_the_run(tmp_path: Path) -> None:
    def refuse(version: int) -> Probed:
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
    settings = RouteContext(files=tmp_path / "weights", node_folder=tmp_path, timeout_s=5.0)
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
    config = Config(**changes)
    assert tolerance(config.generator, config.model, config.platform) == expected
