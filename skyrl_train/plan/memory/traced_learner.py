"""The learner whose step a plan traces: as a run makes it, of a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.distributed import ModelStrategy
from skyrl_train.learner import ModelEngine, adapt, learner_of
from skyrl_train.learner.memory import DeviceShare, Probed
from skyrl_train.model import place_model, replace_head
from skyrl_train.model.parallel import TensorGroup, cut_matrices
from skyrl_train.model.sizes import meta_model
from skyrl_train.model.vision import freeze_vision, vision_of


def learner_without_weights(
    settings: LearnerSettings, architecture: Mapping[str, object], share: DeviceShare
) -> Probed:
    """The learner that a run makes, of a model on the meta device and with none of its ranks. Raises ModelError."""
    config = settings.model
    held = config.dtype if settings.frozen else "float32"
    model = meta_model(architecture, name=config.path, attention=config.attention, dtype=held)
    if settings.role == "critic":
        replace_head(model, config)
    place_model(model, config, "meta")
    model.train()
    if config.lora.rank:
        adapt(model, settings)
    if "vision" in config.freeze and vision_of(model) is not None:  # `plan.architecture` may have none
        freeze_vision(model, name=config.path)

    class OneOfMany(ModelStrategy):
        """A rank that knows how many there are, and meets none of them."""

        num_shards = share.num_shards
        tensor_ranks = share.tensor_ranks

        sharded = share.sharded

        def prepare(self, model: PreTrainedModel) -> None:
            """Leave the parts of matrices that one of several ranks has."""
            if self.tensor_ranks > 1:
                cut_matrices(model, TensorGroup(None, size=self.tensor_ranks), name=config.path)

    engine = ModelEngine(
        model,
        name=settings.role,
        micro_batching=make_micro_batch_strategy(
            settings.micro_batching, merge_turns=settings.merge_turns
        ).as_one_forward(),
        dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
        optimizer=settings.optimizer,
        strategy=OneOfMany(),
    )
    return learner_of(engine, settings)
