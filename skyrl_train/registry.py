"""Parts by name: a built-in one, or a custom one as `package.module:attr`, with keyword arguments beside it.

A setting that chooses a part takes a built-in name, a target `package.module:attr`, or a mapping in Hydra's idiom,
`{_target_: package.module:attr, tau: 0.3}`, whose other keys are keyword arguments of the target. A target resolves the
same way in every process, so nothing has to be registered or shipped. Built-in names are targets too: `Seam` lists
them, together with what each part reads, and imports a part only when it is used. What a loss reads and which arguments
a part takes stands at its function, as in a custom one, and is read from the source: nothing imports torch for it.

A target may be in a file of the user's own, named by its path; where it raises, a message quotes the line of that file.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_train.declarations import (
    Argument,
    Builtin,
    Reads as Reads,  # plug-ins have both from here
    declared_arguments,
    reads as reads,
)
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.system import lacking

PartSpec = str | Mapping[str, Any]
"""What a setting says of a part: a name, a target, or a mapping with `_target_` and keyword arguments."""

TARGET = "_target_"
_MAX_NAMES = 8
"""Names of a module that a message lists where none is near."""


@dataclass(frozen=True, eq=False)
class Seam(Mapping[str, Any]):
    """The place of one kind of part: its built-in names, and how custom ones are found. A mapping of names to parts."""

    setting: str
    """The setting that chooses the part, e.g. `trainer.algorithm.policy_loss`."""
    builtins: Mapping[str, Builtin]
    given: tuple[str, ...] = ()
    """What the part is called with, by position; its other parameters are for the user's keyword arguments."""
    readable: frozenset[str] = frozenset()
    """Columns that such a part can be given where it declares them; see `Reads.columns`."""
    methods: tuple[str, ...] = ()
    """What a custom part that is a class must define: `a|b` where one of two will do, `async a` for a coroutine."""
    names_elsewhere: bool = False
    """There are further names, which can only be looked up where they are used: who does so checks the part, too."""
    declares_arguments: bool = False
    """Its built-in parts are functions whose keyword-only parameters say what their arguments may be, as settings do."""
    undeclared: Reads = field(default_factory=lambda: Reads(declared=False))
    """What is assumed of a custom part that does not say what it reads."""

    def __getitem__(self, name: str) -> Any:
        return import_attr(self.builtins[name].target, field=self.setting)

    def __iter__(self) -> Iterator[str]:
        return iter(self.builtins)

    def __len__(self) -> int:
        return len(self.builtins)

    def resolve(self, spec: PartSpec) -> Any:
        """The part that `spec` chooses, with its keyword arguments bound.

        Raises ConfigError naming the setting, the known names and the nearest one.
        """
        target, arguments = split_spec(self.normal(spec))
        part: Any = import_attr(self._target(target), field=self.setting)
        return functools.partial(part, **arguments) if arguments else part

    def arguments(self, spec: PartSpec) -> Mapping[str, Argument]:
        """The arguments of the built-in part that `spec` chooses, as it declares them, without importing it; of a custom
        part, and where parts declare none, nothing."""
        builtin = self.builtins.get(self.name_of(spec)) if self.declares_arguments else None
        return {} if builtin is None else declared_arguments(builtin.target)

    def normal(self, spec: PartSpec) -> PartSpec:
        """The same part in the shortest way: a built-in one by its name, without arguments that are at their default, and
        without what a preset said of the part whose place this one takes (Hydra merges the two).

        Arguments are of the types that the part declares, where they can be; `violations` tells of the others.
        """
        arguments = {key: value for key, value in split_spec(spec)[1].items() if not self._is_left(spec, key, value)}
        name, declared = self.name_of(spec), self.arguments(spec) if arguments else {}
        typed = {key: declared[key].typed(value) if key in declared else value for key, value in arguments.items()}
        kept = {
            key: value for key, value in typed.items() if key not in declared or not declared[key].is_default(value)
        }
        if name in self.builtins:
            return {TARGET: name, **kept} if kept else name
        return spec if isinstance(spec, str) else {TARGET: spec[TARGET], **kept}

    def complete(self, spec: PartSpec) -> PartSpec:
        """The same part with every argument that it declares, for a record that says what its defaults were."""
        declared = self.arguments(spec)
        defaults = {key: argument.default for key, argument in declared.items()}
        return {TARGET: self.name_of(spec), **defaults, **split_spec(spec)[1]} if declared else spec

    def _is_left(self, spec: PartSpec, key: str, value: Any) -> bool:
        """Whether the chosen part lacks an argument that has the value which another one's default, or a preset, gave it."""
        others = [self.arguments(name)[key] for name in self.having(key)]
        if not any(each.is_default(value) or each.is_preset(value) for each in others):
            return False
        name = self.name_of(spec)
        if name in self.builtins:
            return key not in self.arguments(name)
        try:
            part: Any = import_attr(self._target(name), field=self.setting)
            parameters = inspect.signature(part).parameters
        except (ConfigError, TypeError, ValueError):
            return False
        return key not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def having(self, argument: str) -> list[str]:
        """The built-in parts that take an argument of that name."""
        return [name for name in self.builtins if argument in self.arguments(name)]

    def name_of(self, spec: PartSpec) -> str:
        """The built-in name, also where `spec` is its target; the target of a custom part."""
        target = split_spec(spec)[0]
        return next((name for name, builtin in self.builtins.items() if target == builtin.target), target)

    def reads(self, spec: PartSpec) -> Reads:
        """What that part reads, without importing it where it is a built-in one.

        A custom part that cannot be imported counts as undeclared here: `violations` tells why.
        """
        name = self.name_of(spec)
        if name in self.builtins:
            return self.builtins[name].reads
        try:
            found = getattr(import_attr(self._target(name), field=self.setting), "reads", None)
        except ConfigError:
            return self.undeclared
        return found if isinstance(found, Reads) else self.undeclared

    def violations(self, spec: PartSpec, setting: str = "") -> list[Violation]:
        """What is wrong with `spec`, the value of `setting`: no such name, nothing to import there, arguments that the
        part does not take.

        Imports custom parts, and built-in ones only where arguments are given to them that they do not declare. Whether
        the value of a declared one is allowed is a rule (`config/rules/argument_rules.py`).
        """
        setting = setting or self.setting
        target, arguments = split_spec(self.normal(spec))
        if target in self.builtins and not arguments:
            return []
        name = self.name_of(spec)
        if self.declares_arguments and name in self.builtins:
            known = [*self.arguments(name)]
            return list(_unknown_arguments(arguments, known, field=setting, name=name, having=self.having))
        own = self.builtins[target].settings if target in self.builtins else ""
        if own:
            rule, value = f"takes no arguments with {target}", ", ".join(arguments)
            return [Violation(field=setting, rule=rule, value=value, remedy=f"its settings are {own}")]
        try:
            part = import_attr(self._target(target, setting), field=setting)
        except ConfigError as error:
            return list(error.violations)
        if not callable(part):
            rule, remedy = "must name a class or a function", "Point it at the class or function itself"
            return [Violation(field=setting, rule=rule, value=f"{target!r} ({type(part).__name__})", remedy=remedy)]
        unreadable = sorted(self.reads(spec).columns - self.readable)
        if unreadable:
            rule = (
                f"cannot read {', '.join(unreadable)}; it can read {', '.join(sorted(self.readable)) or 'no columns'}"
            )
            remedy = "Change its declaration, @reads(...)"
            return [Violation(field=setting, rule=rule, value=repr(target), remedy=remedy)]
        found = list(
            argument_violations(part, arguments, field=setting, name=target, given=self.given, having=self.having)
        )
        return [*found, *_missing_methods(part, self.methods, field=setting, name=target)]

    def _target(self, name: str, setting: str = "") -> str:
        if name in self.builtins:
            return self.builtins[name].target
        if ":" in name:
            return name
        raise unknown_name(name, self.builtins, field=setting or self.setting)


def split_spec(spec: PartSpec) -> tuple[str, dict[str, Any]]:
    """Name or target, and keyword arguments. A target with dots alone, `package.module.attr`, gets its colon."""
    if isinstance(spec, str):
        return spec, {}
    target = str(spec[TARGET])
    if ":" not in target and "." in target:
        target = ":".join(target.rsplit(".", 1))
    return target, {key: value for key, value in spec.items() if key != TARGET}


def part_name(spec: PartSpec) -> str:
    """The part as a short text: `grpo`, or `my_code:loss(tau=0.3)`."""
    target, arguments = split_spec(spec)
    inside = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{target}({inside})" if arguments else target


def argument_violations(
    part: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    field: str,
    name: str,
    given: Sequence[str] = (),
    having: Callable[[str], Sequence[str]] = lambda _: (),
) -> Iterator[Violation]:
    """Keyword arguments that `part` does not take, those that it needs and does not get, and too few parameters for what
    it is given by position.

    Args:
        part: A class or a function, which is called with `given` by position beside these.
        field: The setting, e.g. `trainer.algorithm.policy_loss`.
        name: As the part is called in the message.
        having: The built-in parts that take an argument of a name.
    """
    try:
        parameters = list(inspect.signature(part).parameters.values())
    except (TypeError, ValueError):  # some callables written in C say nothing of their parameters
        return
    placed = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(placed) < len(given) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        signature = f"{name}({', '.join(one.name for one in parameters)})"
        remedy = "Give it parameters for them, before those of its own (docs/extending.md says what they are)"
        yield Violation(field=field, rule=f"is called with ({', '.join(given)})", value=signature, remedy=remedy)
        return
    parameters = parameters[len(given) :]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [one.name for one in named]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        yield from _unknown_arguments(arguments, known, field=field, name=name, having=having)
    for one in named:
        if one.default is one.empty and one.name not in arguments:
            setting = "" if field.endswith("]") else f"{field}="  # an item of a list is written with its list
            remedy = f"write {setting}{{{TARGET}: {name}, {one.name}: ...}}"
            yield Violation(
                field=f"{field}.{one.name}", rule=f"must be given to {name}", value="nothing", remedy=remedy
            )


def _unknown_arguments(
    arguments: Mapping[str, Any], known: Sequence[str], *, field: str, name: str, having: Callable[[str], Sequence[str]]
) -> Iterator[Violation]:
    for key, value in arguments.items():
        if key not in known:
            rule = f"is no argument of {name}, which takes {', '.join(known) or 'none'}"
            if others := having(key):  # it may come from a preset
                remedy = f"it is one of {', '.join(others)}: drop it, or what a preset says with ~{field}.{key}"
            else:
                remedy = did_you_mean(key, list(known)) or f"drop {field}.{key}"
            yield Violation(field=f"{field}.{key}", rule=rule, value=repr(value), remedy=remedy)


def _missing_methods(part: Any, methods: Sequence[str], *, field: str, name: str) -> Iterator[Violation]:
    if not inspect.isclass(part):
        return
    missing = [one for one in methods if not any(_defines(part, each) for each in one.split("|"))]
    if missing:
        rule = f"must define {', '.join(one.replace('|', ' or ') for one in missing)}"
        remedy = "docs/extending.md says what each one does"
        yield Violation(field=field, rule=rule, value=repr(name), remedy=remedy)


def _defines(part: type, method: str) -> bool:
    found = getattr(part, method.removeprefix("async "), None)
    return found is not None and (not method.startswith("async ") or inspect.iscoroutinefunction(found))


def did_you_mean(name: str, known: Mapping[str, object] | list[str]) -> str:
    """`did you mean 'grpo'?`, or an empty string where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def unknown_name(name: str, known: Mapping[str, object], *, field: str) -> ConfigError:
    """The error for a name that no part has."""
    remedy = f"{did_you_mean(name, known)} Write package.module:attr for a custom one".strip()
    rule = f"must be one of {', '.join(known)}" if known else "must be a custom part"
    return ConfigError([Violation(field=field, rule=rule, value=repr(name), remedy=remedy)])


def import_attr(path: str, *, field: str) -> object:
    """The object that `package.module:attr` or `FILE.py:attr` names.

    Raises ConfigError naming `field` when the module cannot be imported or has no such attribute, with the nearest that it
    has, or the line of the user's own code that raised.
    """
    module_name, _, attr = path.rpartition(":") if in_file(path) else path.partition(":")
    try:
        module: object = module_of_file(module_name) if in_file(path) else importlib.import_module(module_name)
    except Exception as error:  # whatever a custom module raises while it is imported
        raise _no_part(field, path, f"{type(error).__name__}: {error}{_where(error, module_name)}") from error
    value = module
    for part in attr.split("."):
        try:
            value = getattr(value, part)
        except Exception as error:  # a module may look names up by code of its own
            owner = module_name if value is module else getattr(value, "__name__", module_name)
            raise _no_part(field, path, _no_attr(error, value, part, owner)) from error
    return value


def _no_attr(error: Exception, owner: object, name: str, called: str) -> str:
    """Return why an object has no such attribute: the nearest name that it has, or what its own code says."""
    if not isinstance(error, AttributeError) or "has no attribute" not in str(error):
        return f"{type(error).__name__}: {error}{own_line(error)}"
    names = [each for each in dir(owner) if each.isidentifier() and not each.startswith("_")]
    near = did_you_mean(name, names) or f"it has {', '.join(names[:_MAX_NAMES]) or 'nothing by name'}"
    return f"there is no {name!r} in {called}. {near[0].upper()}{near[1:]}"


def _where(error: Exception, module: str) -> str:
    """Return what follows an error of an import: the line that raised it, or how a module would be found."""
    if lacks := lacking(error):
        return f". {lacks}"
    missing = isinstance(error, ModuleNotFoundError) and module.split(".")[0] == str(error.name).split(".")[0]
    if isinstance(error, FileNotFoundError) or not missing:
        return own_line(error)
    beside = f"{module.replace('.', '/')}.py"
    if os.path.isfile(beside):
        return f". There is a file of that name here: write {beside}:NAME"
    return ". Is the package installed, or its folder on PYTHONPATH?"


def _no_part(field: str, path: str, remedy: str) -> ConfigError:
    rule = "must name an importable `package.module:attr` or `FILE.py:attr`"
    return ConfigError([Violation(field=field, rule=rule, value=repr(path), remedy=remedy)])


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
