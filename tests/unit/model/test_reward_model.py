"""Scores of a reward model are those of transformers for each conversation alone, however many are computed together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import ModelError, SkyrlTrainError
from skyrl_train.model.causal_lm import load_tokenizer
from skyrl_train.model.files.reward_model import SequenceScorer, batches_by_length, weights_identity
from skyrl_train.rollout.rewards import RewardModel
from tests.support.fakes import make_tiny_model, make_tokenizer
from tests.support.reward_model_cases import CONVERSATIONS, save_reward_model


def loads(folder: Path, **changes: Any) -> partial[SequenceScorer]:
    given = {"revision": None, "dtype": "float32", "device": "cpu", "max_batch_tokens": 64, "label": 0, "weights": ""}
    return partial(SequenceScorer, str(folder), **{**given, **changes})


def scored_by_transformers(folder: Path, label: int = 0) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    with torch.no_grad():
        rows = [tokenizer.apply_chat_template(each, return_tensors="pt") for each in CONVERSATIONS]
        return [float(model(row["input_ids"]).logits[0, label]) for row in rows]


@pytest.mark.parametrize("pad_token_id", [None, 3])
@pytest.mark.parametrize("max_batch_tokens", [1, 30])
def test_each_conversation_is_scored_as_by_itself(
    tmp_path: Path, pad_token_id: int | None, max_batch_tokens: int
) -> None:
    folder = save_reward_model(tmp_path, pad_token_id=pad_token_id)
    scorer = loads(folder, max_batch_tokens=max_batch_tokens)()
    found = asyncio.run(scorer.score(CONVERSATIONS))
    scorer.close()
    assert found == pytest.approx(scored_by_transformers(folder), abs=1e-5)
    assert found[0] == pytest.approx(found[5], abs=1e-5)
    assert len({round(each, 4) for each in found}) == 5


def test_one_label_of_several_is_the_score(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, num_labels=3)
    found = loads(folder, label=2)().score_now(CONVERSATIONS)
    assert found == pytest.approx(scored_by_transformers(folder, label=2), abs=1e-5)
    with pytest.raises(ModelError, match="has 3 labels, and no number 3"):
        loads(folder, label=3)()


def test_rows_of_like_length_are_computed_together_within_the_budget() -> None:
    lengths = [5, 20, 6, 5, 100, 19]
    batches = list(batches_by_length(lengths, 40))
    assert batches == [[0, 3, 2], [5, 1], [4]]
    assert list(batches_by_length([], 40)) == []


def test_what_is_no_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path / "causal")
    save_reward_model(tmp_path / "plain", template=False)
    save_reward_model(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "causal")
    with pytest.raises(ModelError, match=r"lacks score.weight, which would be random. Is it a reward model"):
        loads(tmp_path / "causal")()
    with pytest.raises(ModelError, match="has no chat template"):
        loads(tmp_path / "plain")()
    with pytest.raises(ModelError, match="no such folder"):
        loads(tmp_path / "nothing")()
    scorer = loads(tmp_path / "other")()
    with pytest.raises(ModelError, match="takes 256 tokens; a conversation has"):
        scorer.score_now([[{"role": "user", "content": "1" * 300}]])


def test_another_training_of_the_same_model_has_another_identity(tmp_path: Path) -> None:
    folder, other = save_reward_model(tmp_path / "one"), save_reward_model(tmp_path / "two", seed=1)
    identity = weights_identity(str(folder), None)
    assert identity == weights_identity(str(save_reward_model(tmp_path / "again")), None)
    assert identity != weights_identity(str(other), None)
    loads(folder, weights=identity)()
    with pytest.raises(ModelError, match=f"and the run has scored with {identity}"):
        loads(other, weights=identity)()
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model.safetensors"):
        weights_identity(str(other), None)


class FakeScorer:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def score(self, conversations: Any) -> list[float]:
        self.asked.append(conversations)
        return [float(len(each)) for each in conversations]


def test_all_samples_of_a_prompt_are_scored_in_one_call() -> None:
    reward, scorer = RewardModel(path="somewhere"), FakeScorer()
    with pytest.raises(SkyrlTrainError, match="nothing holds the reward model 'somewhere'"):
        asyncio.run(reward(["a"], messages=CONVERSATIONS[:1]))
    reward.use(scorer.score)
    assert asyncio.run(reward(["a", "b"], messages=CONVERSATIONS[:2])) == [2.0, 2.0]
    assert scorer.asked == [CONVERSATIONS[:2]]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, ""),
        ({"path": "a", "url": "http://127.0.0.1:1", "served_model": "m"}, ""),
        ({"url": "http://127.0.0.1:1"}, ""),
        ({"path": "a", "placement": "gpu"}, ".placement"),
        ({"path": "a", "dtype": "int8"}, ".dtype"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: Mapping[str, Any], field: str) -> None:
    found = list(RewardModel(**settings).violations("environment.reward"))
    assert [violation.field for violation in found] == [f"environment.reward{field}"]
    assert json.dumps([violation.rule for violation in found])
