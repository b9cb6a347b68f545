"""What of a model is known without its weights and without a network: its config, and the sizes that follow.

    model.path --read_config--> config.json --meta device--> ModelSizes, remembered on disk

A config is looked for in the folder, in a table of well-known models that is shipped (`assets/architectures.json`, with
the number of parameters that their makers state, for a test), and in the hub's cache. Models of every family, mixtures of
experts too, are built on the meta device, without memory, and counted; that takes seconds once and nothing later.
Imports torch only to count.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import skyrl_train
import skyrl_train.data.assets
from skyrl_train.errors import ModelError
from skyrl_train.model.gguf import PYPI, gguf_folder
from skyrl_train.system.files import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BUILTIN = "builtin:"
_VARIANTS = ("-coder", "-math")
"""Parts of a name that say nothing of sizes; so do endings such as `-Instruct`."""
_SOURCES = ("model/sizes", "model/vision")
"""Folders of this package whose code decides what sizes a config has."""
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A causal language model's sizes; parameter counts are elements."""

    family: str
    """`model_type` of its config."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    tied: bool
    """Whether the output head is the embedding."""
    parameters: int
    """All, a tied head once."""
    largest_parameter: int
    """Mostly the embedding."""
    layers_alike: bool
    """Whether all decoder layers have parameters of the same shapes, so that what many layers take follows from few."""
    tower_layers: int = 0
    """Of the vision tower of a model that reads images."""
    tower_size: int = 0
    """Numbers of an image's token between two layers of the tower: of all patches that become one token."""
    tower_kept: int = 0
    """Numbers of an image's token that a layer of the tower keeps for its backward pass."""

    @property
    def query_size(self) -> int:
        """The size of one position's queries, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The size of one position's keys, or of its values, over all heads."""
        return self.num_kv_heads * self.head_dim

    def tower_bytes(self, *, checkpointing: bool) -> int:
        """Return what a vision tower that is trained holds of an image's token from its forward to its backward pass, in
        bytes: as float32, in which norms and rotations compute whatever the type of the rest."""
        # Beside its layers: the embedded patches, and what is made of the last layer's.
        whole, between = (1, self.tower_layers) if checkpointing else (self.tower_layers, 0)
        return 4 * (whole * self.tower_kept + (between + 6) * self.tower_size)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model as it is trained, with its adapter and its head, in elements."""

    total: int
    trained: int
    block: int
    """Of the largest decoder layer."""
    root: int
    """Of what is in no decoder layer."""
    block_experts: int = 0
    """Those of the largest decoder layer's experts."""
    experts: int = 0
    """Of all experts."""
    trained_experts: int = 0

    def on_a_rank(self, expert_ranks: int) -> ParameterCounts:
        """Return what a rank has of a whole model, where so many divide the experts."""
        elsewhere, trained = (count - count // expert_ranks for count in (self.experts, self.trained_experts))
        block = self.block_experts // expert_ranks
        return replace(
            self,
            total=self.total - elsewhere,
            trained=self.trained - trained,
            block=self.block - self.block_experts + block,
            block_experts=block,
            experts=self.experts - elsewhere,
            trained_experts=self.trained_experts - trained,
        )

    def cut(self, tensor_ranks: int) -> ParameterCounts:
        """Return what a rank has of a whole model of which so many ranks have parts of each matrix; norms, which each has
        whole, are taken for cut."""
        parts = {name: -(-count // tensor_ranks) for name, count in vars(self).items()}
        return replace(self, **parts)

    def with_more(self, deeper: ParameterCounts, share: float) -> ParameterCounts:
        """Return counts on the line from this model to a `deeper` one: 1 is there, more is beyond."""
        grow = ("total", "trained", "experts", "trained_experts")
        pairs = {name: (getattr(self, name), getattr(deeper, name)) for name in grow}
        return replace(self, **{name: round(here + share * (there - here)) for name, (here, there) in pairs.items()})


def known_architectures() -> Mapping[str, Mapping[str, Any]]:
    """Return name to config, with `parameters`, of the models in the table."""
    file = _assets() / "architectures.json"
    table: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return table


def model_sizes(path: str, *, revision: str | None = None) -> ModelSizes:
    """Return sizes of the model at `path`: a folder with config.json, `builtin:NAME`, or a hub name.

    A file of remembered sizes that cannot be read or written costs time and nothing else. Raises ModelError that says what
    to do where the config cannot be had, or no model can be built from it.
    """
    config = read_architecture(path, revision=revision)
    _require_sizes(text_part(config), path)
    # Counted once, and remembered for later processes with the same versions of the libraries and of what counts here.
    file = remembered_file("sizes", [config, source_stamps(_SOURCES)])
    with suppress(OSError, ValueError, TypeError):
        return ModelSizes(**json.loads(file.read_text(encoding="utf-8")))
    found = sizes_of_model(meta_model(config, name=path))
    remember(file, asdict(found))
    return found


def sizes_of_model(model: PreTrainedModel) -> ModelSizes:
    """Return sizes of a model that is there, on the meta device or any other. Raises ModelError for one that does not say
    which of its modules are decoder layers, or a size."""
    from skyrl_train.model.last_layer import decoder_layers

    config, layers = model.config.get_text_config(), decoder_layers(model)
    name = type(model).__name__
    if not layers:
        raise ModelError(f"{name} does not say which of its modules are decoder layers")
    stated = config.to_dict()
    _require_sizes(stated, name)
    heads, hidden = int(stated["num_attention_heads"]), int(stated["hidden_size"])
    shapes = [[tuple(parameter.shape) for parameter in layer.parameters()] for layer in layers]
    counts = [parameter.numel() for parameter in model.parameters()]
    return ModelSizes(
        family=str(config.model_type),
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=int(stated.get("num_key_value_heads") or heads),
        head_dim=int(stated.get("head_dim") or hidden // heads),
        intermediate_size=int(stated.get("intermediate_size") or 4 * hidden),
        vocabulary_size=int(stated["vocab_size"]),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        parameters=sum(counts),
        largest_parameter=max(counts),
        layers_alike=all(each == shapes[0] for each in shapes),
        **_tower_sizes(model),
    )


def _tower_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Of a family whose images are known."""
    from skyrl_train.model.vision.models import FAMILIES

    family, whole = FAMILIES.get(str(model.config.model_type)), model.config.to_dict()
    stated = whole.get("vision_config")
    if family is None or not stated:
        return {}
    if "spatial_merge_size" in stated:
        patches = int(stated["spatial_merge_size"]) ** 2
    else:
        patches = (int(stated["image_size"]) // int(stated["patch_size"])) ** 2 // int(whole["mm_tokens_per_image"])
    hidden, inner = int(stated["hidden_size"]), int(stated["intermediate_size"])
    return {
        "tower_layers": int(stated.get("depth") or stated["num_hidden_layers"]),
        "tower_size": patches * hidden,
        "tower_kept": patches * (family.kept[0] * hidden + family.kept[1] * inner),
    }


def read_config(path: str, *, revision: str | None = None) -> Mapping[str, Any]:
    """Return what config.json says of the language model, or the table where there is none on this machine. Raises
    ModelError."""
    return text_part(read_architecture(path, revision=revision))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the config of a model says of the language model in it."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def read_architecture(path: str, *, revision: str | None = None) -> Mapping[str, Any]:
    """Return the same of the whole model, with a vision tower where it has one. Raises ModelError."""
    folder = _folder(path)
    file = folder / "config.json"
    if not file.is_file():
        found = _in_table(path)
        if found is not None:
            return found
        file = _in_hub_cache(path, revision) or file
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        names = ", ".join(known_architectures())
        raise ModelError(
            f"model path {path!r}: its config is not on this machine, so its memory cannot be predicted. Set "
            "plan.architecture to a folder that holds its config.json (the weights are not needed), or to a model of the "
            f"same sizes among: {names}"
        ) from None
    except ValueError as error:
        raise ModelError(f"model path {path!r}: {file} is not JSON: {error}") from error
    return config


def local_folder(path: str, *, revision: str | None = None) -> Path | None:
    """Return the folder of the model at `path` where its config is on this machine; nothing is fetched."""
    folder = _folder(path)
    if (folder / "config.json").is_file():
        return folder
    cached = _in_hub_cache(path, revision)
    return None if cached is None else cached.parent


def weight_bytes(path: str, *, revision: str | None = None) -> int:
    """Return the bytes of the weights that are read where the model at `path` is loaded: of its files where they are here,
    else as its config says, two a parameter; 0 where neither can be had."""
    folder = _folder(path)
    if not folder.is_dir() and (cached := _in_hub_cache(path, revision)) is not None:
        folder = cached.parent
    if files := [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        return sum(file.stat().st_size for file in files)
    try:
        return 2 * model_sizes(path, revision=revision).parameters
    except ModelError:
        return 0


def largest_parameter(path: str, *, revision: str | None = None) -> int:
    """Return the elements of the largest parameter of the model at `path`; 0 where its config cannot be had."""
    try:
        return model_sizes(path, revision=revision).largest_parameter
    except ModelError:
        return 0


def of_depth(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the config of the model's first layers alone; a vision tower stays whole."""
    if config.get("text_config"):
        return {**config, "text_config": of_depth(config["text_config"], num_layers)}
    types = {"layer_types": list(config["layer_types"])[:num_layers]} if config.get("layer_types") else {}
    return {**config, "num_hidden_layers": num_layers, **types}


def meta_model(config: Mapping[str, Any], *, name: str, attention: str = "auto", dtype: str = "float32") -> Any:
    """Return a model of transformers on the meta device, with weights of `dtype` and `model.attention`; of a family whose
    images are known with its vision tower. Raises ModelError for a config that it does not know."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from skyrl_train.model.vision.models import FAMILIES

    reads_images = config.get("model_type") in FAMILIES and bool(config.get("vision_config"))
    config = config if reads_images else text_part(config)
    kind = str(config.get("model_type", ""))
    auto: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    try:
        parsed = AutoConfig.for_model(**config)
        with torch.device("meta"):
            return auto.from_config(
                parsed, dtype=getattr(torch, dtype), attn_implementation=None if attention == "auto" else attention
            )
    except Exception as error:
        raise ModelError(f"model path {name!r}: no model of model_type={kind!r} can be built: {error}") from error


@functools.cache
def version(distribution: str) -> str:
    """Return that of an installed package, which takes a millisecond to read and which a search asks for 1,000 times."""
    return metadata.version(distribution)


def remembered_file(kind: str, key: object) -> Path:
    """Return where it is kept what was found for `key` (JSON) under these versions of torch and transformers."""
    whole = json.dumps([key, version("torch"), version("transformers")], sort_keys=True, default=str)
    return cache_folder("memory") / f"{kind}-{hashlib.sha256(whole.encode()).hexdigest()[:24]}.json"


def source_stamps(folders: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return by what the files below these folders of the package are told from those of another version of it."""
    return [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for folder in folders
        for file in sorted((Path(next(iter(skyrl_train.__path__))) / folder).rglob("*.py"))
    ]


def remember(file: Path, content: Mapping[str, Any]) -> None:
    """Write the file as a whole or not at all; processes may do so side by side."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
            part.write(json.dumps(content))
        os.replace(part.name, file)


def _require_sizes(config: Mapping[str, Any], name: str) -> None:
    """Raises ModelError for a size that is missing."""
    missing = [key for key in _REQUIRED if not config.get(key)]
    if missing:
        raise ModelError(f"{name}: its config has no {', '.join(missing)}; memory cannot be predicted without")


def _assets() -> Path:
    return Path(next(iter(skyrl_train.data.assets.__path__)))


def _folder(path: str) -> Path:
    """Where the model at `path` is, if it is here and none of the hub; a GGUF is converted. Raises ModelError."""
    if path.startswith(_BUILTIN):
        return _assets() / path.removeprefix(_BUILTIN)
    return gguf_folder(path) or Path(path).expanduser()


def _in_table(path: str) -> Mapping[str, Any] | None:
    """The config of the longest name that the last part of the path begins with."""
    name = path.removeprefix(PYPI).rpartition("/")[2].lower()
    for variant in _VARIANTS:
        name = name.replace(variant, "")
    table = known_architectures()
    fitting = [known for known in table if name == known.lower() or name.startswith(f"{known.lower()}-")]
    return table[max(fitting, key=len)] if fitting else None


def _in_hub_cache(path: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
