"""Learners: forward, backward, optimizer step, state."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.learner.build import adapt, build_learner, build_strategy, compile_layers, learner_of
    from skyrl_train.learner.critic import CriticLearner
    from skyrl_train.learner.engine import ModelEngine
    from skyrl_train.learner.optimizer import AdamWStep, build_optimizer
    from skyrl_train.learner.passes import Planned
    from skyrl_train.learner.policy import PolicyLearner, TokenLosses
    from skyrl_train.learner.profiling import Profiler
    from skyrl_train.learner.reference import BaseOfAdapter
    from skyrl_train.learner.shared_device import LearnerOnSharedDevice
    from skyrl_train.learner.side_by_side import AdapterLearners
    from skyrl_train.learner.state import read_model, read_tensors, take_weights

__all__ = [
    "AdamWStep",
    "AdapterLearners",
    "BaseOfAdapter",
    "CriticLearner",
    "LearnerOnSharedDevice",
    "ModelEngine",
    "Planned",
    "PolicyLearner",
    "Profiler",
    "TokenLosses",
    "adapt",
    "build_learner",
    "build_optimizer",
    "build_strategy",
    "compile_layers",
    "learner_of",
    "read_model",
    "read_tensors",
    "take_weights",
]

__getattr__ = lazily(__name__)
