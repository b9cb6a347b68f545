"""Rows with images on policy workers of Ray: the weights of one process, and each image sent once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.cluster.session import RaySession
from skyrl_train.images import ImageSpan
from tests.support.learner_cases import make_batch, policy_of
from tests.support.ray_learners import LENGTHS, make_config, ray_learner, relative_difference, weights_of
from tests.support.vision_cases import PLACEHOLDER, VOCABULARY, make_image
from tests.support.vision_engines import save_vlm

pytestmark = pytest.mark.cluster
NUM_IMAGES = 3


def batch_with_images() -> TrainingInputBatch:
    """Rows that begin with an image, three images among them all, and one row without; the images of two rows are equal and
    not the same object."""
    batch = make_batch(LENGTHS, dtype=torch.float32)
    ids = batch["input_ids"] % VOCABULARY
    images = []
    for number, offset in enumerate(batch.row_offsets[:-1].tolist()):
        spans = () if number == 1 else (ImageSpan(0, make_image(number % NUM_IMAGES, rows=1, columns=2)),)
        ids[offset : offset + (2 if spans else 0)] = PLACEHOLDER
        images.append(spans)
    batch = batch.with_columns(input_ids=ids)
    return replace(batch, metadata=replace(batch.metadata, images=tuple(images)))


def mini_batch() -> MiniBatch:
    return close_mini_batch(batch_with_images(), loss_reduction="token_mean", max_sequence_length_for_norm=16)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_two_ranks_train_the_tower_too_and_are_sent_each_image_once(
    session: RaySession, tmp_path: Path, strategy: str
) -> None:
    config = make_config(save_vlm(tmp_path / "model"), strategy=strategy)
    # AdamW's first step is the sign of a gradient, which rounding decides where that is 0, as of biases of keys.
    policy = replace(config.trainer.policy, optimizer=replace(config.trainer.policy.optimizer, name="sgd"))
    config = replace(config, trainer=replace(config.trainer, policy=policy))
    inline = policy_of(config)
    scores = inline.forward(batch_with_images())
    inline.forward_backward(mini_batch())
    norm = inline.optim_step()["policy/grad_norm"].value
    expected, sent = weights_of(inline), session.images.num_sent
    with ray_learner(session, config, 2) as learner:
        assert torch.allclose(learner.forward(batch_with_images()), scores, atol=1e-5)
        learner.forward_backward(mini_batch())
        assert learner.optim_step()["policy/grad_norm"].value == pytest.approx(norm, rel=1e-5)
        found = weights_of(learner)
    assert session.images.num_sent - sent in (0, NUM_IMAGES), "of the rows of both ranks and of both calls"
    assert relative_difference(found, expected) < 1e-5
    tower = [name for name in expected if "visual" in name]
    assert any(not torch.equal(expected[name], weight) for name, weight in policy_of(config).weights() if name in tower)
