"""What runs inside vLLM's workers: a weight-transfer backend that takes buckets, on any device and however they come.

Imported there because `worker_extension_cls` names `WorkerExtension`. It plugs into vLLM's own interface (init, start,
update, finish). vLLM's backends `nccl` and `ipc` need CUDA and check nothing that arrives; this one runs wherever torch
does, verifies each bucket before a byte of it is loaded, and mends what a reload leaves behind on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from skyrl_train.endpoints import Rendezvous
from skyrl_train.errors import EngineError
from skyrl_train.inference.vllm.adapter import load_adapter
from skyrl_train.inference.vllm.sampler import use_keyed_sampler
from skyrl_train.telemetry.logs import stacks
from skyrl_train.weight_sync import Arrivals, Rounding, StreamEnd, device_name, import_copy, rounded
from skyrl_train.weights import Bucket, bucket_of, carried_bytes, plan_of

BACKEND = "skyrl_train_buckets"
stacks.answer("vLLM worker")  # where this is a process of its own; the engine's answers already


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where a trainer that broadcasts is to be met, and what it will bring; nothing where it does not. The fields of a
    `Rendezvous`, and those of a `StreamPlan`."""

    rank: int = 0
    """Rank of this engine's first worker."""
    num_ranks: int = 0
    init_method: str = ""
    timeout_s: float = 0.0
    plan: Any = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `Bucket`; or, with a version, none: all buckets come from the trainer that was met."""

    names: Any
    dtypes: Any
    shapes: Any
    checksum: int | None = None
    data: Any = None
    path: str = ""
    handles: Any = None
    pieces: Any = ()
    parts: Any = ()
    rank: int = 0
    update: Any = ""
    version: int | None = None


class BucketEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads buckets through the model's own `load_weights`, layer by layer. In an engine that applies an adapter they are
    that, and are kept until it is loaded whole."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    rounding: Rounding = "none"
    """What matrices are rounded to before they are loaded."""
    _stream: StreamEnd | None = None
    _adapter: dict[str, Tensor]

    @cached_property
    def _arrivals(self) -> Arrivals:
        return Arrivals()

    @cached_property
    def _renaming(self) -> Any | None:
        """What `in_checkpoint_form` needs of the model; None where its names are those of its checkpoint."""
        return renaming_of(self.model_config.hf_config)

    @property
    def _takes_adapter(self) -> bool:
        return self.vllm_config.lora_config is not None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meets the trainer, in place of any that was met before; with no address the bytes come by themselves."""
        self.shutdown()
        if init_info.num_ranks:
            rendezvous = Rendezvous(
                rank=init_info.rank + self.parallel_config.rank,
                num_ranks=init_info.num_ranks,
                init_method=init_info.init_method,
                timeout_s=init_info.timeout_s,
            )
            self._stream = StreamEnd(plan_of(init_info.plan), rendezvous, self.device)

    def start_weight_update(self) -> None:
        """Prepares each layer to receive weights in the checkpoint's form."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._adapter = {}
        self._arrivals.begin()
        if self._takes_adapter:
            return
        if self.device.type == "cpu":
            pack_experts_on_reload(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes one bucket. The base class would wait for an accelerator, which need not exist."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises EngineError, before anything of a bucket is loaded, where it is damaged."""
        if update_info.version is None:
            bucket = bucket_of(dict(vars(update_info)))
            self._load(self._arrivals.take(bucket, self._bytes_of))
            return
        if self._stream is None:
            raise EngineError("weights were announced to an engine that did not meet the trainer")
        try:
            for bucket, bytes_of in self._stream.receive(update_info.version, update_info.update):
                self._load(self._arrivals.take(bucket, bytes_of))
        except BaseException:
            self.shutdown()  # so that nobody waits for this worker
            raise

    def _load(self, arrived: Iterable[tuple[str, Tensor]]) -> None:
        if self._takes_adapter:
            self._adapter |= {name: tensor.to("cpu", copy=True) for name, tensor in arrived}
            return
        there = ((name, rounded(name, tensor.to(self.device), self.rounding)) for name, tensor in arrived)
        self.model.load_weights([part for named in there for part in in_checkpoint_form(*named, self._renaming)])

    def _bytes_of(self, bucket: Bucket) -> Tensor:
        """The bytes of a bucket, or of a part of one, in memory that this worker owns."""
        if bucket.handles:
            return import_copy(bucket.handles, self.device, bucket.num_bytes)
        return carried_bytes(bucket)

    def finish_weight_update(self) -> None:
        """Puts the layers back into the form that computes."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._takes_adapter:
            return
        require_all_loaded(self.model, self.model_config.hf_config.model_type)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def take_adapter(self) -> dict[str, Tensor]:
        """What the update brought, once."""
        taken, self._adapter = self._adapter, {}
        return taken

    def shutdown(self) -> None:
        """Leave the process groups that the trainer broadcasts in, where this worker is in any."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def renaming_of(hf_config: Any) -> Any | None:
    """How the parameters of transformers' model differ from the checkpoint's in name or shape, as those of experts do, which
    it holds in one; None where they do not. Not every loader of vLLM knows both forms."""
    conversions = get_checkpoint_conversion_mapping(hf_config.model_type) or []  # type: ignore[no-untyped-call]
    return SimpleNamespace(_weight_conversions=conversions, config=hf_config) if conversions else None


def in_checkpoint_form(name: str, tensor: Tensor, renaming: Any | None) -> list[tuple[str, Tensor]]:
    """One parameter of the trainer's model under the names of its checkpoint: itself, or its parts, e.g. one for each
    expert."""
    if renaming is None:
        return [(name, tensor)]
    return list(revert_weight_conversion(renaming, {name: tensor}).items())


def require_all_loaded(model: Any, model_type: str) -> None:
    """Raises EngineError for parameters that an update left out: vLLM would go on with the old ones, or with memory that
    nobody wrote. So it is where a model's loader copies past the hooks of a reload, as that of gpt-oss does, and the first
    sync, of the weights that were loaded anyway, could not tell."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    missing = []
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, ParallelLMHead):
            continue
        loaded = {name for name, _ in info.loaded_weights}
        missing += [
            f"{path}.{name}" for name, weight in layer._parameters.items() if weight is not None and name not in loaded
        ]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise EngineError(f"vLLM cannot take new weights of a {model_type} model: {shown} did not receive any")


def repack_tied_heads(model: Any) -> None:
    """A head that shares its weight with the embedding receives none of its own in a reload, so that a CPU would go on
    multiplying with the packed copy of the old one: packs it again."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def pack_experts_on_reload(model: Any) -> None:
    """Experts are packed for the CPU's grouped product, but by vLLM 0.32 only at the first load: in a reload the plain
    weights would be copied over the packed ones and read as if they were packed. Packs them at each reload."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and not hasattr(method, "_packs_on_reload"):
            method._packs_on_reload = True
            method.process_weights_after_loading = partial(_process_and_pack, method.process_weights_after_loading)


def _process_and_pack(process: Callable[[Any], None], layer: Any) -> None:
    """What vLLM does with the weights of a layer, then what it does after that at the first load alone."""
    process(layer)
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def synchronize() -> None:
    """Waits until copies to the device are done."""
    torch.accelerator.synchronize()


class WorkerExtension:
    """Mixed into vLLM's worker. Being imported registers the backend."""

    weight_transfer_engine: BucketEngine
    model_runner: Any

    def use_keyed_sampler(self) -> bool:
        """Draw by keys of seed and position from now on; whether this runner can."""
        return use_keyed_sampler(self.model_runner)

    def round_weights(self, rounding: Rounding) -> None:
        """From the next update on, have matrices rounded as they arrive."""
        self.weight_transfer_engine.rounding = rounding

    def receiver(self) -> tuple[str, str]:
        """The fields of a `Receiver`."""
        engine = self.weight_transfer_engine
        types = {parameter.dtype for parameter in engine.model.parameters() if parameter.ndim > 1}
        return device_name(engine.device), str(types.pop()).removeprefix("torch.") if len(types) == 1 else ""

    def can_import(self, handles: dict[str, Any], num_bytes: int) -> bool:
        """Return whether this process can read what another one exports on this device: drivers and containers may forbid
        it."""
        try:
            import_copy(handles, self.weight_transfer_engine.device, num_bytes)
        except Exception:
            return False
        return True

    def load_adapter(self, rank: int, alpha: float) -> bool:
        """After an update: its adapter is the one that answers. Returns whether vLLM took it."""
        return load_adapter(self, self.weight_transfer_engine.take_adapter(), rank=rank, alpha=alpha)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)
