"""Weights & Biases: offline where no key is configured, resumed under the same id, without secrets and without waiting.

What wandb would collect by itself and could hold a secret or a path (command line, git remote, console output, code) is
turned off; the configuration is redacted before it is handed over. The commit, and `run.log`, which is
redacted, are handed over where settings say so.
"""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from skyrl_train.config import WandbConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import in_time
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.run_folder import RunFolder, git_commit
from skyrl_train.telemetry.trackers.base import TableTracker, kept_name

PROBE_TIMEOUT_S = 4.0
"""For the server to answer anything at all, where the mode is left to us."""
AUTO_TIMEOUT_S = 10.0
"""For the server to start the run then. With PROBE_TIMEOUT_S: how long it takes at most to choose the mode."""
INIT_TIMEOUT_S = 30.0
"""For the server to start the run where `tracker.wandb.mode=online`."""
FINISH_TIMEOUT_S = 60.0
"""Upload at the end; what is left is in the folder for `wandb sync`."""
_TEARDOWN_TIMEOUT_S = 5.0
_NOT_SERVED = frozenset({403, 407, 500, 502, 503, 504})
"""HTTP statuses of proxies, portals and servers that are down."""
_RUN_ID = "run_id"
_DEFAULT_SERVER = "https://api.wandb.ai"

R = TypeVar("R")
Mode = Literal["online", "offline", "disabled", "shared"]


class WandbTracker(TableTracker):
    """A run on Weights & Biases. Implements Tracker."""

    def __init__(
        self,
        settings: WandbConfig,
        folder: RunFolder,
        *,
        run_name: str,
        config: Mapping[str, Any],
        console: RunConsole,
        run_log: Path | None = None,
    ) -> None:
        """`config` is shown with the run, without secrets: hand over what `redact` gives. `run_log` is handed over where
        `tracker.wandb.console` says so.

        Raises SkyrlTrainError where wandb is not installed, or cannot start in the mode that was asked for.

        Mode `auto` falls back to offline, with a warning, where the server does not answer, refuses, or does not start the
        run, each within its time.
        """
        try:
            import wandb
        except ImportError as error:
            raise SkyrlTrainError("tracker.wandb needs wandb. Install it, or leave wandb out of tracker=...") from error
        if settings.git:
            commit, dirty, _ = git_commit(Path.cwd()).partition("-dirty")
            config = {**config, "git": {"commit": commit, "is_changed": bool(dirty)} if commit else {}}
        mode = choose_mode(settings.mode, os.environ)
        is_auto = settings.mode == "auto" and mode == "online"
        start = partial(_start, wandb, settings, folder, run_name=run_name, config=config)
        try:
            if is_auto:
                _probe(_server(os.environ))
            timeout_s = AUTO_TIMEOUT_S if is_auto else INIT_TIMEOUT_S
            # Its own limits do not count the start of its service, nor every retry.
            run = in_time(
                lambda: start(mode=mode, timeout_s=timeout_s), what="starting the run at wandb", timeout_s=timeout_s
            )
        except Exception as error:  # wandb raises its own kinds for keys, network and time-outs
            if not is_auto:
                raise SkyrlTrainError(
                    f"tracker.wandb cannot start in mode {mode} ({type(error).__name__}: {error}). "
                    "Check the key and the network, or set tracker.wandb.mode=offline"
                ) from error
            console.warn(f"wandb is offline: the server could not be used ({type(error).__name__}: {error})")
            mode = "offline"
            with suppress(Exception):  # its service holds the run's id until then
                in_time(wandb.teardown, what="wandb.teardown", timeout_s=_TEARDOWN_TIMEOUT_S)
            run = _offline(folder, lambda: start(mode=mode, timeout_s=INIT_TIMEOUT_S))
        super().__init__(wandb, run, settings.samples)
        if mode == "offline":
            console.note(f"wandb: offline; upload later with `wandb sync {folder.wandb}/offline-run-*`")
        if settings.console and run_log is not None and run_log.exists():
            run.save(str(run_log), base_path=str(folder.root), policy="live")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left. Raises DeadlineError where that hangs."""
        in_time(self._run.finish, what="wandb's upload", timeout_s=FINISH_TIMEOUT_S + _TEARDOWN_TIMEOUT_S)


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
    host = urlsplit(_server(environ)).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _server(environ: Mapping[str, str]) -> str:
    return environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER


def _probe(server: str) -> None:
    """Raise where the server does not answer, or something in its place refuses everybody: through the proxies of this
    machine, as wandb asks it. Nothing of ours is sent, so that certificates are left to wandb."""
    import httpx

    def ask() -> None:
        answer = httpx.get(server, timeout=PROBE_TIMEOUT_S, verify=False, follow_redirects=True)
        if answer.status_code in _NOT_SERVED:
            raise ConnectionError(f"{server} answers with HTTP status {answer.status_code}")

    in_time(ask, what=server, timeout_s=PROBE_TIMEOUT_S)


def _offline(folder: RunFolder, start: Callable[[], R]) -> R:
    """What `start` gives offline. Where the service of the attempt before neither ended nor let go of the run's id, a run
    under another id."""
    try:
        return in_time(start, what="wandb offline", timeout_s=INIT_TIMEOUT_S)
    except Exception:  # its own kind, which says that the id is in use
        (folder.wandb / _RUN_ID).unlink(missing_ok=True)
        return in_time(start, what="wandb offline", timeout_s=INIT_TIMEOUT_S)


def _start(
    wandb: Any,
    settings: WandbConfig,
    folder: RunFolder,
    *,
    run_name: str,
    config: Mapping[str, Any],
    mode: Mode,
    timeout_s: float,
) -> Any:
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        tags=list(settings.tags) or None,
        group=settings.group,
        notes=settings.notes or None,
        name=run_name,
        id=kept_name(folder.wandb / _RUN_ID, uuid.uuid4().hex[:12]),
        resume="allow",
        dir=str(folder.root),
        mode=mode,
        config=dict(config),
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_TIMEOUT_S,
            init_timeout=timeout_s,
            save_code=False,
            silent=True,
            use_dot_wandb=False,
            x_disable_meta=True,
        ),
    )
