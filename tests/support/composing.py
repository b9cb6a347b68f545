"""Composes `conf/` as an entry point does."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from skyrl_train.cli import HYDRA_VERSION_BASE, register_resolvers
from skyrl_train.cli.resolvers import conf_dir


def composed(*overrides: str, root: str = "config") -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        return compose(root, list(overrides))
