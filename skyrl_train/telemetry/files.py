"""How anything is written: files that are either whole or absent whenever the process is killed, and no secrets in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "credentials",
        "dsn",
        "key",
        "passphrase",
        "passwd",
        "password",
        "pat",
        "secret",
        "secrets",
        "token",
    }
)
_WHERE_WORDS = frozenset({"env", "file", "path"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_URL_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
    r"|wandb_v1_[A-Za-z0-9_-]{20,})"
)
"""Tokens that services give a recognisable shape: Hugging Face, OpenAI-like, GitHub, AWS, Weights & Biases."""


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside `path`, syncs, and renames into place: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with sorted keys, atomically. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomically(path, f"{text}\n".encode())


def is_secret_name(name: str) -> bool:
    """True for `api_key`, `hfToken`, `PASSWORD`; False for `max_tokens_per_microbatch` and `tokenizer_path`, and for
    `api_key_env` and `token_file`, which say where a secret is."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and words[-1] not in _WHERE_WORDS and not _SECRET_WORDS.isdisjoint(words)


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested mappings and sequences in which secrets read `<redacted>`.

    A value is a secret by its key's name (`api_key`, `token`, ...), by its shape (`hf_...`), or as the user part of a
    URL. Numbers, booleans and None are never secrets; tuples become lists, as in JSON.
    """
    if isinstance(value, Mapping):
        return {str(key): redact(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(entry, name) for entry in value]
    if not isinstance(value, str):
        return value
    if value and is_secret_name(name):
        return REDACTED
    return _KNOWN_SHAPES.sub(REDACTED, _URL_USER.sub(REDACTED, value))
