"""Code of the user's own: a part in a file, named by its path, and the line of it that raised an error."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import linecache
import os
import sys
import sysconfig
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_FILE_MARK = ".py:"
_LIBRARIES = ("site-packages", "dist-packages")
_MAX_LINE = 120
"""Characters of a line of code that a message quotes."""
at_breakpoint: list[Callable[[], None]] = []
"""What takes off the terminal what moves there, called at each `breakpoint()`."""
_digests: dict[str, str] = {}
"""Of files that settings of this process name."""


def in_file(target: str) -> bool:
    """Whether a target is `FILE.py:attr` rather than `package.module:attr`."""
    return _FILE_MARK in target


def absolute_target(target: str) -> str:
    """Return a target in a file with the file's absolute path, from the folder where the user stands; any other as it is.
    What the file holds now is what `code_digests` tells of it."""
    if not in_file(target):
        return target
    file, _, attr = target.rpartition(":")
    file = os.path.abspath(os.path.expanduser(file))
    _digests[file] = _digest(file)
    return f"{file}:{attr}"


def code_digests(settings: Any) -> dict[str, str]:
    """Return the SHA-256 sums of the files that the targets in nested settings name, as they were when these were read."""
    if isinstance(settings, Mapping):
        return {file: digest for each in settings.values() for file, digest in code_digests(each).items()}
    if isinstance(settings, (list, tuple)):
        return {file: digest for each in settings for file, digest in code_digests(each).items()}
    if not isinstance(settings, str) or not in_file(settings):
        return {}
    file = settings.rpartition(":")[0]
    digest = _digests.get(file) or _digest(file)
    return {file: digest} if digest else {}


def _digest(file: str) -> str:
    """Return the sum of a file; empty where it cannot be read, which its import will tell."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def module_of_file(file: str) -> ModuleType:
    """Return the module in a file, which is run once in a process. Its folder is the last place that it imports from.

    It is called as its file is, `my_code`, so that what it defines is found again under that name; where another module has
    the name, with a digest of its path. Raises FileNotFoundError, and whatever the file's code raises.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = path.stem
    taken = sys.modules.get(name)
    if taken is not None and getattr(taken, "__file__", None) == file:
        return taken
    if taken is not None or not name.isidentifier() or importlib.util.find_spec(name) is not None:
        name = f"{name}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file whose name ends with .py has a loader"
    assert spec.loader is not None, "a file whose name ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def error_text(error: BaseException) -> str:
    """Return `ValueError: unknown city 'Oz'`, in one line."""
    try:
        text = " ".join(str(error)[:2000].split())
    except Exception:  # an error whose text cannot be had is told by its type
        text = ""
    if isinstance(error, BdbQuit):
        text = (
            "breakpoint() needs the terminal of the trainer's process: set environment.isolation=thread, and run at one"
        )
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_line(error: BaseException) -> str:
    """Return where the user's own code raised an error, ` at my_code.py:12 in score: return float(row["answr"])`.

    The innermost frame that is neither of this package nor of an installed one nor of the standard library, of the error or
    else of what it was raised from; empty where there is none.
    """
    current: BaseException | None = error
    while current is not None:
        for frame, line in reversed(list(traceback.walk_tb(current.__traceback__))):
            code = frame.f_code
            if _is_own(code.co_filename):
                text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
                name = getattr(code, "co_qualname", code.co_name)
                quoted = f": {text[:_MAX_LINE]}" if text else ""
                return f" at {_short(code.co_filename)}:{line} in {name}{quoted}"
        current = current.__cause__ or current.__context__
    return ""


@functools.cache
def _is_own(file: str) -> bool:
    if file.startswith("<") or any(f"{os.sep}{each}{os.sep}" in file for each in _LIBRARIES):
        return False
    paths = sysconfig.get_paths()
    roots = {os.path.dirname(__file__), paths["stdlib"], paths["platstdlib"]}
    return not any(file.startswith(f"{root}{os.sep}") for root in roots)


def _short(file: str) -> str:
    """Return a path as the user would write it: from the folder where they stand, if it is in there."""
    here = f"{os.getcwd()}{os.sep}"
    return file.removeprefix(here)
