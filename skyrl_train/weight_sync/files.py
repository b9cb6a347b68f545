"""Weights to a server as files that both can read: the way that works wherever there is a shared folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyrl_train.weight_sync.buckets import in_buckets, in_file


class ControlledServer(Protocol):
    """A server whose weights can be replaced, e.g. `HTTPEngine`."""

    def control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call. Raises EngineError, DeadlineError."""
        ...

    def confirm_version(self, version: int) -> None:
        """Raises EngineError unless the server serves this version."""
        ...


class FileTransport:
    """Implements `WeightTransport` by vLLM's weight-transfer calls over HTTP, the bytes in files beside them.

    The server is paused from before the first byte until it has them all; where anything fails it stays paused.
    """

    def __init__(self, server: ControlledServer, folder: Path) -> None:
        """`folder` must be the same on the server's machine."""
        self._server, self._folder = server, folder
        self._initialized = False

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises EngineError, DeadlineError."""
        call = self._server.control
        if not self._initialized:
            call("POST", "/init_weight_transfer_engine", {"init_info": {}})
            self._initialized = True
        folder = self._folder / f"version_{version:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            call("POST", "/pause?mode=wait&clear_cache=true")
            call("POST", "/start_weight_update")
            for number, bucket in enumerate(in_buckets(weights)):
                written = in_file(bucket, folder / f"{number:04d}.bin")
                call("POST", "/update_weights", {"update_info": written.fields()})
            call("POST", "/finish_weight_update", {"weight_version": str(version)})
            call("POST", "/reset_prefix_cache")
            self._server.confirm_version(version)
            call("POST", "/resume")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
