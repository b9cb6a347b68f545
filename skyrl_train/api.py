"""Runs that Python starts: the same configuration, checks and runs as those of the command line, with objects for parts.

    from skyrl_train import load_config, train

    config = load_config("+experiment=gsm8k_multiturn", settings={"environment.reward": score, "data.train": rows})
    result = train(config)

Every function raises `SkyrlTrainError` for what the user can fix, and `StopRequested` after a signal, with the checkpoint
written; nothing here ends the process. docs/python_api.md says what works in a notebook.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from skyrl_train import runs
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.objects import has_object, named_part, named_rows
from skyrl_train.runs import RunResult, cli
from skyrl_train.system.files import cache_folder

if TYPE_CHECKING:
    from skyrl_train.config import AnyConfig, Config, SFTConfig

_ROWS = ("data.train", "data.validation")
_TOKENIZER = "model.tokenizer_path"
_ISOLATION = "environment.isolation"
_LOCAL = (
    "environment.",
    "data.",
    "trainer.callbacks",
    "trainer.metrics",
    "tracker.",
    "alerts.",
    "generator.agent_loop",
)
"""Settings whose parts are in the process that starts a run, also where its models are on Ray."""
_NOTHING: Mapping[str, object] = {}


@overload
def load_config(*overrides: str, settings: Mapping[str, object] = _NOTHING, sft: Literal[False] = False) -> Config: ...
@overload
def load_config(*overrides: str, settings: Mapping[str, object] = _NOTHING, sft: Literal[True]) -> SFTConfig: ...
def load_config(*overrides: str, settings: Mapping[str, object] = _NOTHING, sft: bool = False) -> AnyConfig:
    """Return the checked configuration of a command line, for `train` and `evaluate`, or with `sft` for `train_sft`.

    Args:
        overrides: What stands on the command line: `"+experiment=gsm8k_multiturn"`, `"algorithm=rloo"`, `"seed=1"`.
        settings: Values by dotted name, later than the overrides. A part may be an object: a function, a class, an instance,
            a `functools.partial` with keyword arguments; so may data (a list of dicts, a `datasets.Dataset`) and a
            tokenizer. One that cannot be imported by name runs in this process alone, environments and rewards on threads.
        sft: Whether the run is supervised.

    Without `output_dir` each call chooses a fresh folder. Raises ConfigError with all that is wrong.
    """
    plain = {name: _plain(value, name) for name, value in settings.items()}
    here = [name for name, value in plain.items() if has_object(value)]
    is_chosen = any(text.lstrip("+").startswith(f"{_ISOLATION}=") for text in overrides)
    if any(name.startswith("environment.") for name in here) and not is_chosen:
        plain.setdefault(_ISOLATION, "thread")
    arguments = [*overrides, *(cli.as_override(name, value) for name, value in plain.items())]
    config = cli.checked_config(arguments, config_name="sft" if sft else "config")
    if violations := [*_elsewhere(config, here, plain)]:
        raise ConfigError(violations)
    return config


def train(config: Config) -> RunResult:
    """Train by reinforcement learning, or go on with the run in `config.output_dir`."""
    return runs.run_logged(config, runs.train)


def train_sft(config: SFTConfig) -> RunResult:
    """Train on answers that are given, or go on with the run in `config.output_dir`."""
    return runs.run_logged(config, runs.train_sft)


def evaluate(config: Config) -> RunResult:
    """Evaluate the model on `data.validation`, or the checkpoint `trainer.resume_path`; nothing is trained."""
    return runs.run_logged(config, runs.evaluate)


def _plain(value: object, setting: str) -> object:
    """Return the value with names in the place of objects."""
    if setting in _ROWS and value is not None and not isinstance(value, str):
        if _is_rows(value):
            return [named_rows(cast("Any", value), setting=setting)]
        return [
            named_rows(cast("Any", each), setting=f"{setting}[{index}]") if _is_rows(each) else each
            for index, each in enumerate(cast("Any", value))
        ]
    if setting == _TOKENIZER and hasattr(value, "save_pretrained"):
        return _stored_tokenizer(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{setting}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{setting}[{index}]") for index, each in enumerate(value)]
    if callable(value):
        return named_part(value, setting=setting)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    rule = "must be a number, a text, a list or a mapping of them, or a part that can be called"
    raise ConfigError([Violation.of(setting, value, rule, "docs/python_api.md says which objects there may be")])


def _is_rows(value: object) -> bool:
    """Whether a value is a `datasets.Dataset` or a list of mappings, rather than a list of files."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], Mapping)
    return not isinstance(value, (str, Path)) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _stored_tokenizer(tokenizer: Any) -> str:
    """Write a tokenizer where it is kept under the digest of its files, where every process and later run finds it."""
    tokenizers = cache_folder("tokenizers")
    tokenizers.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tokenizers) as temporary:
        tokenizer.save_pretrained(temporary)
        files = sorted(path for path in Path(temporary).rglob("*") if path.is_file())
        sums = "".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
        target = tokenizers / hashlib.sha256(sums.encode()).hexdigest()[:16]
        if not target.is_dir():
            made = Path(temporary) / "whole"
            made.mkdir()
            for path in files:
                path.rename(made / path.name)
            made.rename(target)
    return str(target)


def _elsewhere(config: AnyConfig, here: list[str], plain: Mapping[str, object]) -> Iterator[Violation]:
    """Yield what this process alone has, and actors would have to call."""
    if cli.place(config).placement.backend == "ray":
        for name in here:
            if not name.startswith(_LOCAL):
                rule = "must be importable with placement=ray, whose actors are other processes"
                yield Violation.of(name, plain[name], rule, "put it into a module that can be imported")
