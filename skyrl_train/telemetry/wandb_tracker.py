"""Weights & Biases: offline where no key is configured, resumed under the same id, without secrets and without waiting.

What wandb would collect by itself and could hold a secret or a path (command line, git remote, console output, code) is
turned off; the configuration is redacted before it is handed over.
"""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from skyrl_train.config.schema import WandbConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.telemetry.console import RunConsole
from skyrl_train.telemetry.files import write_atomically
from skyrl_train.telemetry.run_folder import RunFolder

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
"""Upload at the end; what is left is in the folder for `wandb sync`."""
_DEFAULT_SERVER = "https://api.wandb.ai"

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbTracker:
    """A run on Weights & Biases. Implements Tracker."""

    def __init__(
        self,
        settings: WandbConfig,
        folder: RunFolder,
        *,
        run_name: str,
        config: Mapping[str, Any],
        console: RunConsole,
    ) -> None:
        """`config` is shown with the run, without secrets: hand over what `redact` gives.

        Raises SkyrlTrainError where wandb is not installed, or cannot start in the mode that was asked for.

        Mode `auto` falls back to offline, with a warning, where the server does not answer within INIT_TIMEOUT_S.
        """
        try:
            import wandb
        except ImportError as error:
            raise SkyrlTrainError("tracker.wandb needs wandb. Install it, or leave wandb out of tracker=...") from error
        mode = choose_mode(settings.mode, os.environ)
        start = partial(_start, wandb, settings, folder, run_name=run_name, config=config)
        try:
            self._run = start(mode=mode)
        except Exception as error:  # wandb raises its own kinds for keys, network and time-outs
            if settings.mode != "auto" or mode == "offline":
                raise SkyrlTrainError(
                    f"tracker.wandb cannot start in mode {mode} ({type(error).__name__}: {error}). "
                    "Check the key and the network, or set tracker.wandb.mode=offline"
                ) from error
            console.warn(f"wandb is offline: the server could not be used ({type(error).__name__}: {error})")
            mode = "offline"
            self._run = start(mode=mode)
        if mode == "offline":
            console.note(f"wandb: offline; upload later with `wandb sync {folder.wandb}/offline-run-*`")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def choose_mode(mode: str, environ: Mapping[str, str]) -> Mode:
    """`auto` follows WANDB_MODE where set, and is online where a key is configured, offline where none is."""
    if mode != "auto":
        return cast(Mode, mode)
    if stated := environ.get("WANDB_MODE"):
        return cast(Mode, "offline" if stated == "dryrun" else stated)
    return "online" if _has_key(environ) else "offline"


def _has_key(environ: Mapping[str, str]) -> bool:
    """A key in the environment, or in the netrc file where `wandb login` keeps it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start(
    wandb: Any, settings: WandbConfig, folder: RunFolder, *, run_name: str, config: Mapping[str, Any], mode: Mode
) -> Any:
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        name=run_name,
        id=_run_id(folder),
        resume="allow",
        dir=str(folder.root),
        mode=mode,
        config=dict(config),
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_TIMEOUT_S,
            init_timeout=INIT_TIMEOUT_S,
            save_code=False,
            silent=True,
            use_dot_wandb=False,
            x_disable_meta=True,
        ),
    )


def _run_id(folder: RunFolder) -> str:
    """The same id for as long as the run folder lives, so that a resumed run continues its curves."""
    path = folder.wandb / "run_id"
    if path.exists():
        return path.read_text().strip()
    run_id = uuid.uuid4().hex[:12]
    write_atomically(path, f"{run_id}\n".encode())
    return run_id
