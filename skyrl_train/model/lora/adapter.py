"""Low-rank adapters (LoRA, arXiv:2106.09685) on a model's linear layers: `W x + (alpha / rank) * B A x`.

The model keeps its class; only A and B are trained. With the adapter off it is the base model again, which serves as the
reference. Dropout on the adapter's input is a function of the seed, the optimizer step, the layer, and the tokens that
stand before: not of which rows share a forward, so that no layout changes the gradient, and a resumed run drops the same.
"""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from skyrl_train.batch import TrainingInputBatch, sequence_offsets
from skyrl_train.batch.layouts import Layout
from skyrl_train.config.models import LoraConfig, ModelConfig
from skyrl_train.errors import CheckpointError, ModelError
from skyrl_train.model.causal_lm import BUILTIN, load_causal_lm, resolve_model_path
from skyrl_train.model.gguf import PYPI
from skyrl_train.model.lora.several import attach_adapters, layers_with_adapters, let_several_compute
from skyrl_train.model.vision.models import vision_of
from skyrl_train.system import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
_BASE = ".base_layer."
_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""What the names of a layer's parameters share."""
_DRAWING = threading.Lock()
"""PEFT draws from torch's global generator, and filters of warnings are the process's: one adapter is made at a time. A
server makes those that it trains and those that it samples from on two threads."""
_KEYS = "skyrl_dropout_keys"
"""Attribute of a model with an adapter that drops."""
_GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number: the step of SplitMix64."""
_ELEMENTS_AT_ONCE = 1 << 22
"""Of the numbers drawn for dropout, which are eight times the size of the mask that is made of them."""


def add_adapter(
    model: PreTrainedModel,
    lora: LoraConfig,
    *,
    seed: int,
    head: str = "",
    without_tower: bool = False,
    name: str = ADAPTER,
) -> None:
    """Puts a new adapter on `model`, in place, and freezes everything else. A is random by the seed, B is 0. The
    module `head`, which a value model has in place of the output head, gets none and is trained itself; a vision tower
    that stays as it is (`without_tower`) gets none either. One of several adapters has a `name` of its own, without dots,
    and targets that are spelled out; it is the active one from here on.

    Raises ModelError for targets that the model does not have.
    """
    import peft

    targets: Any = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    vision = vision_of(model) if without_tower else None
    left_out = ([head] if head else []) + ([] if vision is None else _targeted(vision.module_names(model), lora))
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=left_out or None,
    )
    try:
        with _DRAWING, torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # there are several on purpose
            torch.manual_seed(derive_seed(seed, "lora"))
            peft.inject_adapter_in_model(config, model, adapter_name=name)
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise ModelError(
            f"model.lora.targets={list(lora.targets)} cannot be adapted in {type(model).__name__}: its linear layers are "
            f"{', '.join(linear)}. Name some of these, or use all-linear"
        ) from error
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(key, name) or (bool(head) and key.startswith(f"{head}.")))
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:  # PEFT takes the type of the frozen layer
            parameter.data = parameter.data.float()
    if name != ADAPTER:
        let_several_compute(model, [layer for _, layer in _layers(model)])
    if lora.dropout > 0:
        _drop(model, lora.dropout, seed)


def _targeted(names: Iterable[str], lora: LoraConfig) -> list[str]:
    """Those that PEFT would adapt: it warns of others that it is told to leave out."""
    return [
        name
        for name in names
        if lora.targets == ("all-linear",) or any(f".{name}".endswith(f".{each}") for each in lora.targets)
    ]


def is_adapter(key: str, name: str = "") -> bool:
    """Whether a parameter under this key belongs to an adapter, or to the one of this `name`."""
    return ".lora_" in key and (not name or f".{name}." in key)


def activate_adapter(model: nn.Module, name: str) -> None:
    """Has forwards compute with the adapter of this name alone, and backwards reach its parameters alone; with none, and as
    the base model, for an empty name."""
    attach_adapters(model, [name] if name else [])
    for layer in layers_with_adapters(model):
        layer.enable_adapters(bool(name))
        if name:
            layer.set_adapter([name])


def remove_adapter(model: nn.Module, name: str) -> None:
    """Takes one of several adapters off the model for good, and its memory with it."""
    configs: Any = getattr(model, "peft_config", {})
    with _DRAWING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter .* was active")
        for _, layer in _layers(model):
            if name in layer.lora_A:
                layer.delete_adapter(name)
    configs.pop(name, None)


def layers_to_adapt(
    model: PreTrainedModel, blocks: Iterable[nn.Module], *, attention: bool, mlp: bool
) -> tuple[str, ...]:
    """Full names of the linear layers of the model's `blocks` that are part of attention, and of those that are not (experts
    among them), as far as each is wanted. They are the same whether adapters are there or not."""
    wanted = {id(block) for block in blocks}
    found = []
    for prefix, block in model.named_modules():
        if id(block) not in wanted:
            continue
        for name, part in block.named_modules():
            own = name.split(".")
            if not isinstance(part, nn.Linear) and not hasattr(part, "base_layer"):
                continue
            if "base_layer" in own or any(each.startswith("lora_") for each in own):
                continue
            of_attention = any("attn" in each or "attention" in each for each in own)
            if attention if of_attention else mlp:
                found.append(f"{prefix}.{name}")
    return tuple(found)


def has_adapter(model: nn.Module) -> bool:
    """Whether any layer of the model has an adapter (`add_adapter`)."""
    return next(_layers(model), None) is not None


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within it, the model is its base."""
    layers = [layer for _, layer in _layers(model)]
    trained = [parameter for parameter in adapter_tensors(model).values() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:
        parameter.requires_grad_(True)  # PEFT freezes it; a model that is sharded meanwhile would never train it again
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True)
class Weight:
    """A parameter as the plain model has it: what was frozen, and the layer whose adapter is added to it, if any."""

    parameter: nn.Parameter
    layer: Any | None

    @property
    def like(self) -> Tensor:
        """A tensor of the weight's type and shape: the parameter, or what one of 4 bits stands for, without memory."""
        state = getattr(self.parameter, "quant_state", None)
        return self.parameter if state is None else torch.empty(state.shape, dtype=state.dtype, device="meta")

    @property
    def plain(self) -> Tensor | None:
        """The parameter, where that is the weight; None where an adapter is added to it, or it has 4 bits."""
        is_plain = self.layer is None and getattr(self.parameter, "quant_state", None) is None
        return self.parameter if is_plain else None

    def _own(self) -> Tensor:
        state = getattr(self.parameter, "quant_state", None)
        if state is None:
            return self.parameter.detach()
        from bitsandbytes.functional import dequantize_4bit

        restored: Tensor = dequantize_4bit(self.parameter.data, state)
        return restored

    def shards(self, dtype: torch.dtype | None) -> list[tuple[Tensor, torch.dtype | None]]:
        """What has to be whole for the weight to be, and in which type it may travel: what has no adapter is rounded first,
        so that fewer bytes do."""
        if self.layer is None:
            return [(self._own(), dtype)]
        adapter = [getattr(self.layer, name)[ADAPTER].weight.detach() for name in ("lora_A", "lora_B")]
        return [(each, None) for each in (self._own(), *adapter)]

    def made_of(self, whole: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        """The weight, detached, in its own type or in `dtype`, of its `shards` made whole."""
        if self.layer is None:
            return whole[0]
        own, a, b = whole
        delta = (b @ a) * float(self.layer.scaling[ADAPTER])
        if getattr(self.layer, "fan_in_fan_out", False):
            delta = delta.T
        return (own.to(delta.dtype) + delta).to(dtype or own.dtype)


def weights_by_name(model: nn.Module) -> dict[str, Weight]:
    """Every parameter under its Hugging Face name, tied ones once, in the model's order, whether it has an adapter or
    not."""
    layers = dict(_layers(model))
    found = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        prefix, in_base, last = name.rpartition(_BASE)
        adapted = bool(in_base) and last == "weight"
        plain_name = f"{prefix}.{last}" if in_base else name
        found[plain_name] = Weight(parameter, layers[prefix] if adapted else None)
    return found


Gather = Callable[[Sequence[Tensor], Sequence["torch.dtype | None"]], list[Tensor]]
"""`ModelStrategy.gather`: makes tensors whole that are sharded over ranks, in the types that are given."""


def merged_weights(
    model: nn.Module, gather: Gather, types: Mapping[str, torch.dtype | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights, whole, each in its type (None: its own), an adapter added to what it adapts. Those of a layer are gathered
    together, and no layer before the one before it was taken.

    This is where whole weights of a model that is spread over ranks come from; all ranks ask for the same ones.

    Args:
        model: The model.
        gather: `ModelStrategy.gather`.
        types: Names that are wanted, of `weights_by_name` or `adapter_tensors`; None for all of the former.
    """
    weights = weights_by_name(model)
    if types is None:
        types = dict.fromkeys(weights)
    weights |= {name: Weight(parameter, None) for name, parameter in adapter_tensors(model).items()}
    for names in by_layer(types):
        asked = [weights[name].shards(types[name]) for name in names]
        tensors, dtypes = zip(*(shard for each in asked for shard in each))
        whole = iter(gather(tensors, dtypes))
        for name, each in zip(names, asked):
            yield name, weights[name].made_of([next(whole) for _ in each], types[name])


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Neighbours of one layer, which share what stands before the first number of a name: `model.layers.0`; what is in no
    layer stays with its neighbours that are not either."""

    def layer_of(name: str) -> str:
        found = _LAYER.match(name)
        return found[0] if found else ""

    return [list(each) for _, each in groupby(names, layer_of)]


def as_they_are(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
    """The `Gather` of a model that is whole."""
    return [tensor if dtype is None else tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes)]


def adapter_tensors(model: nn.Module, name: str = "") -> dict[str, nn.Parameter]:
    """The adapter's parameters by name; empty where there is none. Of several, those of the one of this `name`, under the
    names that they would have if it were the only one."""
    found = {key: parameter for key, parameter in model.named_parameters() if is_adapter(key, name)}
    return {key.replace(f".{name}.", f".{ADAPTER}."): each for key, each in found.items()} if name else found


def base_with_adapter(model: ModelConfig, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """The base model at `model.path` with the adapter `tensors` (names of `adapter_tensors`).

    Raises CheckpointError where they are not those of the adapter that `model.lora` describes.
    """
    base = load_causal_lm(model, "cpu")
    add_adapter(base, model.lora, seed=0, without_tower="vision" in model.freeze)
    own = adapter_tensors(base)
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise CheckpointError(
            f"the checkpoint holds {len(tensors)} tensors that are not the adapter of model.lora (rank {model.lora.rank}, "
            f"targets {', '.join(model.lora.targets)}). Set model.lora as it was in that run"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return base


def write_adapter(
    folder: Path, tensors: dict[str, Tensor], lora: LoraConfig, *, base: ModelConfig | None = None
) -> None:
    """`adapter_model.safetensors` and PEFT's `adapter_config.json`, as PEFT and vLLM load them.

    `tensors` are whole, under the names of `adapter_tensors`; `base` is the model that they were trained on; None for an
    adapter that is read where its base is known.
    """
    import peft

    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = {name.split(".lora_")[0] for name in tensors}
    ends = {layer.rpartition(".")[2] for layer in layers}
    # The last part of a name stands for all layers that end with it: a number (`mlp.0` of a vision tower) for too many, and
    # any for too many where a tower was left out.
    spelled_out = any(end.isdigit() for end in ends) or (base is not None and "vision" in base.freeze)
    found = "" if base is None else _as_peft_finds_it(base.path)
    peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=found,
        revision=None if base is None or Path(found).is_absolute() else base.revision,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(layers if spelled_out else ends),
        inference_mode=True,
    ).save_pretrained(str(folder))


def _as_peft_finds_it(path: str) -> str:
    """PEFT knows hub names and folders, of which it does not know ours."""
    is_local = path.startswith((BUILTIN, PYPI)) or Path(path).expanduser().exists()
    return str(resolve_model_path(path).resolve()) if is_local else path


@contextmanager
def dropping(model: nn.Module, rows: TrainingInputBatch, layout: Layout, *, step: int) -> Iterator[None]:
    """Around a forward and backward of training: what each position drops; forwards behind it do not drop. Does nothing for
    a model without dropout.

    `rows` and `layout` are those of the forward, on the model's device; `step` counts optimizer steps.
    """
    keys = getattr(model, _KEYS, None)
    if keys is None:
        yield
        return
    try:
        keys.value = keys.of(rows, layout, step)
        yield
    finally:
        keys.value = None


class DropoutKeys:
    """One number for each position of the running forward: a hash of seed, step, and the tokens up to there.

    Positions that stand for equal prefixes have equal keys, on whichever rank and in whichever forward they are computed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.value: Tensor | None = None

    def of(self, rows: TrainingInputBatch, layout: Layout, step: int) -> Tensor:
        """int64, of the shape of the layout's `input_ids`; 0 in padding."""
        offsets = sequence_offsets(rows)
        lengths = offsets.diff()
        starts = torch.repeat_interleave(offsets[:-1], lengths)
        ids = rows["input_ids"].long()
        place = torch.arange(len(ids), device=ids.device) - starts
        # Sums wrap around; a prefix's is that up to its end less that up to its beginning.
        each = _scramble(ids * _GOLDEN + place + derive_seed(self._seed, "lora dropout", step))
        sums = torch.cumsum(each, 0)
        prefixes = sums - (sums - each)[starts]
        flat = prefixes.new_zeros(layout.num_positions)
        flat[layout.position_of_token] = _scramble(prefixes)
        return layout.own_columns(flat)


class KeyedDropout(nn.Module):
    """Drops each feature of each position with probability `p`, by the position's key, and scales what stays."""

    def __init__(self, p: float, keys: DropoutKeys, layer_seed: int) -> None:
        super().__init__()
        self.p = p
        self._keys = keys
        self._layer_seed = layer_seed

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., positions, features]`; as it is outside a forward of training."""
        keys = self._keys.value
        if keys is None:
            return x
        features = torch.arange(x.shape[-1], device=x.device, dtype=torch.int64) * _GOLDEN
        least = math.ceil(self.p * (1 << 53))
        parts = [
            (_scramble(part.unsqueeze(-1) + features) & ((1 << 53) - 1)) >= least
            for part in torch.split((keys + self._layer_seed).flatten(), max(1, _ELEMENTS_AT_ONCE // x.shape[-1]))
        ]
        return x * torch.cat(parts).view(x.shape) / (1.0 - self.p)


def _drop(model: PreTrainedModel, p: float, seed: int) -> None:
    keys = DropoutKeys(seed)
    for name, layer in _layers(model):
        layer.lora_dropout[ADAPTER] = KeyedDropout(p, keys, derive_seed(seed, f"lora dropout of {name}"))
    setattr(model, _KEYS, keys)


def _scramble(value: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, which wraps around; shifts are made logical by masking the sign's copies away."""

    def shifted(bits: Tensor, by: int) -> Tensor:
        return (bits >> by) & ((1 << (64 - by)) - 1)

    value = (value ^ shifted(value, 30)) * -4658895280553007687
    value = (value ^ shifted(value, 27)) * -7723592293110705685
    return value ^ shifted(value, 31)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The adapted layers by name."""
    for name, part in model.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "base_layer"):
            yield name, part
