"""What the composition root makes where `placement.backend=inline`: models in this process, and beside them, with
`generator=vllm`, an engine whose core is a process of its own on the same machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from skyrl_train.config.bundles import takes_turns
from skyrl_train.config.generation import ships_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from torch import Tensor

    from skyrl_train.config.bundles import Role
    from skyrl_train.config.learners import RunModels
    from skyrl_train.config.schema import Config
    from skyrl_train.interfaces import InferenceEngine, WeightTransport
    from skyrl_train.learner.critic import CriticLearner
    from skyrl_train.learner.policy import PolicyLearner
    from skyrl_train.learner.turns import DeviceTurns, LearnerInTurn
    from skyrl_train.trainers.steps import Learners


class InlineVLLM:
    """An engine and models on this machine, in turns where they share a GPU. Everything ends when `stack` closes."""

    def __init__(self) -> None:
        self._turns: DeviceTurns | None = None
        self._policy: PolicyLearner | LearnerInTurn | None = None

    def build_engine(self, config: Config, stack: ExitStack) -> tuple[InferenceEngine, WeightTransport]:
        """The engine, which has loaded the model, and what feeds it. Raises EngineError."""
        import torch

        from skyrl_train.inference.vllm import VLLMEngine
        from skyrl_train.inference.vllm_inline import BucketTransport, InlineEngine, WatchedEngine
        from skyrl_train.inference.vllm_settings import engine_settings
        from skyrl_train.learner.turns import DeviceTurns
        from skyrl_train.model.causal_lm import load_tokenizer
        from skyrl_train.weight_sync.probe import WeightSyncProbe
        from skyrl_train.weight_sync.transport import SyncRecords

        folder = Path(config.output_dir)
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

    def build_learners(self, models: RunModels, stack: ExitStack) -> Learners:
        """The models, on a device that the engine has left where they share one."""
        learners = build_inline_learners(models, stack, turns=self._turns)
        self._policy = cast("PolicyLearner | LearnerInTurn", learners.policy)
        return learners

    def _adapter_of(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of the policy that gave these; `weights` themselves where they are of a checkpoint, whose adapter they are."""
        return weights if self._policy is None else self._policy.adapter_weights()


def build_inline_learners(models: RunModels, stack: ExitStack, *, turns: DeviceTurns | None = None) -> Learners:
    """The models of a run, in this process. `turns`: where they share their device with an engine, and each other."""
    import torch

    from skyrl_train.learner.build import build_learner, build_strategy
    from skyrl_train.learner.policy import BaseOfAdapter
    from skyrl_train.learner.turns import LearnerInTurn
    from skyrl_train.trainers.steps import Learners

    if turns is not None:
        turns.models()
    built: dict[Role, PolicyLearner | CriticLearner | LearnerInTurn] = {}
    for settings in models.learners:
        learner = build_learner(settings, strategy=build_strategy(settings, torch.device(settings.platform.device)))
        stack.callback(learner.close)
        built[settings.role] = learner if turns is None else LearnerInTurn(learner, turns)
    policy, reference = cast("PolicyLearner", built["policy"]), cast("PolicyLearner | None", built.get("reference"))
    base = BaseOfAdapter(policy.forward_base) if models.base_is_reference else None
    return Learners(policy=policy, reference=base or reference, critic=built.get("critic"))
