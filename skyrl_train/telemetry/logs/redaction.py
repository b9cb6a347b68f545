"""The one redactor: no secret in a run's configuration, logs, errors, console or trackers.

A text is a secret by the name it stands under (`api_key`, `hfToken`, `PASSWORD`), by its shape (`hf_...`, `sk-...`, the
user of a URL, `password=...`), or because this process has learned it (`learn_secrets`) from the environment, the command
line or the configuration: then it is found wherever it stands, also as URLs, JSON and base64 write it. What only looks
random stays: hex digests, commits, UUIDs, paths and names of runs. Prompts, answers, tokens and data are never touched.
"""

from __future__ import annotations

import base64
import json
import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, quote_plus, unquote

REDACTED = "<redacted>"

_SECRET_WORD = re.compile(
    "apikey|auth|authorization|bearer|cookie|credentials?|dsn|jwt|key|passphrase|pat|pwd|secrets|sig|signature|token|webhook"
    "|.*(?:password|passwd|secret)"
)
_WHERE_WORDS = frozenset({"dir", "env", "file", "folder", "path", "sock"})
_OPEN_WORDS = frozenset({"auth", "dsn", "jwt", "key", "pat", "cookie", "sig", "signature", "webhook"})
"""Names of secrets in a configuration, but words of any sentence: in a text they count as part of a longer name alone, or
of a URL's query."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NO_SECRETS = frozenset({"null", "none", "true", "false", REDACTED})
_SHORTEST_LEARNED, _WITHIN_WORDS = 8, 16
"""Characters of a secret that is looked for by itself, and of one in small letters that is found within longer words, too: a
shorter one is part of too much else."""
_NOT_SECRET = ("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "SHELL", "TERM", "LANG", "LC_ALL")
_LOOKS_SECRET = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=~.%-]{8,}")
"""Behind a name that is a word of sentences, too."""

_NAME = re.compile(
    r"--(?P<flag>[A-Za-z](?:-?\w)*)\s(?!-|[=:]\s)|(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>['\"]?\s?[=:]\s?)"
)
"""A long word is read once: not from each of its letters, and flags from the last `--` alone."""
_NO_NAME = re.compile(r"[^A-Za-z_]*")
_ERROR_CLASS = re.compile(r"[A-Z]\w*(?:Error|Exception|Warning)")
"""`KeyError: 'answer'`: a text names errors by their class."""
_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\$\{[^}]{0,999}\}|[^\s,;&'\"(){}\[\]]+")
_PASSWORD_OF_URL = re.compile(r"://[^\s/:@]*:(?P<value>[^\s/@]+)@")
_SHAPES = re.compile(
    r"""
      (?<=://)[^\s/?\#'"<>]+(?=@)                              # the user of a URL, with @ in the password
    | (?<=://)[^\s/:@'"<>\[]*:(?!\d+(?:[/?\#]|\b))[^\s'"<>]+(?=@)   # with / in it
    | (?<=\bBearer\s)[\w.~+/=-]{8,} | (?<=\bBasic\s)[A-Za-z0-9+/]{8,}=*
    | (?<=//hooks\.slack\.com/)[\w/-]{10,} | (?<=/api/webhooks/)[\w/-]{10,} | (?<=\.webhook\.office\.com/)[\w/@-]{10,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(?: hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}
        | sk-(?:proj|svcacct|admin|ant|or)-[\w-]{16,} | sk-[A-Za-z0-9_]{16,} | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35} | xox[abeprs]-[\w-]{10,}
        | (?: dop_v1_|dapi|r8_|pplx-|xai-|shpat_|lin_api_|ntn_|hvs\.|ya29\.|GOCSPX-|SG\.|glsa_|sntrys_ )[\w.-]{20,}
        | bot\d{8,10}:[\w-]{35} | local-[0-9a-f]{40} | wandb_v1_[\w-]{20,} | gsk_[A-Za-z0-9]{20,}
        | nvapi-[\w-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}
        | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
"""What services give a shape of its own: Hugging Face, OpenAI and Anthropic, Stripe, GitHub, GitLab, AWS, Google, Slack,
Weights & Biases, Groq, NVIDIA, npm, PyPI and others, JSON web tokens, private keys, addresses that chats post to."""

_COPIED_BYTES = 1 << 16
_learned: list[str] = []
"""Secrets of this process, as its command line and its environment are, in each of their forms, the longest first."""


def is_secret_name(name: str) -> bool:
    """True for `api_key`, `hfToken`, `PASSWORD`; False for `max_tokens_per_microbatch` and `tokenizer_path`, and for
    `api_key_env` and `token_file`, which say where a secret is."""
    words = [word.lower() for word in _WORD.findall(name)]
    is_secret = any(map(_SECRET_WORD.fullmatch, words))
    return is_secret and words[-1] not in _WHERE_WORDS


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
    end, kept = 0, []
    for start, stop in _assigned(text):
        kept += [text[end:start], REDACTED]
        end = stop
    text = "".join(kept) + text[end:]
    for secret in _learned:
        if len(secret) >= _WITHIN_WORDS or not secret.islower():
            text = text.replace(secret, REDACTED)
        elif secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    return text


def copy_redacted(reader: int, write: Callable[[bytes], object]) -> None:
    """Hand on what comes over a pipe, in whole lines and without secrets, until nobody can write to it any more."""
    with suppress(OSError), open(reader, "rb", buffering=0) as stream:
        chunk, pending = b"-", b""
        while chunk:
            chunk = stream.read(_COPIED_BYTES)
            lines, newline, pending = (pending + chunk).rpartition(b"\n")
            if not chunk or len(pending) > _COPIED_BYTES:
                newline, pending = newline + pending, b""
            with suppress(OSError, ValueError):  # the disk refuses, or the log is closed: who writes must not wait
                write(redact_text((lines + newline).decode(errors="replace")).encode())


def learn_secrets(values: Any, name: str = "") -> None:
    """Have `redact_text` find, wherever they stand, the secrets in nested `values`: what has the name of one, the variable
    that an `api_key_env` names, and the passwords in texts such as `host=db password=...` and URLs."""
    if isinstance(values, Mapping):
        for key, entry in values.items():
            learn_secrets(entry, str(key))
    elif isinstance(values, (list, tuple)):
        for entry in values:
            learn_secrets(entry, name)
    elif isinstance(values, str):
        found = [values] if is_secret_name(name) else [os.environ.get(values, "")] if name.endswith("_env") else []
        found += [match["value"] for match in _PASSWORD_OF_URL.finditer(values)]
        found += [match[0] for match in _SHAPES.finditer(values)]
        found += [values[start:stop].strip("'\"") for start, stop in _assigned(values)]
        forms = {form for secret in found if _is_worth_learning(secret) for form in _forms(secret)}
        if not forms <= {*_learned}:
            _learned[:] = sorted({*_learned, *forms}, key=len, reverse=True)


def learn_arguments(arguments: Iterable[str], environ: Mapping[str, str]) -> None:
    """Learn the secrets of a command line (`environment.env_class.api_key=...`) and of the environment's variables, by their
    names or because they look random."""
    for name, value in environ.items():
        learn_secrets(value, "secret" if name.endswith("_PASS") or _looks_random(value) else name)
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
    """Whether it is neither the place of a secret, nor the name of a user or a machine, nor a common word."""
    is_place = value.startswith(("/", "~", "./", "${")) or value in (os.environ.get(name) for name in _NOT_SECRET)
    is_word = value.isalpha() and len(value) < _WITHIN_WORDS and value[1:].islower()
    return len(value) >= _SHORTEST_LEARNED and not is_place and not is_word and REDACTED not in value


def _looks_random(value: str) -> bool:
    """Whether upper case, lower case and digits of a word alternate as in a key; never that of a digest or a UUID."""
    word = max(re.findall(r"[A-Za-z0-9]+", value), key=len, default="")
    kinds = [letter.isdigit() + 2 * letter.isupper() for letter in word]
    changes = sum(map(operator.ne, kinds, kinds[1:]))
    return len(word) >= _WITHIN_WORDS and len(set(kinds)) == 3 and changes > 0.4 * len(word)


def _forms(secret: str) -> Iterator[str]:
    """Yield it as it is, as URLs, JSON and Python write it, and the part of its base64 that is the same wherever in what is
    encoded it begins."""
    content = secret.encode(errors="surrogateescape")
    yield from (secret, unquote(secret), quote(content, safe=""), quote_plus(content))
    yield from (repr(secret)[1:-1], json.dumps(secret)[1:-1])
    for before, skipped in ((0, 0), (1, 2), (2, 3)):
        padded = bytes(before) + content
        code = base64.b64encode(padded).decode().rstrip("=")
        code = code[skipped : len(code) - (len(padded) % 3 > 0)]
        yield from (code, code.replace("+", "-").replace("/", "_"))


def _assigned(text: str) -> Iterator[tuple[int, int]]:
    """Where the secrets are that a text assigns to their names. After a colon, which sentences have too, one must look
    like a secret."""
    end = 0
    for match in _NAME.finditer(text):
        name = match["flag"] or _NO_NAME.sub("", match["name"], count=1)
        last, sign = name.rpartition(".")[2], match["sign"] or ""
        if match.end() < end or not is_secret_name(last) or (":" in sign and _ERROR_CLASS.fullmatch(last)):
            continue
        found = _VALUE.match(text, match.end())
        words = [word.lower() for word in _WORD.findall(last)]
        is_open = len(words) == 1 and words[0] in _OPEN_WORDS
        is_query = text[match.start() - 1 : match.start()] in ("?", "&")
        if found is None or (is_open and not (is_query and _LOOKS_SECRET.fullmatch(found[0]))):
            continue
        plain = found[0].strip("'\"")
        if not plain or plain.isdigit() or plain.startswith("${") or plain.lower() in _NO_SECRETS:
            continue
        is_prose = ":" in sign and plain == found[0]
        if is_prose and (plain.strip(".!?").isalpha() or (len(words) == 1 and not _LOOKS_SECRET.fullmatch(plain))):
            continue
        end = found.end()
        yield found.span()
