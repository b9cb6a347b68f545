"""The trainer's variables that worker processes of environments get: those listed here, not its keys. What code asks for
there and was not given is told where that code fails."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from skyrl_train.telemetry.logs import is_secret_name

_GIVEN = re.compile(
    r"""
      PATH | HOME | USER | LOGNAME | SHELL | TERM | COLUMNS | LINES | NO_COLOR | CI | TMPDIR | TMP | TEMP
    | TZ | LANG | LANGUAGE | LC_\w+ | PYTHON\w* | VIRTUAL_ENV | CONDA_PREFIX | LD_LIBRARY_PATH | LD_PRELOAD | XDG_\w+
    | (?: OMP | MKL | KMP | MALLOC )_\w+ | \w+_NUM_THREADS | TOKENIZERS_PARALLELISM
    | SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE | (?i: \w+_proxy )
    | (?: HF | TRANSFORMERS | TORCH | PYTORCH | CUDA | SKYRL_TRAIN )_\w+
    """,
    re.VERBOSE,
)
"""What is given by its name, unless that is a secret's, as HF_TOKEN is."""
_MAX_TOLD = 5
_asked: dict[str, None] = {}
"""Names of the trainer's variables that code of this process asked for in vain, in their order."""
_withheld: set[str] = set()


def given(environ: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """Return the variables that a worker gets of `environ`: the listed ones, and those that are `named`."""
    return {
        name: value
        for name, value in environ.items()
        if name in named or (_GIVEN.fullmatch(name) and not is_secret_name(name))
    }


class _Watched(os._Environ):  # type: ignore[type-arg]  # it is generic in type stubs alone
    """`os.environ`, which takes note of what is asked for and was withheld."""

    def __getitem__(self, name: str) -> str:
        try:
            return str(super().__getitem__(name))
        except KeyError:
            if name in _withheld:
                _asked[name] = None
            raise


def watch(withheld: Collection[str]) -> None:
    """Take note, from here on, of what this process and those that are forked from it ask for among these names."""
    _withheld.update(withheld)
    os.environ.__class__ = _Watched


def told_missing() -> str:
    """Return what follows the message of a failure: what was asked for in vain, and how to give it; empty for nothing."""
    if not _asked:
        return ""
    names = list(_asked)[:_MAX_TOLD]
    verb = "is" if len(names) == 1 else "are"
    return f"; {', '.join(names)} {verb} not given to environments: environment.variables=[{','.join(names)}]"
