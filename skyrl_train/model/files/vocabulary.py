"""Which token ids a model has an embedding of, and whether those that it is to be given are among them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError

_MODEL_FILES = ("config.json", "generation_config.json")
_SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")


def vocabulary_size(model: ModelConfig) -> int:
    """Return the number of rows of the model's embedding, as its config.json says: token ids are below it.

    That is at least the number of tokens that the model was trained on, and not always that of the tokenizer's; the latter
    is returned where the config does not say. Raises ModelError.
    """
    from skyrl_train.model.causal_lm import load_tokenizer, resolve_model_path

    return stated_vocabulary_size(resolve_model_path(model.path, model.revision)) or len(load_tokenizer(model))


def stated_vocabulary_size(folder: Path) -> int:
    """Return the rows of the embedding that the config.json in `folder` states; 0 where it does not."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stated = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return 0
    return stated if type(stated) is int and stated > 0 else 0


def check_token_ids(largest: int, model: ModelConfig, where: str) -> None:
    """Raise ModelError where `where`, a text, has a token id `largest` that the model has no embedding of."""
    rows = vocabulary_size(model)
    if largest >= rows:
        from skyrl_train.model.causal_lm import load_tokenizer

        raise ModelError(
            f"{where} has the token id {largest}, and the embedding of {model.path!r} has {rows} rows, so ids up to "
            f"{rows - 1}. The tokenizer at {model.tokenizer_path or model.path!r}, of {len(load_tokenizer(model))} tokens, "
            "is that of another model. Set model.tokenizer_path to the model's own"
        )


def check_special_tokens(model: ModelConfig) -> None:
    """Raise ModelError where a token that ends, begins or fills up a sequence has no embedding: naming file, entry and what
    to do. An end that the model can never sample would make each response as long as allowed."""
    from skyrl_train.model.causal_lm import load_tokenizer, resolve_model_path

    rows = vocabulary_size(model)
    check_special_tokens_of(resolve_model_path(model.path, model.revision), model, rows=rows)
    tokenizer = load_tokenizer(model)
    for entry in _SPECIAL_TOKENS:
        token_id = getattr(tokenizer, entry, None)
        if token_id is not None:
            _check_tokenizer_entry(entry, token_id, model, rows)


def check_special_tokens_of(
    folder: Path, model: ModelConfig, *, rows: int, tokenizer_folder: Path | None = None
) -> None:
    """Raise ModelError as `check_special_tokens`, by what the files of the model say, and those in `tokenizer_folder` if it
    is given: without loading a tokenizer, so that a plan can afford it."""
    for file in (folder / name for name in _MODEL_FILES):
        for entry, stated in _special_ids(file):
            if not 0 <= stated < rows:
                raise ModelError(f"{file}: {entry} is {stated}, {_known(model, rows)}. Correct the entry in that file")
    for entry, token_id in _ids_in_tokenizer_files(tokenizer_folder) if tokenizer_folder is not None else ():
        _check_tokenizer_entry(entry, token_id, model, rows)


def _check_tokenizer_entry(entry: str, token_id: int, model: ModelConfig, rows: int) -> None:
    if not 0 <= token_id < rows:
        raise ModelError(
            f"the tokenizer at {model.tokenizer_path or model.path!r}: {entry} is {token_id}, {_known(model, rows)}. Set "
            f"model.tokenizer_path to the model's own, or correct {entry.removesuffix('_id')} in tokenizer_config.json"
        )


def _known(model: ModelConfig, rows: int) -> str:
    return f"and the embedding of {model.path!r} has {rows} rows, so ids from 0 to {rows - 1}"


def _ids_in_tokenizer_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and id of each special token that tokenizer_config.json names and tokenizer.json knows."""
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids: dict[str, Any] = {**tokenizer["model"]["vocab"]}
        ids |= {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        names = [(entry, stated.get(entry.removesuffix("_id"))) for entry in _SPECIAL_TOKENS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # not there or of another kind: told when the tokenizer is loaded
    for entry, token in names:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and type(ids.get(text)) is int:
            yield entry, ids[text]


def _special_ids(file: Path) -> Iterator[tuple[str, int]]:
    """Yield name and value of each special token that a model's file states: one, a list, or those of its text part."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sections = [content, content.get("text_config") or {}]
    except (OSError, ValueError, AttributeError):
        return  # not there, or told when the model is loaded
    for section in sections:
        for name in _SPECIAL_TOKENS:
            value = section.get(name)
            for token_id in value if isinstance(value, list) else [value]:
                if type(token_id) is int:
                    yield name, token_id
