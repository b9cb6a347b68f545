"""Checkpoints: written, verified, found, compared with a configuration."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.trainers.checkpoints.changes import (
        ResumeSettings,
        changes_since,
        flat_config,
        resume_settings,
        settings_of,
    )
    from skyrl_train.trainers.checkpoints.folder import checkpoint_name, oldest_step, sha256_of, verify
    from skyrl_train.trainers.checkpoints.state import DataFingerprint, TrainerState, library_versions
    from skyrl_train.trainers.checkpoints.store import CheckpointStore
    from skyrl_train.trainers.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointStore",
    "CheckpointWriter",
    "DataFingerprint",
    "ResumeSettings",
    "TrainerState",
    "changes_since",
    "checkpoint_name",
    "flat_config",
    "library_versions",
    "oldest_step",
    "resume_settings",
    "settings_of",
    "sha256_of",
    "verify",
]

__getattr__ = lazily(__name__)
