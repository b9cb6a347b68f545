"""Learners: forward, backward, optimizer step, state."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.learner.build import (
        adapt as adapt,
        build_learner as build_learner,
        build_strategy as build_strategy,
        compile_layers as compile_layers,
        learner_of as learner_of,
    )
    from skyrl_train.learner.critic import CriticLearner as CriticLearner
    from skyrl_train.learner.engine import ModelEngine as ModelEngine
    from skyrl_train.learner.optimizer import AdamWStep as AdamWStep, build_optimizer as build_optimizer
    from skyrl_train.learner.policy import PolicyLearner as PolicyLearner
    from skyrl_train.learner.profiling import Profiler as Profiler
    from skyrl_train.learner.reference import BaseOfAdapter as BaseOfAdapter
    from skyrl_train.learner.row_losses import RowLossLearner as RowLossLearner, TokenLosses as TokenLosses
    from skyrl_train.learner.shared_device import LearnerOnSharedDevice as LearnerOnSharedDevice
    from skyrl_train.learner.side_by_side import AdapterLearners as AdapterLearners, AdapterPass as AdapterPass
    from skyrl_train.learner.state import (
        read_model as read_model,
        read_tensors as read_tensors,
        take_weights as take_weights,
    )

__getattr__ = lazily(__name__)
