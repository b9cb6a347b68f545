"""From a console script to its task: every problem of the command line at once, then Hydra's composed config."""

from __future__ import annotations

import sys
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from skyrl_train.cli.preflight import preflight
from skyrl_train.cli.resolvers import HYDRA_VERSION_BASE, register_resolvers
from skyrl_train.config.paths import conf_dir


def start(task: Callable[[DictConfig], None], *, config_name: str, trains: bool = True) -> None:
    """Runs `task` under Hydra on the root config `config_name`, with the arguments of this process.

    Hydra names the job after the module of `task`; the command that resumes a run does too. Raises SystemExit(2) for
    problems with the arguments, before torch is imported. `trains`: whether models are trained, so that room for that is
    needed.
    """
    register_resolvers()
    preflight(sys.argv[1:], config_name=config_name, trains=trains)
    hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=config_name)(task)()
