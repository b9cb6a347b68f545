"""Rollouts that go on beside updates: admission, the journal and the replay."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.rollout.stream.replay import ReplayGenerator
    from skyrl_train.rollout.stream.stream import RolloutStream, StreamSettings, Taken

__all__ = ["ReplayGenerator", "RolloutStream", "StreamSettings", "Taken"]

__getattr__ = lazily(__name__)
