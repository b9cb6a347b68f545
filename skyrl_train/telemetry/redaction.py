"""The one redactor: no secret in a run's configuration, logs, errors, console or trackers.

A text is a secret by the name it stands under (`api_key`, `hfToken`, `PASSWORD`), by its shape (`hf_...`, `sk-...`, the
user of a URL, `password=...`), or because this process has learned it (`learn_secrets`). What only looks random stays:
hex digests, commits, UUIDs, paths and names of runs. Rollouts, journals, checkpoints and data are never touched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
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
        "pwd",
        "secret",
        "secrets",
        "signature",
        "token",
    }
)
_WHERE_WORDS = frozenset({"dir", "env", "file", "folder", "path", "sock"})
_OPEN_WORDS = frozenset({"auth", "dsn", "key", "pat", "cookie", "signature"})
"""Names of secrets in a configuration, but words of any sentence: in a text they count as part of a longer name alone."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NO_SECRETS = frozenset({"null", "none", "true", "false", REDACTED})
_SHORTEST_LEARNED = 6
"""Characters of a secret that is looked for by itself; a shorter one is part of too much else."""

_NAME = re.compile(r"--(?P<flag>[A-Za-z][\w-]*)\s(?!-)|(?P<name>[A-Za-z_][\w.-]*)(?P<sign>['\"]?\s?[=:]\s?)")
_ERROR_CLASS = re.compile(r"[A-Z]\w*(?:Error|Exception|Warning)")
"""`KeyError: 'answer'`: a text names errors by their class."""
_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\$\{[^}]*\}|[^\s,;&'\"(){}\[\]]+")
_PASSWORD_OF_URL = re.compile(r"://[^\s/:@]*:(?P<value>[^\s/@]+)@")
_SHAPES = re.compile(
    r"""
      (?<=://)[^\s/?\#'"<>]+(?=@)                              # the user of a URL, with @ in the password
    | (?<=://)[^\s/:@'"<>\[]*:(?!\d+(?:[/?\#]|\b))[^\s'"<>]+(?=@)   # with / in it
    | (?<=\bBearer\s)[\w.~+/=-]{8,} | (?<=\bBasic\s)[A-Za-z0-9+/]{8,}=*
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(?: hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}
        | sk-(?:proj|svcacct|admin|ant|or)-[\w-]{16,} | sk-[A-Za-z0-9_]{16,} | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35} | xox[abeprs]-[\w-]{10,}
        | wandb_v1_[\w-]{20,} | gsk_[A-Za-z0-9]{20,} | nvapi-[\w-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}
        | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
"""What services give a shape of its own: Hugging Face, OpenAI and Anthropic, Stripe, GitHub, GitLab, AWS, Google, Slack,
Weights & Biases, Groq, NVIDIA, npm, PyPI, JSON web tokens, private keys."""

_learned: set[str] = set()
"""Secrets of this process, as its command line and its environment are."""


def is_secret_name(name: str) -> bool:
    """True for `api_key`, `hfToken`, `PASSWORD`; False for `max_tokens_per_microbatch` and `tokenizer_path`, and for
    `api_key_env` and `token_file`, which say where a secret is."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and words[-1] not in _WHERE_WORDS and not _SECRET_WORDS.isdisjoint(words)


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested mappings and sequences in which secrets read `<redacted>`.

    Numbers, booleans and None are never secrets; tuples become lists, as in JSON.
    """
    if isinstance(value, Mapping):
        return {str(key): redact(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(entry, name) for entry in value]
    if not isinstance(value, str):
        return value
    return REDACTED if value and is_secret_name(name) else redact_text(value)


def redact_text(text: str) -> str:
    """The text with `<redacted>` in place of each secret: learned, of a known shape, or assigned to a secret's name."""
    text = _SHAPES.sub(REDACTED, text)
    for start, stop in reversed(list(_assigned(text))):
        text = f"{text[:start]}{REDACTED}{text[stop:]}"
    for secret in sorted(_learned, key=len, reverse=True):
        if secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    return text


def learn_secrets(values: Any, name: str = "") -> None:
    """Have `redact_text` find, wherever they stand, the secrets in nested `values`: what has the name of one, and the
    passwords in texts such as `host=db password=...` and URLs."""
    if isinstance(values, Mapping):
        for key, entry in values.items():
            learn_secrets(entry, str(key))
    elif isinstance(values, (list, tuple)):
        for entry in values:
            learn_secrets(entry, name)
    elif isinstance(values, str):
        found = [values] if is_secret_name(name) else []
        found += [match["value"] for match in _PASSWORD_OF_URL.finditer(values)]
        found += [values[start:stop].strip("'\"") for start, stop in _assigned(values)]
        _learned.update(secret for secret in found if _is_worth_learning(secret))


def learn_arguments(arguments: Iterable[str], environ: Mapping[str, str]) -> None:
    """Learn the secrets of a command line (`environment.env_class.api_key=...`) and of the environment's variables."""
    learn_secrets(dict(environ))
    for argument in arguments:
        name, _, value = argument.partition("=")
        learn_secrets(value, name.rpartition(".")[2])
        learn_secrets(argument)


class RedactingFormatter(logging.Formatter):
    """Formats as `inner` does, tracebacks included, without secrets."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        return redact_text(self._inner.format(record))


def _is_worth_learning(value: str) -> bool:
    """Whether it is neither the place of a secret nor a common word."""
    is_place = value.startswith(("/", "~", "./", "${"))
    return len(value) >= _SHORTEST_LEARNED and not is_place and not value.isalpha() and REDACTED not in value


def _assigned(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets are that a text assigns to their names. After a colon, which sentences have too, one must look
    like a secret."""
    end = 0
    for match in _NAME.finditer(text):
        last = (match["flag"] or match["name"]).rpartition(".")[2]
        words = [word.lower() for word in _WORD.findall(last)]
        found = _VALUE.match(text, match.end())
        if (
            found is None
            or match.end() < end
            or not is_secret_name(last)
            or (len(words) == 1 and words[0] in _OPEN_WORDS)
            or (":" in (match["sign"] or "") and _ERROR_CLASS.fullmatch(last))
        ):
            continue
        plain = found[0].strip("'\"")
        if not plain or plain.isdigit() or plain.startswith("${") or plain.lower() in _NO_SECRETS:
            continue
        if ":" in (match["sign"] or "") and plain == found[0] and plain.strip(".!?").isalpha():
            continue
        end = found.end()
        yield found.span()
