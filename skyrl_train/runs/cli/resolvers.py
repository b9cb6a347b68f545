"""What `conf/` needs in order to compose: where it is, the schema as its base, and resolvers for platform and folders."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, Node, OmegaConf

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.data import is_own_data
from skyrl_train.config.door import NotStated
from skyrl_train.config.environment import AGENT, REPORTED, SINGLE_TURN
from skyrl_train.config.fields import defaults, walk
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.runs.cli.derived import derivation, derived
from skyrl_train.system import detect_platform

HYDRA_VERSION_BASE = "1.3"
"""For `hydra.main(version_base=...)` and the compose API."""

_TIME = "%Y-%m-%d_%H%M%S"
_run_names = [time.strftime(_TIME)]
"""When this process started, then one for each further run of it: the last is part of the default run folder."""


def name_another_run() -> None:
    """Have the default run folder be another one from here on, in a process that makes several runs."""
    _run_names.append(f"{time.strftime(_TIME)}_{len(_run_names)}")


_PACKAGE = Path(__file__).resolve().parents[2]


def conf_dir(package: Path = _PACKAGE) -> Path:
    """Return the folder of Hydra's groups (`conf/`), absolute.

    Inside the package comes first: beside an installed package there may be a `conf` of someone else.

    Raises:
        ConfigError: when neither place has it, which means a broken installation.
    """
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        [
            Violation(
                field="conf",
                rule="must lie inside the package or, in a checkout, beside it",
                value=f"neither {package / 'conf'} nor {package.parent / 'conf'}",
                remedy="install skyrl_train again, or run from a complete clone",
            )
        ]
    )


def register_resolvers() -> None:
    """Make `conf/` composable: the schema and what its `${NAME:}` expressions stand for.

    Call it before `hydra.main` or the compose API. Calling it again changes nothing.
    """
    OmegaConf.register_new_resolver("detect_platform", lambda: detect_platform().name, replace=True)
    OmegaConf.register_new_resolver("per_platform", _per_platform, replace=True)
    OmegaConf.register_new_resolver("default_environment", _default_environment, replace=True)
    OmegaConf.register_new_resolver("if_file", _if_file, replace=True)
    OmegaConf.register_new_resolver("derived", derived, replace=True)
    OmegaConf.register_new_resolver("derivation", derivation, replace=True)
    OmegaConf.register_new_resolver("typed_settings", _typed_settings, replace=True)
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", _sweep_folder, replace=True)
    OmegaConf.register_new_resolver("default_run_folder", _default_run_folder, replace=True)
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


def _sweep_folder(*, _root_: DictConfig) -> str:
    """The folder that holds the runs of a sweep."""
    return _named_folder(_root_, prefix="sweep_")


def _named_folder(root: DictConfig, prefix: str = "") -> str:
    return f"outputs/{OmegaConf.select(root, 'run_name', default=Config.run_name)}/{prefix}{_run_names[-1]}"
