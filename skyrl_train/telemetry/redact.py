"""Keeps secrets out of everything that is written or sent: configs, trackers, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
