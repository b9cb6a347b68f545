"""What Hydra writes of a run, without secrets: `.hydra/*.yaml`, `multirun.yaml` of a sweep, and its log.

Hydra's own copies hold the command line as it was typed, so that `hydra.output_subdir` is null in `conf/` and this callback
writes the same three files.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

from skyrl_train.system.files import keep_private
from skyrl_train.telemetry.logs import REDACTED, RedactingFormatter, learn_secrets, log_once, redact

FOLDER = ".hydra"
_SAYS_WHAT_IS_EVALUATED = ("experiment", "data", "environment", "generator")
"""Groups and sections of a run's command line that go for the evaluation of what it trained, too."""


class RedactedFiles(Callback):
    """Hydra calls it where a run, or a sweep, starts."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the sweeper writes `multirun.yaml` and says which jobs it launches."""
        del kwargs
        learn_secrets(_plain(config))
        basic_sweeper.__dict__["OmegaConf"] = _RedactingOmegaConf  # a sweeper of our own would have to be a plug-in
        clean_logging()

    def on_job_start(self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any) -> None:
        """Behind the job's folder and logging, before the job itself."""
        del task_function, kwargs
        content = _plain(config)
        learn_secrets(content)
        clean_logging()
        hydra = content.pop("hydra")
        folder = Path(config.hydra.runtime.output_dir) / FOLDER
        if config.get("output_access", "owner") == "owner":
            keep_private(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"config": content, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
        for name, value in files.items():
            OmegaConf.save(OmegaConf.create(redact(value)), folder / f"{name}.yaml")


def with_arguments_of_run(arguments: Sequence[str]) -> list[str]:
    """Return an evaluation's arguments behind those of the run whose export or checkpoint they name; stderr is told which.

    A run's data, environment, generator and experiment are taken, each unless the arguments state it; where they state an
    experiment, nothing is. A model that no run of reinforcement learning left has none to take. No secret is recorded.
    """
    stated = dict(text.lstrip("+~").partition("=")[::2] for text in arguments)
    folder = _run_of(stated.get("trainer.resume_path") or stated.get("model.path") or "")
    if folder is None or "experiment" in stated:
        return list(arguments)
    taken: list[str] = []
    secret: list[str] = []
    for text in map(str, OmegaConf.load(folder / FOLDER / "overrides.yaml")):
        name = text.lstrip("+~").partition("=")[0]
        section = re.split(r"[./@]", name)[0]
        is_taken = section in _SAYS_WHAT_IS_EVALUATED or name.endswith("batch_size")  # which the run's data must fill
        if is_taken and not stated.keys() & {name, section}:
            (secret if REDACTED in text else taken).append(text)
    said = f"evaluated as {folder} was trained: {' '.join(taken) or 'with the defaults'}"
    sys.stderr.write(f"{said}{'. To be stated here, as no secret is recorded: ' * bool(secret)}{' '.join(secret)}\n")
    return [*taken, *arguments]


def _run_of(path: str) -> Path | None:
    """The folder of the run of reinforcement learning that holds an export or a checkpoint; None where none does."""
    for folder in (Path(path), *Path(path).parents)[:3] if path else ():
        recorded = folder / FOLDER / "hydra.yaml"
        if recorded.is_file():
            return folder if OmegaConf.load(recorded).hydra.job.config_name == "config" else None
    return None


def clean_logging() -> None:
    """Have every handler of Python's logging write without secrets, and none of its lines twice. Calling it again changes
    nothing."""
    log_once()
    named = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict
    ]  # whose handlers a command line may add
    for handler in [handler for logger in (logging.getLogger(), *named) for handler in logger.handlers]:
        if not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(handler.formatter))


class _RedactingOmegaConf(OmegaConf):
    """What the sweeper saves its configuration with."""

    @staticmethod
    def save(config: Any, f: Any, resolve: bool = False) -> None:
        """Write the configuration without secrets."""
        OmegaConf.save(OmegaConf.create(redact(_plain(config))), f, resolve=resolve)


def _plain(config: DictConfig) -> dict[str, Any]:
    """Nested plain values, interpolations as they were typed."""
    plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict), "a composed configuration is a mapping"
    return {str(key): value for key, value in plain.items()}
