"""Checkpoints: written, verified, found, forked, resumed."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.trainers.checkpoints.capsule_writer import CapsuleWriter
    from skyrl_train.trainers.checkpoints.changes import (
        ResumeSettings,
        changes_since,
        flat_config,
        resume_settings,
        settings_of,
    )
    from skyrl_train.trainers.checkpoints.folder import oldest_step, sha256_of, verify
    from skyrl_train.trainers.checkpoints.resume import Start, find_start, prepare_run_folder
    from skyrl_train.trainers.checkpoints.state import DataFingerprint, TrainerState, library_versions
    from skyrl_train.trainers.checkpoints.store import CheckpointStore
    from skyrl_train.trainers.checkpoints.writer import CheckpointWriter

__all__ = [
    "CapsuleWriter",
    "CheckpointStore",
    "CheckpointWriter",
    "DataFingerprint",
    "ResumeSettings",
    "Start",
    "TrainerState",
    "changes_since",
    "find_start",
    "flat_config",
    "library_versions",
    "oldest_step",
    "prepare_run_folder",
    "resume_settings",
    "settings_of",
    "sha256_of",
    "verify",
]

__getattr__ = lazily(__name__)
