"""What `conf/` needs in order to compose: the schema as its base, and resolvers for platform and folders."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, get_args

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.batch.layouts import Measured, ModelShape
from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.data import is_own_data
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
from skyrl_train.config.door import NotStated
from skyrl_train.config.environment import AGENT, REPORTED, SINGLE_TURN
from skyrl_train.config.fields import LayoutName, defaults, walk
from skyrl_train.errors import ModelError
from skyrl_train.model.sizes import read_architecture, text_part
from skyrl_train.system import detect_platform, gpu_name, usable_cores
from skyrl_train.system.files import cache_folder, read_json
from skyrl_train.telemetry import STATE_FILE

HYDRA_VERSION_BASE = "1.3"
"""For `hydra.main(version_base=...)` and the compose API."""

_TIME = "%Y-%m-%d_%H%M%S"
_run_names: list[str] = []
"""When each run of this process was first asked for its name: the last is part of the default run folder."""


def name_another_run() -> None:
    """Have the default run folder be another one from here on, in a process that makes several runs."""
    _run_names.append(f"{time.strftime(_TIME)}_{len(_run_names)}" if _run_names else time.strftime(_TIME))


def register_resolvers() -> None:
    """Make `conf/` composable: the schema and what its `${NAME:}` expressions stand for.

    Call it before `hydra.main` or the compose API. Calling it again changes nothing.
    """
    resolvers: dict[str, Callable[..., Any]] = {
        "detect_platform": lambda: detect_platform().name,
        "per_platform": _per_platform,
        "default_environment": _default_environment,
        "if_file": _if_file,
        "derived": derived,
        "derivation": derivation,
        "typed_settings": _typed_settings,
        "run_folder": _run_folder,
        "sweep_folder": lambda *, _root_: _named_folder(_root_, prefix="sweep_"),  # holds the runs of a sweep
        "default_run_folder": _default_run_folder,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    for name, schema in (("schema", Config), ("sft_schema", SFTConfig)):
        ConfigStore.instance().store(name=name, node=_base(schema), provider="skyrl_train")


@functools.cache
def _base(schema: type) -> DictConfig:
    """The schema's defaults, to whose mappings the command line may add keys without a plus sign. Hydra copies them."""
    node = OmegaConf.create(defaults(schema))
    for field in walk(schema):
        mapping = OmegaConf.select(node, field.path)
        if field.open and isinstance(mapping, DictConfig):
            OmegaConf.set_struct(mapping, False)
    return node


def _per_platform(values: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """`${per_platform:{cpu:40,gpu:150}}`: the entry of the chosen platform."""
    name = str(_root_.platform.name)
    if name not in values:
        raise ValueError(f"per_platform has no value for platform '{name}', only for {', '.join(values)}")
    return values[name]


def _default_environment(name: str, *, _root_: DictConfig) -> str:
    """`${default_environment:NAME}`: the environment of a run that chooses none: `single_turn` where rewards are given,
    `reported` where agents play, NAME for bundled data and GSM8K. Raises NotStated for other data, which NAME would score
    without being asked to."""
    if _root_.environment.get("reward") or _root_.environment.get("rewards"):
        return SINGLE_TURN
    if OmegaConf.select(_root_, "generator.agent_loop._target_") == AGENT:
        return REPORTED
    own = next((entry for entry in _unscored_entries(_root_.data) if is_own_data(entry)), None)
    if own is not None:
        raise NotStated(
            f"must be chosen, or a reward, for data of your own ({own}): nothing says how answers are scored",
            "set environment.reward=my_code:score (docs/rewards.md), or environment=word_problems for whole numbers "
            "after ####, or environment.env_class=NAME",
        )
    return name


def _unscored_entries(data: DictConfig) -> Iterator[str]:
    """Yield the entries of `data.train` and `data.validation`, or those of a mix that state no environment."""
    for each in data.get("mix") or [data]:
        if "environment" not in each:
            for name in ("train", "validation"):
                entries = each.get(name) or ()
                yield from map(str, [entries] if isinstance(entries, str) else entries)


def _if_file(path: str, then: str, otherwise: str) -> str:
    """`${if_file:PATH,THEN,OTHERWISE}`: which of the two, by whether there is such a file on this machine."""
    return then if Path(path).expanduser().is_file() else otherwise


def _typed_settings() -> ListConfig:
    """`${typed_settings:}`: the names of the settings that were typed on the command line."""
    typed = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return ListConfig([str(text).lstrip("+").partition("=")[0] for text in typed])


def _run_folder(*, _root_: DictConfig) -> str:
    """Hydra's run folder within a run; where it would be, when only composing."""
    if HydraConfig.initialized():
        runtime = HydraConfig.get().runtime
        if not OmegaConf.is_missing(runtime, "output_dir"):
            return str(runtime.output_dir)
    return _named_folder(_root_)


def _default_run_folder(*, _root_: DictConfig) -> str:
    """`output_dir` where the user set it, so that Hydra's own files lie there too; else named after run and time."""
    # `--cfg hydra` shows Hydra's section alone, without the settings that it refers to.
    node = _root_._get_node("output_dir") if "output_dir" in _root_ else None
    expression = str(node._value()) if isinstance(node, Node) else ""
    if not expression or "${run_folder:" in expression or "${hydra:" in expression:
        return _named_folder(_root_)
    return str(_root_.output_dir)


def _named_folder(root: DictConfig, prefix: str = "") -> str:
    if not _run_names:
        name_another_run()
    return f"outputs/{OmegaConf.select(root, 'run_name', default=Config.run_name)}/{prefix}{_run_names[-1]}"


R = TypeVar("R")
_EXPRESSION = "${derived:"
_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(\d+(?:\.\d+)?)\s*([MB])(?![A-Za-z])", re.IGNORECASE)
"""`135M` in `SmolLM2-135M-Instruct`."""
_is_deriving: ContextVar[bool] = ContextVar("is_deriving", default=False)
_found: ContextVar[dict[tuple[int, Callable[[DictConfig], Any]], Any] | None] = ContextVar("found", default=None)
"""Within `unchanging`, what was worked out of a configuration; settings that are derived follow from the same forty."""


def derived(base: Any = None, *, _node_: Node, _root_: DictConfig) -> Any:
    """`${derived:}`, or `${derived:BASE}` of a setting that a rule moves only where others do not fit: the value of the
    setting that it stands for. Raises ValueError for one that there is no rule for."""
    if _is_deriving.get():
        raise ValueError("stands for a value that is being derived")
    name = str(_node_._get_full_key(None))
    with _deriving():
        record = _once(_root_, _recorded)
        if name in record or (record and name == RATES):
            return _entry(record, name)
        if name == CONTEXT:
            lengths = ("data.max_prompt_length", "generator.sampling.max_generate_length", "generator.max_turns")
            prompt, response, turns = (_selected(_root_, each) for each in lengths)
            return context_length(base, prompt=prompt, response=response, turns=turns)
        found = _once(_root_, _all_derived)
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
    with _deriving():
        stated, situation, record = _stated(_root_), _situation(_root_), _recorded(_root_)
        if record and _selected(_root_, "trainer.resume_mode") != "latest":
            path = _selected(_root_, "trainer.resume_path")
            return ListConfig([f"sizes       of the run at {path}, where nothing else is stated"])
        if record:
            return ListConfig(list(record.get("derived") or ()))
        return ListConfig(list(reasons(_derive(_root_, stated, situation), stated, situation)))


@contextmanager
def unchanging() -> Iterator[None]:
    """Within it, a configuration does not change, and what its settings are derived from is read once."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def _once(root: DictConfig, work: Callable[[DictConfig], R]) -> R:
    """The result of `work`, which is one function whatever the configuration."""
    found = _found.get()
    if found is None:
        return work(root)
    key = id(root), work
    if key not in found:
        found[key] = work(root)
    kept: R = found[key]
    return kept


def _all_derived(root: DictConfig) -> dict[str, Any]:
    return _derive(root, _stated(root), _situation(root))


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
    # Names have six digits, and more from step 1,000,000 on.
    return max(found, key=lambda file: (len(file.parent.name), file.parent.name), default=None)
