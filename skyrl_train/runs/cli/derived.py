"""`${derived:}` in `conf/`: settings that nobody stated, from the model, the machine and what is stated beside them.

A setting counts as stated where a preset or the command line has put something else in the place of `${derived:}`. What
the run recorded that is gone on from, or forked, comes before the rule: its numbers stay whatever is found here now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.batch.layouts import Measured, ModelShape
from skyrl_train.config.derived import (
    COMPILE,
    CONTEXT,
    RATES,
    READ,
    RL_DERIVED,
    SFT_DERIVED,
    Situation,
    context_length,
    derive,
    derive_sft,
    reasons,
)
from skyrl_train.config.fields import LayoutName
from skyrl_train.errors import ModelError
from skyrl_train.model.sizes import read_architecture, text_part
from skyrl_train.system import gpu_name, usable_cores
from skyrl_train.system.files import cache_folder, read_json
from skyrl_train.telemetry import STATE_FILE

_EXPRESSION = "${derived:"
_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(\d+(?:\.\d+)?)\s*([MB])(?![A-Za-z])", re.IGNORECASE)
"""`135M` in `SmolLM2-135M-Instruct`."""
_is_deriving: ContextVar[bool] = ContextVar("is_deriving", default=False)


def derived(base: Any = None, *, _node_: Node, _root_: DictConfig) -> Any:
    """`${derived:}`, or `${derived:BASE}` of a setting that a rule moves only where others do not fit: the value of the
    setting that it stands for. Raises ValueError for one that there is no rule for."""
    if _is_deriving.get():
        raise ValueError("stands for a value that is being derived")
    name = str(_node_._get_full_key(None))
    with _deriving():
        record = _recorded(_root_)
        if name in record or (record and name == RATES):
            return _entry(record, name)
        if name == CONTEXT:
            lengths = ("data.max_prompt_length", "generator.sampling.max_generate_length", "generator.max_turns")
            prompt, response, turns = (_selected(_root_, each) for each in lengths)
            return context_length(base, prompt=prompt, response=response, turns=turns)
        found = _derive(_root_, _stated(_root_), _situation(_root_))
    if name not in found:
        raise ValueError(f"there is no rule from which {name} follows")
    return _entry(found, name)


def _entry(settings: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting, of a mapping that was recorded entry by entry, too; None of one that was not recorded,
    as where rates were the stated ones. As a node: `--resolve` cannot put a plain mapping in the place of an
    interpolation."""
    entries = {key.removeprefix(f"{name}."): settings[key] for key in settings if key.startswith(f"{name}.")}
    value = settings.get(name, entries or None)
    return DictConfig(dict(value)) if isinstance(value, Mapping) else value


def derivation(*, _root_: DictConfig) -> ListConfig:
    """`${derivation:}`: lines that say what was derived in a configuration, and why. As a node: `--resolve` cannot put a
    plain list in the place of an interpolation."""
    return ListConfig(_derivation(_root_))


def _derivation(_root_: DictConfig) -> list[str]:
    with _deriving():
        stated, situation, record = _stated(_root_), _situation(_root_), _recorded(_root_)
        if record and _selected(_root_, "trainer.resume_mode") != "latest":
            return [
                f"sizes       of the run at {_selected(_root_, 'trainer.resume_path')}, where nothing else is stated"
            ]
        if record:
            return list(record.get("derived") or ())
        return list(reasons(_derive(_root_, stated, situation), stated, situation))


@contextmanager
def _deriving() -> Iterator[None]:
    """While settings are read for a rule, one that refers to what the rule gives is none that the rule can follow."""
    token = _is_deriving.set(True)
    try:
        yield
    finally:
        _is_deriving.reset(token)


def _is_sft(root: DictConfig) -> bool:
    return "generator" not in root


def _derive(root: DictConfig, stated: Mapping[str, Any], situation: Situation) -> dict[str, Any]:
    return derive_sft(stated, situation) if _is_sft(root) else derive(stated, situation)


def _stated(root: DictConfig) -> dict[str, Any]:
    """Return the settings that rules read, without those that are to be derived."""
    names = (*READ, *(SFT_DERIVED if _is_sft(root) else RL_DERIVED))
    values = {name: _selected(root, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _selected(root: DictConfig, name: str) -> Any:
    """Return the value of a setting; None where there is none, or it cannot be worked out, or is to be derived."""
    node = _node(root, name)
    if node is None or _is_to_be_derived(name, node):
        return None
    try:
        return OmegaConf.select(root, name)
    except OmegaConfBaseException:  # told where the setting itself is read
        return None


def _node(root: DictConfig, name: str) -> Node | None:
    parent: Any = root
    *sections, last = name.split(".")
    for part in sections:
        parent = parent._get_node(part, validate_access=False) if isinstance(parent, DictConfig) else None
    node = parent._get_node(last, validate_access=False) if isinstance(parent, DictConfig) else None
    return node if isinstance(node, Node) else None


def _is_to_be_derived(name: str, node: Node) -> bool:
    value = str(node._value())
    return _EXPRESSION in value or (name == COMPILE and value == "auto")


def _situation(root: DictConfig) -> Situation:
    path, revision = str(_selected(root, "model.path")), _selected(root, "model.revision")
    on_gpu, measured = _selected(root, "platform.name") == "gpu", Measured()
    rates = _node(root, RATES)
    if rates is not None and _is_to_be_derived(RATES, rates) and cache_folder("rates").is_dir():
        measured = Measured.of_device(gpu_name() if on_gpu else "cpu")
    parameters, hidden_size = _sizes_of(path, revision)
    return Situation(
        parameters=parameters,
        on_gpu=on_gpu,
        num_cores=usable_cores(),
        rates=measured.rates,
        compiled_gain={each: measured.compiled_gain(hidden_size, each) for each in get_args(LayoutName) if hidden_size},
    )


def _sizes_of(path: str, revision: str | None) -> tuple[int, int]:
    """Return about how many parameters a token passes in the model at `path`: as its config says, else its name; else 0. And
    the hidden size of a dense one whose config is here; else 0."""
    try:
        config = text_part(read_architecture(path, revision=revision))
        shape = ModelShape.of_config(config)
        hidden, is_tied = int(config["hidden_size"]), bool(config.get("tie_word_embeddings", True))
        matrices = (shape.linear_flops_per_token + shape.head_flops_per_token * (1 if is_tied else 2)) / 2
        parameters = int(matrices) + hidden * (2 * shape.num_layers + 1)  # norms
        return parameters, 0 if config.get("num_experts_per_tok") else hidden
    except (ModelError, KeyError, TypeError, ValueError):
        found = _IN_NAME.search(path.rpartition("/")[2])
    return (int(float(found[1]) * (1e9 if found[2] in "bB" else 1e6)) if found else 0), 0


def _recorded(root: DictConfig) -> Mapping[str, Any]:
    """Return the settings, by name, of the checkpoint that the run goes on from; nothing where it begins anew."""
    names = ("trainer.resume_mode", "trainer.resume_path", "output_dir")
    return recorded_settings(*(str(_selected(root, name) or "") for name in names))


def recorded_settings(mode: str, path: str, output_dir: str) -> Mapping[str, Any]:
    """Return the settings, by dotted name, of the checkpoint that a run goes on from; nothing where it begins anew.

    Args:
        mode: `trainer.resume_mode`.
        path: `trainer.resume_path`; may be empty.
        output_dir: Of the run.
    """
    if mode == "none":
        return {}
    try:
        own = _newest_state(Path(output_dir).expanduser()) if mode != "from_path" else None
        file = own or (_newest_state(Path(path).expanduser()) if mode in ("from_path", "fork") and path else None)
        settings = {} if file is None else read_json(file)["config"]
    except (OSError, ValueError, KeyError, TypeError):  # told where the run goes on from it
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _newest_state(folder: Path) -> Path | None:
    """The state in the newest checkpoint of a run's folder, or in the checkpoint that the folder is."""
    if (folder / STATE_FILE).is_file():
        return folder / STATE_FILE
    found = [*folder.glob(f"checkpoints/step_*/{STATE_FILE}"), *folder.glob(f"step_*/{STATE_FILE}")]
    return max(found, key=lambda file: file.parent.name, default=None)
