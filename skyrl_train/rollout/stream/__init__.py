"""Rollouts that go on beside updates: admission, the journal and the replay."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.rollout.stream.replay import ReplayGenerator as ReplayGenerator
    from skyrl_train.rollout.stream.stream import (
        RolloutStream as RolloutStream,
        Taken as Taken,
    )

__getattr__ = lazily(__name__)
