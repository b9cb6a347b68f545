"""What the composition root makes where `placement.backend=inline`: models in this process, and beside them, with
`generator=vllm`, an engine whose core is a process of its own on the same machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.bundles import takes_turns
from skyrl_train.config.generation import ships_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from torch import Tensor

    from skyrl_train.batch.plan import BatchPlan
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import InferenceEngine, Reference, WeightTransport
    from skyrl_train.learner.critic import CriticLearner
    from skyrl_train.learner.policy import PolicyLearner
    from skyrl_train.learner.turns import DeviceTurns, LearnerInTurn
    from skyrl_train.trainers.steps import Learners

AnyLearner = TypeVar("AnyLearner", bound="PolicyLearner | CriticLearner")


class InlineVLLM:
    """An engine and models on this machine, in turns where they share a GPU. Everything ends when `stack` closes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._turns: DeviceTurns | None = None
        self._policy: PolicyLearner | LearnerInTurn | None = None

    def build_engine(self, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
        """The engine, which has loaded the model, and what feeds it. Raises EngineError."""
        import torch

        from skyrl_train.inference.vllm import VLLMEngine
        from skyrl_train.inference.vllm_inline import BucketTransport, InlineEngine, WatchedEngine
        from skyrl_train.inference.vllm_settings import engine_settings
        from skyrl_train.learner.turns import DeviceTurns
        from skyrl_train.model.causal_lm import load_tokenizer
        from skyrl_train.weight_sync.probe import WeightSyncProbe
        from skyrl_train.weight_sync.transport import SyncRecords

        config, folder = self._config, Path(self._config.output_dir)
        engine = VLLMEngine(engine_settings(config))
        stack.callback(engine.close)
        watched = WatchedEngine(
            engine,
            call_timeout_s=config.placement.call_timeout_s,
            silence_timeout_s=config.placement.silence_timeout_s,
        )
        turns = DeviceTurns(
            watched,
            shared=takes_turns(config.placement, config.generator, config.platform),
            record_file=folder / "device_turns.jsonl",
        )
        inline = InlineEngine(watched, turns)
        probe = WeightSyncProbe(
            ask=inline.ask,
            policy=lambda: self._policy,
            config=config,
            vocabulary=len(load_tokenizer(config.model)),
        )
        transport = BucketTransport(
            inline,
            watched,
            turns,
            SyncRecords(folder / "weight_sync.jsonl", probe, verify_each=config.generator.verify_weight_sync),
            way=config.generator.vllm.weight_transport,
            device=torch.device(config.platform.device),
            adapter_of=self._adapter_of if ships_adapter(config.generator) else None,
        )
        self._turns = turns if takes_turns(config.placement, config.generator, config.platform) else None
        return inline, transport

    def build_learners(self, plan: BatchPlan, stack: ExitStack) -> Learners:
        """The models, on a device that the engine has left where they share one."""
        learners = build_inline_learners(self._config, plan, stack, turns=self._turns)
        self._policy = cast("PolicyLearner | LearnerInTurn", learners.policy)
        return learners

    def _adapter_of(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of the policy that gave these; `weights` themselves where they are of a checkpoint, whose adapter they are."""
        return weights if self._policy is None else self._policy.adapter_weights()


def build_inline_learners(
    config: Config, plan: BatchPlan, stack: ExitStack, *, turns: DeviceTurns | None = None
) -> Learners:
    """The policy, a reference where the algorithm needs one, and a critic where `critic.model.path` names one, in this
    process. `turns`: where they share their device with an engine, and with each other."""
    from skyrl_train.learner.critic import build_critic_learner
    from skyrl_train.learner.policy import build_policy_learner
    from skyrl_train.learner.reference import BaseOfAdapter, build_reference
    from skyrl_train.learner.turns import LearnerInTurn
    from skyrl_train.trainers.steps import Learners

    def placed(learner: AnyLearner) -> AnyLearner | LearnerInTurn:
        stack.callback(learner.close)
        return learner if turns is None else LearnerInTurn(learner, turns)

    if turns is not None:
        turns.models()
    policy = placed(build_policy_learner(config, plan, role="policy"))
    reference: Reference | None = None
    if needs_reference(config.trainer.algorithm):
        built = build_reference(config, plan, policy)
        reference = built if isinstance(built, BaseOfAdapter) else placed(built)
    critic = placed(build_critic_learner(config, plan)) if config.critic.model.path else None
    return Learners(policy=policy, reference=reference, critic=critic)
