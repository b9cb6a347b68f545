"""The command line that every entry point shares: resolvers for `conf/`, and a check before Hydra takes over.

Hydra stops at the first key that it does not know, and knows nothing of types. `preflight` therefore composes the same
command line first, collects everything that is wrong with it, and prints all of it at once, in a second and before torch
is imported. A command line without problems goes to Hydra untouched.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.fields import defaults
from skyrl_train.config.load import read_config
from skyrl_train.config.paths import conf_dir
from skyrl_train.config.platform import detect_platform
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError

HYDRA_VERSION_BASE = "1.3"
MAX_SWEEP_VALUES_CHECKED = 64

_STARTED = time.strftime("%Y-%m-%d_%H%M%S")
"""When this process started: part of the default run folder, the same however often it is asked for."""


def register_resolvers() -> None:
    """Make `conf/` composable: `${detect_platform:}`, `${per_platform:...}`, `${run_folder:}` and the schema.

    Calling it again changes nothing.
    """
    OmegaConf.register_new_resolver("detect_platform", lambda: detect_platform().name, replace=True)
    OmegaConf.register_new_resolver("per_platform", _per_platform, replace=True)
    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    OmegaConf.register_new_resolver("default_run_folder", _default_run_folder, replace=True)
    ConfigStore.instance().store(name="schema", node=defaults(Config), provider="skyrl_train")


def _per_platform(values: Mapping[str, Any], *, _root_: DictConfig) -> Any:
    """`${per_platform:{cpu:40,gpu:150}}`: the entry of the chosen platform."""
    name = str(_root_.platform.name)
    if name not in values:
        raise ValueError(f"per_platform has no value for platform '{name}', only for {', '.join(values)}")
    return values[name]


def _run_folder(*, _root_: DictConfig) -> str:
    """Hydra's run folder within a run; where it would be, when only composing."""
    if HydraConfig.initialized():
        runtime = HydraConfig.get().runtime
        if not OmegaConf.is_missing(runtime, "output_dir"):
            return str(runtime.output_dir)
    return f"outputs/{_root_.run_name}/{_STARTED}"


def _default_run_folder(*, _root_: DictConfig) -> str:
    """`output_dir` where the user set it, so that Hydra's own files lie there too; else named after run and time."""
    node = _root_._get_node("output_dir")
    if node is not None and "${run_folder:" not in str(node._value()):
        return str(_root_.output_dir)
    return f"outputs/{_root_.run_name}/{_STARTED}"


def preflight(argv: list[str], *, config_name: str) -> None:
    """Check a command line (without the program's name), before Hydra sees it.

    Prints every problem to stderr and raises SystemExit(2); returns where there is none, or where the arguments ask for
    something else than a run, such as `--help`.
    """
    register_resolvers()
    flags = _parse_flags(argv)
    if flags is None:
        return
    with _hydra(flags) as hydra:
        config = hydra.compose_config(flags.config_name or config_name, flags.overrides, RunMode.RUN, True, False)
        violations = read_config(config).violations
    if violations:
        print(ConfigError(violations), file=sys.stderr)  # noqa: T201
        raise SystemExit(2)


def _parse_flags(argv: Sequence[str]) -> argparse.Namespace | None:
    """Hydra's flags; None where Hydra should answer by itself: help, version, a malformed flag, a foreign folder."""
    if any(flag in argv for flag in ("--version", "--help", "-h", "--hydra-help")):
        return None
    known, unknown = get_args_parser().parse_known_intermixed_args(list(argv))
    foreign = known.config_path or known.experimental_rerun or known.shell_completion
    return None if unknown or foreign else known


@contextmanager
def _hydra(flags: argparse.Namespace) -> Iterator[Hydra]:
    """Hydra over our `conf/` and the user's `--config-dir`, gone again afterwards."""
    setbase(HYDRA_VERSION_BASE)
    search_path = create_config_search_path(str(conf_dir()))
    if flags.config_dir is not None and Path(flags.config_dir).is_dir():
        assert isinstance(search_path, ConfigSearchPathImpl)
        search_path.prepend(
            provider="command-line",
            path=f"file://{os.path.abspath(flags.config_dir)}",
            anchor=SearchPathQuery(provider="schema"),
        )
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="main", config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()
