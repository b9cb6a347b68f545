"""What the composition root asks for where `placement.backend=ray`: a session, its placement, and what runs in it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Placement, num_cpus, plan_layout
from skyrl_train.cluster.session import RaySession

if TYPE_CHECKING:
    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.trainers.steps import Learners


class Cluster:
    """A session with room reserved in it. Everything in it ends when `stack` closes."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self.config = config
        self.with_reference = config.trainer.algorithm.kl_loss_coef > 0
        num_engines = config.generator.vllm.num_engines if config.generator.backend == "vllm" else 0
        layout = plan_layout(config, with_reference=self.with_reference, num_engines=num_engines)
        self.session = RaySession(config.placement, num_cpus=num_cpus(layout), name=config.run_name)
        stack.callback(self.session.close)
        self.placement = Placement(layout, timeout_s=config.placement.start_timeout_s)

    def build_learners(self, plan: BatchPlan, stack: ExitStack) -> Learners:
        """Starts all models together, then waits for each."""
        from skyrl_train.trainers.steps import Learners

        waits = {
            role: start_learner(self.config, plan, self.session, self.placement.slots(role), role=role)
            for role in (("policy", "reference") if self.with_reference else ("policy",))
        }
        learners = {role: wait() for role, wait in waits.items()}
        for learner in learners.values():
            stack.callback(learner.close)
        return Learners(policy=learners["policy"], reference=learners.get("reference"), critic=None)
