"""The config of a model without its weights, and without a network: from a folder, the table that is shipped, or a cache.

`assets/architectures.json` has the sizes of well-known models and, for a test, the number of parameters that their makers
state. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skyrl_train.assets
from skyrl_train.errors import ModelError
from skyrl_train.learner.memory_facts import GATED, ModelFacts, facts_from_config, facts_of_model

_BUILTIN = "builtin:"
_VARIANTS = ("-coder", "-math")
"""Parts of a name that say nothing of sizes; so do endings such as `-Instruct`."""


def known_architectures() -> Mapping[str, Mapping[str, Any]]:
    """Name to config, with `parameters`, of the models in the table."""
    file = _assets() / "architectures.json"
    table: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return table


def model_facts(path: str, *, revision: str | None = None) -> ModelFacts:
    """Sizes of the model at `path`: a folder with config.json, `builtin:NAME`, or a hub name.

    Families whose parameters do not follow from their config alone are built on the meta device: seconds, no weights.
    Raises ModelError that says what to do where the config cannot be had.
    """
    config = read_config(path, revision=revision)
    if config.get("model_type") in GATED:
        return facts_from_config(config, name=path)
    return facts_of_model(meta_model(config, name=path))


def read_config(path: str, *, revision: str | None = None) -> Mapping[str, Any]:
    """What config.json says, or the table where there is none on this machine. Raises ModelError."""
    folder = _assets() / path.removeprefix(_BUILTIN) if path.startswith(_BUILTIN) else Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        found = _in_table(path)
        if found is not None:
            return found
        file = _in_cache(path, revision) or file
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
    text: dict[str, Any] = config.get("text_config") or config
    return text


def weight_bytes(path: str, *, revision: str | None = None) -> int:
    """Bytes of the weights that are read where the model at `path` is loaded: of its files where they are here, else as
    its config says, two a parameter; 0 where neither can be had."""
    folder = _assets() / path.removeprefix(_BUILTIN) if path.startswith(_BUILTIN) else Path(path).expanduser()
    if not folder.is_dir() and (cached := _in_cache(path, revision)) is not None:
        folder = cached.parent
    if files := [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        return sum(file.stat().st_size for file in files)
    try:
        return 2 * model_facts(path, revision=revision).parameters
    except ModelError:
        return 0


def largest_parameter(path: str, *, revision: str | None = None) -> int:
    """Elements of the largest parameter of the model at `path`, mostly the embedding; 0 where its config cannot be had."""
    try:
        config = read_config(path, revision=revision)
        if config.get("model_type") in GATED:
            facts = facts_from_config(config, name=path)
            return max(facts.embedding_parameters, facts.hidden_size * facts.intermediate_size)
        return max(int(parameter.numel()) for parameter in meta_model(config, name=path).parameters())
    except ModelError:
        return 0


def meta_model(config: Mapping[str, Any], *, name: str, attention: str = "auto") -> Any:
    """A model of transformers on the meta device, in float32, with `model.attention`. Raises ModelError for a config that
    it does not know."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(config.get("model_type", ""))
    try:
        parsed = AutoConfig.for_model(**config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                parsed, dtype=torch.float32, attn_implementation="sdpa" if attention == "auto" else attention
            )
    except Exception as error:
        raise ModelError(f"model path {name!r}: no model of model_type={kind!r} can be built: {error}") from error


def _assets() -> Path:
    return Path(next(iter(skyrl_train.assets.__path__)))


def _in_table(path: str) -> Mapping[str, Any] | None:
    """The longest name that the last part of the path begins with."""
    name = path.rpartition("/")[2].lower()
    for variant in _VARIANTS:
        name = name.replace(variant, "")
    table = known_architectures()
    fitting = [known for known in table if name == known.lower() or name.startswith(f"{known.lower()}-")]
    return table[max(fitting, key=len)] if fitting else None


def _in_cache(path: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
