"""The inference engine that `generator.backend` names, in this process or beside it, and what syncs its weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config import TrainerConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlacementConfig, PlatformConfig, ships_adapter
from skyrl_train.config.placement import leaves_devices, shares_devices
from skyrl_train.endpoints import Endpoint, LocalEndpoint
from skyrl_train.inference import EngineSettings, GatedEngine, LocalEngine, RequestGate, WatchedEndpoint
from skyrl_train.interfaces import InferenceEngine, WeightTransport
from skyrl_train.model import load_tokenizer
from skyrl_train.model.files import vocabulary_size
from skyrl_train.model.sizes import read_config
from skyrl_train.parts import ENGINES, WEIGHT_TRANSPORTS
from skyrl_train.registry import PartSpec
from skyrl_train.weight_sync import (
    DeviceSharing,
    RouteContext,
    SyncRecords,
    UpdatableEngine,
    WeightSync,
    WeightSyncProbe,
    updatable,
)

if TYPE_CHECKING:
    from skyrl_train.cluster import EngineGroup

ROUNDED_TOLERANCE = 0.5
"""Above what 16-bit types and fused kernels make of a log-probability (0.2 was seen), far below that of wrong weights."""
Quiet = Callable[[], AbstractContextManager[None]]
"""Keeps requests from engines while a sync lasts, as `WeightSync` takes it."""
LivingEngines = Callable[[], Endpoint[UpdatableEngine]]
"""Gives the engines that live."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What answers requests in a run, and how it gets new weights."""

    engine: InferenceEngine
    transport: WeightTransport
    sharing: DeviceSharing
    """Who has the devices when: engines, or models."""
    group: EngineGroup | None = None
    """The actors of the engines, on Ray."""


def build_engines(
    settings: EngineSettings, placement: PlacementConfig, trainer: TrainerConfig, stack: ExitStack
) -> Engines:
    """Return the engine, in this process, or beside it where it computes on devices of its own. `stack` ends it.

    Raises EngineError, ModelError.
    """
    generator, gate = settings.generator, request_gate(settings.generator, trainer)
    tokenizer = load_tokenizer(settings.model)
    built = ENGINES.resolve(generator.backend)(settings, tokenizer)
    stack.callback(built.close)
    if generator.backend == "hf":  # which takes weights between its batches
        gate = None
    quiet = nullcontext if gate is None else gate.shut
    if generator.has_own_devices:
        watched = WatchedEndpoint(
            updatable(built),
            call_timeout_s=placement.call_timeout_s,
            silence_timeout_s=placement.silence_timeout_s,
        )
        sharing = device_sharing(settings, placement, lambda: watched)
        sync = weight_sync(settings, placement, sharing, lambda: watched, vocabulary=len(tokenizer), quiet=quiet)
        engine: InferenceEngine = LocalEngine(built, watched, sharing)
    else:
        sharing, engine = DeviceSharing(), built
        sync = sync_within_process(built, settings.output_dir, generator.weight_transport, quiet)
    return Engines(engine=engine if gate is None else GatedEngine(engine, gate), transport=sync, sharing=sharing)


def request_gate(generator: GeneratorConfig, trainer: TrainerConfig) -> RequestGate | None:
    """Return what keeps requests from engines whose weights change; None where nothing is asked meanwhile."""
    if not trainer.max_staleness:
        return None
    return RequestGate(request_timeout_s=generator.request_timeout_s, stays_open=trainer.in_flight_updates)


def sync_within_process(
    engine: Any, folder: Path, transport: PartSpec = "auto", quiet: Quiet = nullcontext
) -> WeightSync:
    """Return what brings weights to an engine of this process. `folder`: of the run."""
    endpoint = LocalEndpoint(updatable(engine))
    settings = RouteContext(
        files=folder.absolute() / "weights", node_folder=Path(tempfile.gettempdir()), timeout_s=math.inf
    )
    carry = WEIGHT_TRANSPORTS.resolve(transport)
    return WeightSync(lambda: endpoint, carry, settings, DeviceSharing(), SyncRecords(None), quiet=quiet)


def device_sharing(
    settings: EngineSettings, placement: PlacementConfig, living: LivingEngines, **own: Any
) -> DeviceSharing:
    """Return who has the devices when, as a run of engines apart from the trainer records it."""
    return DeviceSharing(
        living,
        shared=shares_devices(placement, settings.generator, settings.platform),
        moves=leaves_devices(placement, settings.generator, settings.platform),
        record_file=settings.output_dir / "device_turns.jsonl",
        **own,
    )


def weight_sync(
    settings: EngineSettings,
    placement: PlacementConfig,
    sharing: DeviceSharing,
    living: LivingEngines,
    for_update: LivingEngines | None = None,
    *,
    vocabulary: int,
    node_folder: Path | None = None,
    quiet: Quiet,
) -> WeightSync:
    """Return what brings weights to engines apart from the trainer.

    Args:
        living: Those that the probe asks.
        for_update: Those that are to take the next weights; `living` unless given.
        vocabulary: Token ids that there are.
        node_folder: Where processes of one machine meet; the system's folder of temporary files unless given.
    """
    generator = settings.generator
    probe = build_probe(living, sharing, settings, vocabulary=vocabulary)
    verify_each = generator.verify_weight_sync
    if generator.weight_change_tolerance and verify_each is None:
        verify_each = False  # what is left out on purpose keeps engines behind
    return WeightSync(
        for_update or living,
        WEIGHT_TRANSPORTS.resolve(generator.weight_transport),
        RouteContext(
            files=settings.output_dir / "weights",
            node_folder=node_folder or Path(tempfile.gettempdir()),
            timeout_s=placement.call_timeout_s,
            device=settings.platform.device,
            shared_devices=shares_devices(placement, generator, settings.platform),
        ),
        sharing,
        SyncRecords(settings.output_dir / "weight_sync.jsonl", probe, verify_each=verify_each),
        full_sync_every=generator.full_sync_every,
        weight_change_tolerance=generator.weight_change_tolerance,
        adapter_only=ships_adapter(generator),
        quiet=quiet,
    )


def build_probe(
    living: LivingEngines, sharing: DeviceSharing, settings: EngineSettings, *, vocabulary: int
) -> WeightSyncProbe:
    """Return the probe of a weight sync. `vocabulary`: token ids that there are."""
    model, num_rows = settings.model, vocabulary_size(settings.model)
    model_type = read_config(model.path, revision=model.revision).get("model_type", "of unknown type")
    return WeightSyncProbe(
        living,
        sharing,
        settings.generator,
        seed=settings.seed,
        vocabulary=min(vocabulary, num_rows),
        vocabulary_size=num_rows,
        tolerance=tolerance(settings.generator, model, settings.platform),
        model=f"{model.path} ({model_type})",
    )


def tolerance(generator: GeneratorConfig, model: ModelConfig, platform: PlatformConfig) -> float:
    """Largest difference that is accepted. Where each sync is verified it is `generator.weight_sync_tolerance`; the probe
    of the first one alone, which nobody asked for, allows as much as rounding to 16 bits makes, and what is quantized is
    measured and not refused."""
    if generator.verify_weight_sync:
        return generator.weight_sync_tolerance
    if generator.quantization != "none" or any(
        "quant" in name or name == "kv_cache_dtype" for name in generator.vllm.engine_args
    ):
        return math.inf
    engine_dtype = model.dtype if generator.vllm.dtype == "auto" else generator.vllm.dtype
    exact = engine_dtype == model.dtype == "float32" and platform.name == "cpu"
    return generator.weight_sync_tolerance if exact else max(generator.weight_sync_tolerance, ROUNDED_TOLERANCE)
