"""Weights on their way to an engine, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from skyrl_train.cluster import EngineGroup
from skyrl_train.config import Config
from skyrl_train.model import load_tokenizer
from skyrl_train.parts import WEIGHT_TRANSPORTS
from skyrl_train.runs.construction import build_probe, engine_settings
from skyrl_train.weight_sync import DeviceSharing, RouteContext, SyncRecords, WeightSync
from skyrl_train.weights import Bucket, stored_weights


def in_buckets(weights: Iterable[tuple[str, Tensor]]) -> list[Bucket]:
    """All of them, as a weight sync hands them to an engine of this process."""
    stored = stored_weights(dict(weights))
    return [pending.passed_on() for pending in stored.handed_over(stored.buckets())]


def sync_of(
    config: Config,
    group: EngineGroup,
    sharing: DeviceSharing,
    name: str,
    file: Path,
    *,
    verified: bool = True,
    adapter_only: bool = False,
    full_sync_every: int = 1,
) -> WeightSync:
    """As of a run whose engines share no devices with the models; each sync is verified."""
    vocabulary = len(load_tokenizer(config.model))
    probe = build_probe(group.living, sharing, engine_settings(config), vocabulary=vocabulary)
    settings = RouteContext(files=file.parent / "weights", node_folder=file.parent, timeout_s=60.0)
    records = SyncRecords(file, probe if verified else None)
    transport = WEIGHT_TRANSPORTS.resolve(name)
    return WeightSync(
        group.for_update,
        transport,
        settings,
        sharing,
        records,
        full_sync_every=full_sync_every,
        adapter_only=adapter_only,
    )
