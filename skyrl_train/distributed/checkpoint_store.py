"""The checkpoints of one run as a `CheckpointStore`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl_train.distributed.checkpoint import latest_checkpoint, verify, write_checkpoint
from skyrl_train.errors import CheckpointError


class FolderCheckpointStore:
    """Keeps the newest `keep` checkpoints of a run in `root`, one folder each."""

    def __init__(self, root: Path, *, keep: int):
        self._root = root
        self._keep = keep

    def write(self, step: int, writer: Callable[[Path], None]) -> Path:
        """See `distributed.checkpoint.write_checkpoint`."""
        return write_checkpoint(self._root, step, writer, self._keep)

    def latest(self) -> Path | None:
        """See `distributed.checkpoint.latest_checkpoint`."""
        return latest_checkpoint(self._root)

    def find(self, path: Path) -> Path:
        """The checkpoint at `path`, or the newest whole one of the run whose output folder (or `checkpoints/`) it is."""
        if not path.is_dir():
            raise CheckpointError(
                f"trainer.resume_path={path} is not a folder. Give a run's output folder or a checkpoint"
            )
        for root in (path / "checkpoints", path):
            if root.is_dir() and (found := latest_checkpoint(root)) is not None:
                return found
        verify(path)
        return path
