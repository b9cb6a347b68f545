"""Objects of this process under names: functions, classes and rows that no other process could import.

A setting holds a name, `package.module:attr`, and so does what a run records of it. A part that is importable is named so.
A closure, or what is defined in `__main__` or a notebook, stands here under a name that says what it is and has a digest of
its source, so that a run which goes on with another source is refused as any other setting that changed:

    skyrl_train.objects:at_3fa2c1d09b7e.__main__.score

The digest is of the source, the defaults and the plain values that were captured. What the code calls is not looked at.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import types
from collections.abc import Iterable, Mapping
from typing import Any

from skyrl_train.errors import ConfigError, Violation
from skyrl_train.registry import TARGET, PartSpec

ON_THREADS = "thread: what is defined in this process cannot be imported by worker processes"
"""Said of a run whose environment, tools or rewards are such objects."""
MEMORY = "memory:"
"""What an entry of `data.train` begins with that stands for rows in memory."""
_OBJECTS: dict[str, Any] = {}
_ROWS: dict[str, Iterable[Mapping[str, Any]]] = {}


def __getattr__(name: str) -> Any:
    """Raises AttributeError for a name that another process gave."""
    try:
        return _OBJECTS[name]
    except KeyError:
        raise AttributeError(
            "it is an object of another process. Put it into a module, or give it to load_config here too; worker processes "
            "never have it (environment.isolation=thread)"
        ) from None


def has_object(value: object) -> bool:
    """Whether a part, or one in nested settings, names an object that only this process has."""
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(has_object, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and value.startswith(f"{__name__}:")


def named_part(part: Any, *, setting: str) -> PartSpec:
    """Return the name of a function, a class or another callable object: where it can be imported, else here. The keyword
    arguments of a `functools.partial` stand beside it.

    Raises ConfigError for a partial with positional arguments, which a part is called with itself.
    """
    if isinstance(part, functools.partial):
        if part.args:
            remedy = "give them by keyword"
            raise ConfigError([Violation.of(setting, part, "must have no positional arguments", remedy)])
        return {TARGET: named_part(part.func, setting=setting), **part.keywords}
    owner = part if hasattr(part, "__qualname__") else type(part)
    module, qualname = owner.__module__ or "builtins", owner.__qualname__
    if owner is part and module != "__main__" and _imported(module, qualname) is part:
        return f"{module}:{qualname}"
    path = [f"at_{_digest(_facts(part, depth=0))}", *module.split("."), *qualname.split(".")]
    path = [name.strip("<>") for name in path if name != "<locals>"]
    inner = part
    for name in reversed(path[1:]):
        inner = types.SimpleNamespace(**{name: inner})
    _OBJECTS[path[0]] = inner
    return f"{__name__}:{'.'.join(path)}"


def named_rows(rows: Iterable[Mapping[str, Any]], *, setting: str) -> str:
    """Return the name under which `rows_at` finds rows, with a digest of them: equal rows have the same name anywhere."""
    name = f"{MEMORY}{setting}@{_digest([_facts(row, depth=0) for row in rows])}"
    _ROWS[name] = rows
    return name


def rows_at(location: str) -> Iterable[Mapping[str, Any]]:
    """The reader `memory`. Raises KeyError for rows that another process named."""
    if location not in _ROWS:
        raise KeyError("these rows were in the memory of another process. Give them to load_config here too")
    return _ROWS[location]


def _imported(module: str, qualname: str) -> object:
    try:
        found: object = importlib.import_module(module)
        if getattr(found, "__spec__", None) is None:  # it was made here, not read from a file
            return None
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _facts(value: Any, *, depth: int) -> object:
    """Return what tells a value from others, as JSON: of code its source, of plain data all of it, of an object that is a
    part itself what it holds, and of any other its class alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        found = [_facts(each, depth=depth + 1) for each in value]
        return sorted(found, key=repr) if isinstance(value, (set, frozenset)) else found
    if isinstance(value, Mapping):
        return {str(key): _facts(each, depth=depth + 1) for key, each in value.items()}
    if isinstance(value, types.MethodType):
        return [_facts(value.__func__, depth=depth), _facts(value.__self__, depth=depth)]
    if inspect.isfunction(value):
        captured = inspect.getclosurevars(value).nonlocals if value.__closure__ else {}
        return [_source(value), _facts([value.__defaults__, value.__kwdefaults__, captured], depth=depth + 1)]
    if inspect.isclass(value):
        return _source(value)
    if inspect.isbuiltin(value):
        return [value.__qualname__, _facts(value.__self__, depth=depth + 1)]
    if isinstance(value, bytes) or hasattr(value, "tobytes"):  # arrays and images
        content = value if isinstance(value, bytes) else value.tobytes()
        return hashlib.sha256(content).hexdigest()
    held = _facts(vars(value), depth=depth + 1) if depth == 0 and hasattr(value, "__dict__") else None
    return [_source(type(value)), held]


def _source(code: Any) -> object:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, or compiled: what it does is told by its instructions
        name = f"{code.__module__}.{code.__qualname__}"
        return [name, _instructions(code.__code__)] if inspect.isfunction(code) else name


def _instructions(code: types.CodeType) -> list[object]:
    constants = [_instructions(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]
