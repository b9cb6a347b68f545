"""Settings in files of other trainers, read as data: nothing in them is imported, executed or expanded.

YAML is loaded by the safe loader, JSON as such; of a Python script the syntax tree is looked at for literal arguments, of a
shell script the words. Whatever a program, a shell or OmegaConf would compute is told as unknown, with its text.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.errors import DataError

MAX_BYTES = 1_000_000
"""A configuration that a person wrote is smaller."""
MAX_VALUES = 20_000
"""Values in a file with what its aliases repeat: few lines of YAML may stand for billions."""
_FLOAT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")
"""Numbers that YAML 1.1 takes for text, such as 1e-6."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_CONFIGS = {"GRPOConfig": "rl", "RLOOConfig": "rl", "SFTConfig": "sft", "TrainingArguments": "sft"}
_TRAINERS = {"GRPOTrainer": "rl", "RLOOTrainer": "rl", "SFTTrainer": "sft"}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}


@dataclass
class Given:
    """What a file sets."""

    values: dict[str, Any] = field(default_factory=dict)
    """By dotted name: numbers, texts, lists, mappings."""
    unknown: dict[str, str] = field(default_factory=dict)
    """By dotted name, the text of what is computed when that program runs."""


def read_settings(path: Path, *, kind: str = "rl") -> Given:
    """Return the settings in a file of another trainer.

    Args:
        path: `.yaml`, `.yml`, `.json`, `.py` or `.sh`.
        kind: Of a Python script with several configurations, which one is meant: `rl` or `sft`.

    Raises DataError for a file that is missing, too large, malformed or of another kind.
    """
    readers = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".py": _script, ".sh": _shell}
    if path.suffix not in readers:
        raise DataError(f"{path} must end in one of {', '.join(readers)}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} has {path.stat().st_size:,} bytes; a configuration has at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
        return readers[path.suffix](text, kind)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    except (yaml.YAMLError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        said = " ".join(str(error).split())[:300]
        raise DataError(f"{path} is not valid {path.suffix[1:]} ({type(error).__name__}: {said})") from error


def _yaml(text: str, _: str) -> Given:
    return _from_mapping(yaml.safe_load(text))


def _json(text: str, _: str) -> Given:
    return _from_mapping(json.loads(text))


def _from_mapping(tree: Any) -> Given:
    if not isinstance(tree, Mapping):
        raise ValueError(f"a mapping of settings is expected, not {type(tree).__name__}")
    _count(tree, [0])
    given, flat = Given(), dict(_flat(tree, ""))
    for name, value in flat.items():
        value = _referred(value, flat)
        if (isinstance(value, str) and "${" in value) or (isinstance(value, (list, dict)) and "${" in str(value)):
            given.unknown[name] = str(value)
        else:
            given.values[name] = value
    return given


def _count(value: Any, seen: list[int]) -> None:
    """Raise ValueError where a tree has more than `MAX_VALUES`, before it is walked or printed."""
    seen[0] += 1
    if seen[0] > MAX_VALUES:
        raise ValueError(f"it stands for more than {MAX_VALUES:,} values")
    for each in (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    ):
        _count(each, seen)


def _flat(tree: Mapping[Any, Any], parent: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of mappings by their dotted names."""
    for key, value in tree.items():
        name = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif value is not None and str(key) not in ("_target_", "defaults"):
            yield name, _number(value)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _referred(value: Any, flat: Mapping[str, Any]) -> Any:
    """Follow `${a.b}` where the file itself has it; a chain that goes in circles stays as it is."""
    for _ in range(10):
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[1] not in flat:
            break
        value = flat[found[1]]
    return value


# Python


def _script(text: str, kind: str) -> Given:
    tree = ast.parse(text)
    constants = _constants(tree)
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        for alias in node.names
    }
    given = Given()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = _last_name(call.func)
        if _CONFIGS.get(called) == kind:
            _arguments(call, given, constants)
        elif called == "LoraConfig":
            _arguments(call, given, constants, _LORA)
            given.values.setdefault("use_peft", True)
        elif _TRAINERS.get(called) == kind:
            _trainer(call, given, constants, imported)
    if not given.values and not given.unknown:
        wanted = [name for name, of in {**_CONFIGS, **_TRAINERS}.items() if of == kind]
        other = "skyrl-sft" if kind == "rl" else "skyrl-train"
        raise ValueError(f"it calls none of {', '.join(wanted)}; {other} reads the others")
    return given


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the whole script binds once, by an assignment, and to what."""
    bound = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    bound.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    bound.update(node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and bound[node.targets[0].id] == 1
    }


def _arguments(
    call: ast.Call, given: Given, constants: Mapping[str, ast.expr], names: Mapping[str, str] | None = None
) -> None:
    for keyword in call.keywords:
        if keyword.arg is None:
            given.unknown[f"**{ast.unparse(keyword.value)[:80]}"] = "arguments that a program collects"
        else:
            _take(given, (names or {}).get(keyword.arg, keyword.arg), keyword.value, constants)
    if call.args:
        given.unknown[f"arguments of {_last_name(call.func)} without a name"] = ast.unparse(call)[:80]


def _take(given: Given, name: str, node: ast.expr, constants: Mapping[str, ast.expr]) -> None:
    try:
        value = _literal(node, constants)
    except ValueError:
        given.unknown[name] = " ".join(ast.unparse(node).split())[:80]
    else:
        if isinstance(value, dict):
            given.values.update(_flat(value, name))
        elif value is not None:
            given.values[name] = value


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _literal(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return the value of a literal, of a name that is bound once to one, or of arithmetic of numbers. Raises ValueError."""
    if depth > 20:
        raise ValueError("names refer to each other")
    if isinstance(node, ast.Name) and node.id in constants:
        return _literal(constants[node.id], constants, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [_literal(side, constants, depth + 1) for side in (node.left, node.right)]
        if not all(
            isinstance(side, (int, float)) and not isinstance(side, bool) and abs(side) < 1e12 for side in sides
        ):
            raise ValueError("no numbers")
        try:
            return _ARITHMETIC[type(node.op)](*sides)
        except ZeroDivisionError:
            raise ValueError("a division by zero") from None
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each, constants, depth + 1) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_literal(key, constants, depth + 1) for key in node.keys if key is not None]
        return {str(key): _literal(value, constants, depth + 1) for key, value in zip(keys, node.values)}
    if isinstance(node, (ast.Constant, ast.UnaryOp)):
        value = ast.literal_eval(node)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
    raise ValueError("computed")


def _trainer(call: ast.Call, given: Given, constants: Mapping[str, ast.expr], imported: Mapping[str, str]) -> None:
    """Take model, rewards, tools and data of the call that makes a trainer of TRL's."""
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    for argument, name in (
        ("model", "model_name_or_path"),
        ("train_dataset", "train_data"),
        ("eval_dataset", "val_data"),
    ):
        if (node := named.get(argument)) is None:
            continue
        node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Call) and _last_name(node.func) == "load_dataset":
            _take_dataset(given, name, node, constants)
        elif isinstance(node, ast.Call) and _last_name(node.func) == "from_pretrained" and node.args:
            _take(given, name, node.args[0], constants)
        else:
            _take(given, name, node, constants)
    for argument, name in (("reward_funcs", "reward_funcs"), ("tools", "tools")):
        if (node := named.get(argument)) is not None:
            nodes = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
            given.values[name] = [_function(each, constants, imported) for each in nodes]


def _take_dataset(given: Given, name: str, call: ast.Call, constants: Mapping[str, ast.expr]) -> None:
    try:
        parts = [_literal(each, constants) for each in call.args]
        split = next((_literal(each.value, constants) for each in call.keywords if each.arg == "split"), "train")
        files = next((_literal(each.value, constants) for each in call.keywords if each.arg == "data_files"), None)
    except ValueError:
        given.unknown[name] = " ".join(ast.unparse(call).split())[:80]
        return
    if files is not None:
        given.values[name] = files if isinstance(files, list) else [files]
    else:
        given.values[name] = [f"{'/'.join(map(str, parts))}:{split}"]


def _function(node: ast.expr, constants: Mapping[str, ast.expr], imported: Mapping[str, str]) -> str:
    """How a function is named here: `module:name` where the script imports it, its bare name where it defines it."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    try:
        return str(_literal(node, constants))
    except ValueError:
        return " ".join(ast.unparse(node).split())[:80]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# Shell

_ASSIGNED = re.compile(r"""(?:export\s+)?(\w+)=("[^"]*"|'[^']*'|[^\s"']*)\s*(?:#.*)?""")
_DEFAULT = re.compile(r""":\s*"\$\{(\w+):=([^}]*)\}"\s*(?:#.*)?""")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_SETTING = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def _shell(text: str, _: str) -> Given:
    """Take the words KEY=VALUE of the commands of a script that start a Python module."""
    given, bound = Given(), _assigned(text)
    for line in text.replace("\\\n", " ").splitlines():
        if " -m " not in line:
            continue
        words = shlex.split(line, comments=True)
        for found in filter(None, map(_SETTING.fullmatch, words)):
            name, value = found[1], _substituted(found[2], bound)
            if "$" in value or "`" in value:
                given.unknown[name] = value
            elif (parsed := _number(yaml.safe_load(value) if value else None)) is not None:
                given.values[name] = parsed
    if not given.values and not given.unknown:
        raise ValueError("no command of it is `python -m MODULE KEY=VALUE ...`")
    return given


def _assigned(text: str) -> dict[str, str]:
    """Variables that a script gives one value, which nothing computes."""
    found: dict[str, list[str]] = {}
    for line in map(str.strip, text.splitlines()):
        if match := _ASSIGNED.fullmatch(line) or _DEFAULT.fullmatch(line):
            found.setdefault(match[1], []).append(match[2].strip("\"'"))
    return {name: values[0] for name, values in found.items() if len(values) == 1 and "$(" not in values[0]}


def _substituted(value: str, bound: Mapping[str, str]) -> str:
    for _ in range(5):  # variables of variables
        value = _VARIABLE.sub(lambda match: bound.get(match[1], match[0]), value)
    return value
