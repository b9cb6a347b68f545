"""The inference engine that `generator.backend` names, in this process, beside it or on Ray, and what syncs its weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config import Config
from skyrl_train.config.models import quantizes_itself, ships_adapter
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
    ProbeSettings,
    RouteSettings,
    SyncRecords,
    UpdatableEngine,
    WeightSync,
    WeightSyncProbe,
    updatable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.cluster import EngineGroup
    from skyrl_train.runs.construction.on_ray import Cluster

ROUNDED_TOLERANCE = 0.5
"""Above what 16-bit types and fused kernels make of a log-probability (0.2 was seen), far below that of wrong weights."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What answers requests in a run, and how it gets new weights."""

    engine: InferenceEngine
    transport: WeightTransport
    sharing: DeviceSharing
    """Who has the devices when: engines, or models."""
    group: EngineGroup | None = None
    """The actors of the engines, on Ray."""


def engine_settings(config: Config) -> EngineSettings:
    """Return what the run's engines are made from."""
    generator, on_gpu = config.generator, config.platform.name == "gpu"
    quantizes_fp8 = quantizes_itself(generator, on_gpu=on_gpu)
    return EngineSettings(
        model=config.model,
        device=config.platform.device,
        max_batch_size=generator.max_batch_size,
        max_context_length=generator.max_context_length,
        temperature=generator.sampling.temperature,
        seed=config.seed,
        seeds_by_request=generator.seeds == "request",
        deterministic=config.deterministic,
        on_gpu=on_gpu,
        in_actor=config.placement.backend == "ray",
        leaves_devices=leaves_devices(config.placement, config.generator, config.platform),
        adapter=config.model.lora if ships_adapter(generator) else None,
        in_flight_cache=config.trainer.in_flight_cache if config.trainer.in_flight_updates else None,
        records_routing=config.trainer.moe_routing_replay,
        request_timeout_s=generator.request_timeout_s,
        rounding="none" if quantizes_fp8 else generator.quantization,
        quantizes_fp8=quantizes_fp8,
        vllm=generator.vllm,
        http=generator.http,
        output_dir=Path(config.output_dir).absolute(),
    )


def build_engines(config: Config, stack: ExitStack, cluster: Cluster | None = None) -> Engines:
    """Return the engine, in actors of `cluster` where it computes on devices of its own and there is one.

    `stack` ends it. On Ray it returns while the engines load. Raises EngineError, ModelError.
    """
    tokenizer = load_tokenizer(config.model)
    if not config.generator.has_own_devices:
        return _in_this_process(config, tokenizer, stack)
    if cluster is None:
        return _beside_this_process(config, tokenizer, stack)
    return _on_ray(config, tokenizer, stack, cluster)


def _in_this_process(config: Config, tokenizer: PreTrainedTokenizerBase, stack: ExitStack) -> Engines:
    engine = ENGINES.resolve(config.generator.backend)(engine_settings(config), tokenizer)
    stack.callback(engine.close)
    gate = _gate(config) if config.generator.backend != "hf" else None  # which takes weights between its batches
    quiet = nullcontext if gate is None else gate.shut
    sync = sync_within_process(engine, Path(config.output_dir), config.generator.weight_transport, quiet)
    return Engines(
        engine=engine if gate is None else GatedEngine(engine, gate), transport=sync, sharing=DeviceSharing()
    )


def _gate(config: Config) -> RequestGate | None:
    """Return what keeps requests from engines whose weights change; None where nothing is asked meanwhile."""
    if not config.trainer.max_staleness:
        return None
    return RequestGate(
        request_timeout_s=config.generator.request_timeout_s, stays_open=config.trainer.in_flight_updates
    )


def sync_within_process(
    engine: Any,
    folder: Path,
    transport: PartSpec = "auto",
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WeightSync:
    """Return what brings weights to an engine of this process. `folder`: of the run; `quiet` as of `WeightSync`."""
    endpoint = LocalEndpoint(updatable(engine))
    settings = RouteSettings(files=folder.absolute() / "weights", node_folder=_temporary_folder(), timeout_s=math.inf)
    carry = WEIGHT_TRANSPORTS.resolve(transport)
    return WeightSync(lambda: endpoint, carry, settings, DeviceSharing(), SyncRecords(None), quiet=quiet)


def _beside_this_process(config: Config, tokenizer: PreTrainedTokenizerBase, stack: ExitStack) -> Engines:
    engine = ENGINES.resolve(config.generator.backend)(engine_settings(config), tokenizer)
    stack.callback(engine.close)
    watched = WatchedEndpoint(
        updatable(engine),
        call_timeout_s=config.placement.call_timeout_s,
        silence_timeout_s=config.placement.silence_timeout_s,
    )
    sharing = _sharing(config, lambda: watched)
    records = _records(config, lambda: watched, sharing, tokenizer)
    gate = _gate(config)
    quiet = nullcontext if gate is None else gate.shut
    sync = _weight_sync(config, lambda: watched, sharing, records, _temporary_folder(), quiet)
    local = LocalEngine(engine, watched, sharing)
    return Engines(engine=local if gate is None else GatedEngine(local, gate), transport=sync, sharing=sharing)


def _on_ray(config: Config, tokenizer: PreTrainedTokenizerBase, stack: ExitStack, cluster: Cluster) -> Engines:
    from skyrl_train.cluster import EngineGroup, GroupEngine

    group = EngineGroup(
        config.generator.backend,
        engine_settings(config),
        cluster.settings.placement,
        cluster.session,
        cluster.placement.slots("engine"),
        num_threads=config.platform.num_threads,
        max_restarts=config.generator.vllm.max_restarts,
    )
    stack.callback(group.close)
    sharing = _sharing(config, group.living, wait_ready=group.wait_ready)
    records = _records(config, group.living, sharing, tokenizer)
    folder, gate = cluster.session.folder or _temporary_folder(), _gate(config)

    def quiet() -> AbstractContextManager[None]:
        return nullcontext() if gate is None else engine.quiet()

    sync = _weight_sync(config, group.for_update, sharing, records, folder, quiet)
    engine = GroupEngine(
        group,
        sharing,
        sync,
        silence_timeout_s=config.placement.silence_timeout_s,
        gate=gate,
        room=config.generator.vllm.most_sequences(on_gpu=config.platform.on_gpu),
    )
    return Engines(engine=engine, transport=sync, sharing=sharing, group=group)


def _sharing(config: Config, engines: Callable[[], Endpoint[UpdatableEngine]], **own: Any) -> DeviceSharing:
    """Return who has the devices when, as a run of engines apart from the trainer records it."""
    return DeviceSharing(
        engines,
        shared=shares_devices(config.placement, config.generator, config.platform),
        moves=leaves_devices(config.placement, config.generator, config.platform),
        record_file=Path(config.output_dir) / "device_turns.jsonl",
        **own,
    )


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir())


def _weight_sync(
    config: Config,
    engines: Callable[[], Endpoint[UpdatableEngine]],
    sharing: DeviceSharing,
    records: SyncRecords,
    node_folder: Path,
    quiet: Callable[[], AbstractContextManager[None]],
) -> WeightSync:
    return WeightSync(
        engines,
        WEIGHT_TRANSPORTS.resolve(config.generator.weight_transport),
        RouteSettings(
            files=Path(config.output_dir).absolute() / "weights",
            node_folder=node_folder,
            timeout_s=config.placement.call_timeout_s,
            device=config.platform.device,
            shared_devices=shares_devices(config.placement, config.generator, config.platform),
            full_sync_every=config.generator.full_sync_every,
            change_tolerance=config.generator.weight_change_tolerance,
        ),
        sharing,
        records,
        adapter_only=ships_adapter(config.generator),
        quiet=quiet,
    )


def _records(
    config: Config,
    engines: Callable[[], Endpoint[UpdatableEngine]],
    sharing: DeviceSharing,
    tokenizer: PreTrainedTokenizerBase,
) -> SyncRecords:
    """Of engines that compute apart from the trainer, which a probe is sent to."""
    probe = WeightSyncProbe(engines, sharing, probe_settings(config, vocabulary=len(tokenizer)))
    file, verify_each = Path(config.output_dir) / "weight_sync.jsonl", config.generator.verify_weight_sync
    if config.generator.weight_change_tolerance and verify_each is None:
        verify_each = False  # what is left out on purpose keeps engines behind
    return SyncRecords(file, probe, verify_each=verify_each)


def probe_settings(config: Config, *, vocabulary: int) -> ProbeSettings:
    """Return what the probe of a weight sync is made from. `vocabulary`: token ids that there are."""
    model = config.model
    model_type = read_config(model.path, revision=model.revision).get("model_type", "of unknown type")
    return ProbeSettings(
        seed=config.seed,
        vocabulary=min(vocabulary, vocabulary_size(model)),
        vocabulary_size=vocabulary_size(model),
        max_context_length=config.generator.max_context_length,
        temperature=config.generator.sampling.temperature,
        tolerance=tolerance(config),
        verifies_each=bool(config.generator.verify_weight_sync),
        model=f"{model.path} ({model_type})",
    )


def tolerance(config: Config) -> float:
    """Largest difference that is accepted. Where each sync is verified it is `generator.weight_sync_tolerance`; the probe
    of the first one alone, which nobody asked for, allows as much as rounding to 16 bits makes, and what is quantized is
    measured and not refused."""
    generator = config.generator
    if generator.verify_weight_sync:
        return generator.weight_sync_tolerance
    if generator.quantization != "none" or any(
        "quant" in name or name == "kv_cache_dtype" for name in generator.vllm.engine_args
    ):
        return math.inf
    engine_dtype = config.model.dtype if generator.vllm.dtype == "auto" else generator.vllm.dtype
    exact = engine_dtype == config.model.dtype == "float32" and config.platform.name == "cpu"
    return generator.weight_sync_tolerance if exact else max(generator.weight_sync_tolerance, ROUNDED_TOLERANCE)
