"""Checkpoints: written, verified, found, compared with a configuration."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.trainers.checkpoints.changes import (
        changes_since as changes_since,
        flat_config as flat_config,
        settings_of as settings_of,
    )
    from skyrl_train.trainers.checkpoints.folder import (
        checkpoint_name as checkpoint_name,
        oldest_step as oldest_step,
        sha256_of as sha256_of,
        verify as verify,
    )
    from skyrl_train.trainers.checkpoints.state import (
        DataFingerprint as DataFingerprint,
        TrainerState as TrainerState,
        library_versions as library_versions,
    )
    from skyrl_train.trainers.checkpoints.store import CheckpointStore as CheckpointStore
    from skyrl_train.trainers.checkpoints.writer import CheckpointWriter as CheckpointWriter

__getattr__ = lazily(__name__)
