"""Packed and padded examples have the same loss and the same gradient, and see nothing of each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig
from skyrl_train.data.sft import Collator, DefaultCollator, ExampleSet, PackedDataCollator, SourcePart, store_of
from skyrl_train.learner import PolicyLearner
from skyrl_train.model import load_causal_lm
from tests.support.learner_cases import VOCABULARY, save_tiny_model, supervised_learner

LENGTHS = (7, 19, 3, 12, 2, 30, 5, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def examples() -> ExampleSet:
    rng = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append((rng.integers(3, VOCABULARY, length).tolist(), mask.tolist()))
    return ExampleSet([SourcePart(name="train", store=store_of(rows), rows=np.arange(len(rows)), max_length=64)])


def learner_of(folder: Path, layout: LayoutChoice, tokens: int) -> PolicyLearner:
    model_config = ModelConfig(path=str(folder))
    model = load_causal_lm(model_config, "cpu").double()
    return supervised_learner(model, model_config, layout=layout, tokens=tokens)


def loss_and_gradient(learner: PolicyLearner, mini_batch: MiniBatch) -> tuple[float, dict[str, Tensor]]:
    metrics = learner.forward_backward(mini_batch)
    gradient = {n: p.grad.clone() for n, p in learner.engine.parameters.items() if p.grad is not None}
    learner.engine.zero_grad()
    return metrics["loss/total"].value, gradient


INDICES = np.array([5, 0, 3, 1, 7, 2, 6, 4])


def collators(examples: ExampleSet) -> list[tuple[str, Collator, LayoutChoice, int]]:
    return [
        ("padded, one by one", DefaultCollator(examples), "padded", 1),
        ("padded, aligned", DefaultCollator(examples, align=8), "padded", 128),
        ("laid out packed", DefaultCollator(examples), "packed", 50),
        ("packed", PackedDataCollator(examples, max_tokens_per_row=50), "packed", 50),
        ("packed, aligned", PackedDataCollator(examples, max_tokens_per_row=64, align=16), "packed", 64),
        ("packed for three ranks", PackedDataCollator(examples, max_tokens_per_row=50, num_ranks=3), "packed", 50),
        ("packed rows side by side", PackedDataCollator(examples, max_tokens_per_row=50), "padded", 200),
    ]


@pytest.mark.parametrize("number", range(7))
def test_every_way_to_collate_has_the_same_loss_and_gradient(folder: Path, examples: ExampleSet, number: int) -> None:
    expected_loss, expected = loss_and_gradient(
        learner_of(folder, "padded", 1000), DefaultCollator(examples)(INDICES, step=1)
    )
    _, collate, layout, tokens = collators(examples)[number]
    loss, gradient = loss_and_gradient(learner_of(folder, layout, tokens), collate(INDICES, step=1))
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert gradient.keys() == expected.keys()
    for name, value in gradient.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_step(folder: Path, examples: ExampleSet) -> None:
    learner = learner_of(folder, "packed", 50)
    mini_batch = PackedDataCollator(examples, max_tokens_per_row=50)(INDICES, step=1)
    loss, _ = loss_and_gradient(learner, mini_batch)
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu").double()
    flat = examples.gather(INDICES)
    total, count = 0.0, 0
    for ids, mask in zip(
        np.split(flat.input_ids, np.cumsum(flat.lengths)[:-1]), np.split(flat.loss_mask, np.cumsum(flat.lengths)[:-1])
    ):
        with torch.no_grad():
            logits = model(torch.tensor(ids[None]).long()).logits[0]
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:]).long()]
        total -= float(logprobs[torch.tensor(mask[1:])].sum())
        count += int(mask.sum())
    assert loss == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_an_example_sees_nothing_of_what_is_packed_with_it(
    folder: Path, examples: ExampleSet, layout: LayoutChoice
) -> None:
    learner = learner_of(folder, layout, 200)
    batch = PackedDataCollator(examples, max_tokens_per_row=100)(INDICES, step=1).batch
    before = learner.forward(batch)
    start, stop = (batch["position_ids"] == 0).nonzero().flatten()[1:3].tolist()
    ids = batch["input_ids"].clone()
    ids[start:stop] = (ids[start:stop] + 7) % VOCABULARY
    after = learner.forward(batch.with_columns(input_ids=ids))
    changed = (before != after).nonzero().flatten()
    assert len(changed)
    assert start <= int(changed.min()) <= int(changed.max()) < stop
