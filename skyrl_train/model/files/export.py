"""A trained model as the files that `from_pretrained` reads, in the types of the files that it came from.

Training holds float32. A tensor goes out in the type that it has in the source's files; one that is not there under its name
(families whose layers transformers stores in another way), in the type that most of the source's numbers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError
from skyrl_train.model.causal_lm import load_tokenizer, quiet_transformers, resolve_model_path
from skyrl_train.model.lora.adapter import write_adapter
from skyrl_train.system.files import sync_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of models that read images, beside the tokenizer's."""
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors calls the types that an export may have; others (8-bit sources) go out as the rest does."""


def export_model(
    folder: Path,
    loaded: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    adapter: Mapping[str, Tensor] | None = None,
) -> None:
    """Weights, config, generation config and tokenizer in `folder`; an adapter by itself in `adapter/`.

    Args:
        loaded: Whose class and config the export has.
        tensors: Of the state dictionary, whole; tied ones are one tensor under several names.
        model: Where it came from, and `export_dtype`.
        adapter: Under the names of `adapter_tensors`; None or empty for none.

    Raises ModelError where the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known, most = ({}, torch.float32) if model.export_dtype == "float32" else source_types(model)
        cast: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in cast:
                cast[id(tensor)] = tensor.to(known.get(name, most)) if tensor.is_floating_point() else tensor
        loaded.config.use_cache = True
        with quiet_transformers():
            loaded.save_pretrained(folder, state_dict={name: cast[id(tensor)] for name, tensor in tensors.items()})
            # which states the type of the model that trains
            held, loaded.config.dtype = loaded.config.dtype, most
            loaded.config.save_pretrained(folder)
            loaded.config.dtype = held
        load_tokenizer(model).save_pretrained(folder)
        for file in (resolve_model_path(model.path, model.revision) / name for name in PROCESSOR_FILES):
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        if adapter:
            write_adapter(folder / "adapter", dict(adapter), model.lora, base=model)
        mode = (folder / "config.json").stat().st_mode
        for file in folder.rglob("*.safetensors"):
            file.chmod(mode)  # which safetensors gives to its owner alone, whatever the umask
        sync_tree(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: the model could not be exported: {error}") from error


def source_types(model: ModelConfig) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """Types of the tensors in the source's files by name, and the one of most numbers; float32 where none is known."""
    found: dict[str, torch.dtype] = {}
    numbers: Counter[torch.dtype] = Counter()
    for file in sorted(resolve_model_path(model.path, model.revision).glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                part = stored.get_slice(name)
                if (kind := _TYPES.get(part.get_dtype())) is not None:
                    found[name] = kind
                    numbers[kind] += prod(part.get_shape())
    return found, max(numbers, key=lambda kind: numbers[kind], default=torch.float32)
