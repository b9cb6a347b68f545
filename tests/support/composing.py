"""Composes `conf/` as an entry point does, and has Hydra do less of it again."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import omegaconf.base
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import DictConfig, OmegaConf

from skyrl_train.runs.cli import HYDRA_VERSION_BASE, Composer, conf_dir, register_resolvers


def composed(*overrides: str, root: str = "config") -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        return compose(root, list(overrides))


@contextmanager
def presets_composed_once() -> Iterator[None]:
    """Keep what Hydra makes of the same choices of groups, for tests with many command lines over the same files: half of
    the time that a command line takes. Files of `conf/` must stay as they are meanwhile."""
    lists: dict[str, DefaultsList] = {}
    configs: dict[str, bytes] = {}
    files: dict[tuple[object, ...], bytes] = {}
    options: dict[tuple[object, ...], list[str]] = {}
    create_list, compose_list = (
        config_loader_impl.create_defaults_list,
        ConfigLoaderImpl._compose_config_from_defaults_list,
    )
    list_options, load_file = Composer._list, ConfigRepository.load_config

    def defaults_list(*, repo: Any, config_name: str, overrides_list: Any, **others: Any) -> DefaultsList:
        stated = Overrides(repo=repo, overrides_list=overrides_list)
        chosen = (stated.override_choices, stated.override_metadata, stated.append_group_defaults, stated.deletions)
        key = repr((config_name, others, chosen, _sources(repo), _platform()))
        if key not in lists:
            lists[key] = create_list(repo=repo, config_name=config_name, overrides_list=overrides_list, **others)
        found = copy.copy(lists[key])
        found.config_overrides = stated.config_overrides
        return found

    def config_of_list(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        key = repr((defaults, _sources(repo)))
        if key not in configs:
            configs[key] = pickle.dumps(compose_list(self, defaults, repo))
        config: DictConfig = pickle.loads(configs[key])  # in half the time of a copy
        return config

    def options_of_group(self: Composer, group: str, kind: Any) -> list[str]:
        key = (group, kind, self._config_name, *self._search_path, *_sources(self._loader))
        if key not in options:
            options[key] = list_options(self, group, kind)
        return options[key]

    def repository(self: CachingConfigRepository, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}  # Hydra copies all that is under it as well

    def file(self: ConfigRepository, config_path: str) -> Any:
        key = (config_path, *_sources(self))
        if key not in files:
            files[key] = pickle.dumps(load_file(self, config_path))
        return pickle.loads(files[key])  # Hydra merges other files into what it is given

    with (
        mock.patch.object(CachingConfigRepository, "__init__", repository),
        mock.patch.object(ConfigRepository, "load_config", file),
        mock.patch.object(config_loader_impl, "create_defaults_list", defaults_list),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", config_of_list),
        mock.patch.object(Composer, "_list", options_of_group),
        mock.patch.object(omegaconf.base, "parse", functools.cache(omegaconf.base.parse)),
    ):
        yield


def _platform() -> str:
    """Return the platform that a root looks for, which chooses the groups that nothing states."""
    name: str = OmegaConf.create({"name": "${detect_platform:}"}).name
    return name


def _sources(repository: Any) -> list[tuple[str, str]]:
    """Return the folders that files of groups are looked for in."""
    return [(source.provider, source.path) for source in repository.get_sources()]
