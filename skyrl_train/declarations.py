"""What a part says of itself: what it reads, and which arguments it takes.

A custom part says it to whoever imports it. Of a part of this package it is read from its source, before anything that
imports torch is loaded.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

T = TypeVar("T")

_ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds this package."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What an advantage estimator, a loss or a planner reads. What has to be computed for it follows from this."""

    columns: frozenset[str] = frozenset()
    """Beside rewards, masks and the policy's log-probabilities: `old_logprobs`, `ref_logprobs` (loads a reference),
    `values` (needs a critic); an estimator also `sum_pi_squared`, `greedy_rewards` and `reward_components`; a loss
    `advantages` and `rollout_logprobs`. A micro-batch planner: `memory_budget` (has models probed at the start)."""
    whole_groups: bool = False
    """It compares the trajectories of one prompt, so that a single one, or equal ones, are worth 0."""
    tokenwise: bool = False
    """A loss: that of a token reads nothing of its row's other tokens."""
    every_token: bool = False
    """An estimator: it looks at tokens that nobody sampled, too (prompts and observations)."""
    teacher: Literal["reference", "other_model", "policy"] = "reference"
    """Who gives `ref_logprobs`: the reference, whichever it is; a reference that must not be the policy; or the policy
    itself, shown `generator.privileged_context`."""
    own_devices: bool = False
    """An inference engine: it computes on devices of its own, on Ray in actors (`generator.vllm.num_engines`); any other is
    made in the loop's process."""
    in_flight_updates: bool = False
    """An inference engine: it takes new weights while it answers, between two tokens, as `EngineSettings.in_flight_cache`
    says, and its answers tell which of them sampled what."""
    declared: bool = True
    """False for a custom part that says nothing."""


def reads(*columns: str, **facts: Any) -> Callable[[T], T]:
    """Declare what a custom estimator, loss or planner reads: `@reads("old_logprobs", "ref_logprobs", tokenwise=True)`.

    Args:
        columns: As `Reads.columns`.
        facts: The other fields of `Reads`.

    Raises TypeError for an unknown field. Columns that there are not are refused with the configuration.
    """
    declared = Reads(columns=frozenset(columns), **facts)

    def declare(part: T) -> T:
        part.reads = declared  # type: ignore[attr-defined]
        return part

    return declare


@dataclass(frozen=True)
class Builtin:
    """A part of the package: where it is, and what it reads."""

    target: str
    reads: Reads = field(default_factory=Reads)
    settings: str = ""
    """Where the part's own settings are, if it is not called as custom ones are and so takes no arguments."""
    free: frozenset[str] = frozenset()
    """Arguments that a resumed run may change as it likes: addresses, deadlines, where something is computed."""


@dataclass(frozen=True)
class InPreset:
    """On an argument: a preset in `conf/` gives it this value, which is not its default."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A keyword argument that a built-in part takes."""

    annotation: Any
    """Its type, with ranges and the like, as a setting's."""
    default: Any
    meaning: str
    """What the docstring of the part says of it."""

    def typed(self, value: Any) -> Any:
        """The value, as a float where that is meant: `2`, or `1e-6`, which YAML 1.1 readers leave a text."""
        wants_float = (get_args(self.annotation) or (self.annotation,))[0] is float
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if wants_float and (is_number or _is_exponent(value)) else value

    def is_default(self, value: Any) -> bool:
        """Whether the value is the default, and of its type."""
        return type(value) is type(self.default) and bool(value == self.default)

    def is_preset(self, value: Any) -> bool:
        """Whether the value is one that a preset states."""
        return any(isinstance(fact, InPreset) and fact.value == value for fact in get_args(self.annotation)[1:])


@functools.cache
def declared_parts(package: str) -> Mapping[str, Builtin]:
    """The parts that a package's modules define, as their sources say: each function under `@reads(...)`, by its name."""
    files = sorted(_ROOT.joinpath(*package.split(".")).glob("*.py"))
    return {
        node.name: Builtin(f"{package}.{file.stem}:{node.name}", declared)
        for file in files
        if "@reads(" in file.read_text(encoding="utf-8")
        for node in _functions(file)
        for decorator in node.decorator_list
        if (declared := _declared_reads(decorator)) is not None
    }


def _declared_reads(decorator: ast.expr) -> Reads | None:
    """What `@reads(...)` declares; None for another decorator."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Name) or decorator.func.id != "reads":
        return None
    facts = {each.arg: ast.literal_eval(each.value) for each in decorator.keywords if each.arg}
    return Reads(columns=frozenset(map(ast.literal_eval, decorator.args)), **facts)


@functools.cache
def declared_arguments(target: str) -> Mapping[str, Argument]:
    """The keyword-only parameters of the function that `package.module:attr` names, as its source says.

    Its module is not run, as that would import torch; names in annotations are those that the module imports.
    """
    module, _, name = target.partition(":")
    file = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    function = next(node for node in _functions(file) if node.name == name)
    parameters = dict(zip(function.args.kwonlyargs, function.args.kw_defaults))
    texts = {each.arg: ast.unparse(each.annotation) for each in parameters if each.annotation}
    names = {node.id for each in parameters for node in ast.walk(each) if isinstance(node, ast.Name)}
    imported = {
        name.asname or name.name: getattr(importlib.import_module(node.module), name.name)
        for node in _parsed(file).body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if (name.asname or name.name) in names
    }
    hints = get_type_hints(SimpleNamespace(__annotations__=texts), imported, include_extras=True)
    meanings = _meanings(ast.get_docstring(function) or "")
    return {
        each.arg: Argument(
            annotation=hints[each.arg], default=ast.literal_eval(default or ""), meaning=meanings.get(each.arg, "")
        )
        for each, default in parameters.items()
    }


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _functions(file: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in _parsed(file).body if isinstance(node, ast.FunctionDef))


def _meanings(docstring: str) -> dict[str, str]:
    """What a docstring says of each argument under `Args:`."""
    _, _, section = docstring.partition("\nArgs:\n")
    lines = re.sub(r"\n {5,}", " ", section.partition("\n\n")[0]).splitlines()
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


def _is_exponent(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) is not None
