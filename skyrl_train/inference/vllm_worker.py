"""What runs inside vLLM's workers: a weight-transfer backend that takes buckets of bytes, on any device.

Imported there because `worker_extension_cls` names `WorkerExtension`. vLLM's own backends need CUDA; this one plugs into
the same interface (start, update, finish) and mends what a reload leaves behind on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from skyrl_train.weight_sync.buckets import Bucket, unpack_bucket

BACKEND = "skyrl_train_buckets"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `Bucket`; its bytes in `data`, or in the file `path` where they came over HTTP."""

    names: Any
    dtypes: Any
    shapes: Any
    checksum: int
    data: Any = None
    path: str = ""


class BucketEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads buckets through the model's own `load_weights`, layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to meet: the bytes come with the call."""

    def start_weight_update(self) -> None:
        """Prepares each layer to receive weights in the checkpoint's form."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes one bucket. The base class would wait for an accelerator, which need not exist."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises EngineError, before anything is loaded, where the bucket is damaged."""
        bucket = Bucket(
            names=tuple(update_info.names),
            dtypes=tuple(update_info.dtypes),
            shapes=tuple(tuple(shape) for shape in update_info.shapes),
            data=np.fromfile(update_info.path, dtype=np.uint8) if update_info.path else update_info.data,
            checksum=update_info.checksum,
        )
        self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in unpack_bucket(bucket)])

    def finish_weight_update(self) -> None:
        """Puts the layers back into the form that computes."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def repack_tied_heads(model: Any) -> None:
    """A head that shares its weight with the embedding receives none of its own in a reload, so that a CPU would go on
    multiplying with the packed copy of the old one: packs it anew."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def synchronize() -> None:
    """Waits until copies to the device are done."""
    import torch

    torch.accelerator.synchronize()


class WorkerExtension:
    """Mixed into vLLM's worker. Being imported, which registers the backend, is all it is for."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)
