"""The critic: values at the state before each token, one gradient however rows are split, exact state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutName
from skyrl_train.config.models import LoraConfig, ModelConfig, OptimizerConfig
from skyrl_train.errors import BatchError, ModelError
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.model import HEAD, load_value_model
from skyrl_train.model.lora import add_adapter, is_adapter
from skyrl_train.telemetry import merge_metrics, to_values
from tests.support.learner_cases import fixed_rows, make_batch, make_double, save_tiny_model

LENGTHS = [5, 9, 7, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


def make_critic(
    folder: Path,
    *,
    double: bool = True,
    rows_per_micro_batch: int = 4,
    layout: LayoutName = "padded",
    merge_turns: bool = False,
    value_clip: float = 0.2,
    random_head: bool = True,
    lr: float = 1e-2,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 - frozen
) -> CriticLearner:
    config = ModelConfig(path=str(folder))
    model = load_value_model(config, "cpu")
    if lora.rank:
        add_adapter(model, lora, seed=0, head=HEAD)
    if random_head:
        torch.nn.init.normal_(model.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
        torch.nn.init.constant_(model.score.bias, 0.3)
    if double:
        make_double(model)
    engine = ModelEngine(
        model,
        name="critic",
        micro_batching=fixed_rows(rows_per_micro_batch, layout, merge_turns=merge_turns),
        optimizer=OptimizerConfig(lr=lr),
        total_optimizer_steps=10,
    )
    loss = {"_target_": "clipped", "value_clip": value_clip}
    return CriticLearner(engine, model=config, algorithm=AlgorithmConfig(critic_loss=loss))


def with_targets(batch: TrainingInputBatch, old_values: Tensor | None = None) -> TrainingInputBatch:
    """Returns that are a function of the token's place in its trajectory's text, so that equal tokens have equal ones."""
    returns = batch["input_ids"].double().sin()
    values = torch.zeros_like(returns) if old_values is None else old_values.double()
    return batch.with_columns(returns=returns, values=values)


def close(batch: TrainingInputBatch) -> MiniBatch:
    return close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64)


def gradient(learner: CriticLearner) -> Tensor:
    gradients = [parameter.grad for parameter in learner.engine.parameters.values()]
    return torch.cat([value.flatten() for value in gradients if value is not None])


def turns_of_one_trajectory(*, split: bool) -> TrainingInputBatch:
    """Prompt 3, response 2, observation 2, response 3: in one row, or in one row per turn."""
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], dtype=torch.int32)
    trained = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    if split:
        later = trained.clone()
        later[:5] = False
        ids, trained, lengths = torch.cat([ids[:5], ids]), torch.cat([trained[:5], later]), [5, 10]
    else:
        lengths = [10]
    rows = len(lengths)
    return TrainingInputBatch(
        token_columns={"input_ids": ids, "loss_mask": trained, "rewards": torch.zeros(len(ids))},
        row_columns={
            "prompt_index": torch.zeros(rows, dtype=torch.int32),
            "trajectory_index": torch.zeros(rows, dtype=torch.int32),
            "step_index": torch.arange(rows).int(),
            "is_last_step": torch.arange(rows) == rows - 1,
            "is_padding": torch.zeros(rows, dtype=torch.bool),
        },
        row_offsets=offsets_of(torch.tensor(lengths)),
        metadata=BatchMetadata(uids=("p0",) * rows, global_step=1, weight_version=0),
    )


def test_a_new_head_says_zero_everywhere(folder: Path) -> None:
    values = make_critic(folder, random_head=False).forward(make_batch(LENGTHS))
    assert torch.equal(values, torch.zeros_like(values))


@pytest.mark.parametrize("rows_per_micro_batch", [1, 3, 100])
def test_a_value_is_the_heads_answer_at_the_token_before(folder: Path, rows_per_micro_batch: int) -> None:
    batch = make_batch(LENGTHS)
    critic = make_critic(folder, rows_per_micro_batch=rows_per_micro_batch)
    model = critic.engine.model
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, stop in zip(batch.row_offsets[:-1].tolist(), batch.row_offsets[1:].tolist()):
        with torch.no_grad():
            hidden = model.base_model(batch["input_ids"][start:stop].long()[None]).last_hidden_state[0]
            expected[start + 1 : stop] = model.score(hidden[:-1]).squeeze(1)
    expected = torch.where(batch["loss_mask"], expected, torch.zeros_like(expected))
    torch.testing.assert_close(critic.forward(batch), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
@pytest.mark.parametrize("merge_turns", [False, True])
def test_a_trajectory_split_into_rows_gives_the_same_gradient(
    folder: Path, layout: LayoutName, merge_turns: bool
) -> None:
    def run(critic: CriticLearner, batch: TrainingInputBatch) -> tuple[Tensor, dict[str, float]]:
        metrics = critic.forward_backward(close(with_targets(batch)))
        found = gradient(critic)
        critic.engine.zero_grad()
        return found, to_values(merge_metrics([metrics]))

    expected, whole = run(make_critic(folder), turns_of_one_trajectory(split=False))
    critic = make_critic(folder, layout=layout, merge_turns=merge_turns)
    found, parts = run(critic, turns_of_one_trajectory(split=True))
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert parts["loss/value"] == pytest.approx(whole["loss/value"], rel=1e-12)


def test_the_loss_is_half_the_squared_error_clipped_around_the_old_values(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    critic = make_critic(folder, value_clip=0.1)
    now = critic.forward(batch)
    batch = with_targets(batch, old_values=now + 1.0)
    mask = batch["loss_mask"]
    values, returns, old = now[mask], batch["returns"][mask], batch["values"][mask]
    clipped = old + (values - old).clamp(-0.1, 0.1)
    expected = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
    found = to_values(critic.forward_backward(close(batch)))
    assert found["loss/value"] == pytest.approx(float(expected), rel=1e-10)
    assert found["critic/value_loss"] == pytest.approx(float(expected), rel=1e-10)
    assert 0 < found["critic/clip_fraction"] < 1


def test_the_value_loss_falls(folder: Path) -> None:
    critic = make_critic(folder, double=False, random_head=False, value_clip=0.0, lr=3e-3)
    mini_batch = close(with_targets(make_batch(LENGTHS)))
    losses = []
    for _ in range(15):
        losses.append(to_values(critic.forward_backward(mini_batch))["loss/value"])
        critic.optim_step()
    assert losses[-1] < 0.3 * losses[0]


def test_saved_and_loaded_it_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    mini_batch = close(with_targets(make_batch(LENGTHS)))

    def step(critic: CriticLearner) -> None:
        critic.forward_backward(mini_batch)
        critic.optim_step()

    first = make_critic(folder, double=False)
    step(first)
    first.save(tmp_path / "critic")
    step(first)
    second = make_critic(folder, double=False, random_head=False)
    second.load(tmp_path / "critic")
    step(second)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.weights(), second.weights()))
    names = set(load_file(tmp_path / "critic" / "model.safetensors"))
    assert {"score.weight", "score.bias"} <= names
    assert not any(name.startswith("lm_head") for name in names)


def test_with_an_adapter_the_head_and_the_adapter_are_all_that_is_trained_and_saved(
    folder: Path, tmp_path: Path
) -> None:
    critic = make_critic(folder, double=False, lora=LoraConfig(rank=2))
    before = {name: value.clone() for name, value in critic.engine.model.named_parameters()}
    critic.forward_backward(close(with_targets(make_batch(LENGTHS))))
    critic.optim_step()
    changed = {name for name, value in critic.engine.model.named_parameters() if not torch.equal(value, before[name])}
    assert {"score.weight", "score.bias"} < changed
    assert all(is_adapter(name) or name.startswith("score.") for name in changed)
    assert not any("score.lora_" in name for name in before)
    critic.save(tmp_path / "critic")
    assert set(load_file(tmp_path / "critic" / "model.safetensors")) == set(critic.engine.parameters)


def test_an_adapter_is_merged_into_what_a_critic_exports(folder: Path, tmp_path: Path) -> None:
    critic, batch = make_critic(folder, double=False, lora=LoraConfig(rank=2)), make_batch(LENGTHS)
    for _ in range(2):
        critic.forward_backward(close(with_targets(batch)))
        critic.optim_step()
    critic.export_hf(tmp_path / "export")
    again = make_critic(tmp_path / "export", double=False, random_head=False)
    torch.testing.assert_close(again.forward(batch), critic.forward(batch), rtol=1e-5, atol=1e-5)


def test_an_export_is_the_start_of_another_critic(folder: Path, tmp_path: Path) -> None:
    critic, batch = make_critic(folder, double=False), make_batch(LENGTHS)
    critic.export_hf(tmp_path / "export")
    again = make_critic(tmp_path / "export", double=False, random_head=False)
    assert torch.equal(again.forward(batch), critic.forward(batch))


def test_a_reward_model_lends_its_head_and_one_of_two_labels_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "reward", tied=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({**tensors, "score.weight": torch.full((1, 32), 0.5)}, path / "model.safetensors", {"format": "pt"})
    model = load_value_model(ModelConfig(path=str(path)), "cpu")
    assert torch.equal(model.score.weight, torch.full((1, 32), 0.5))
    assert torch.equal(model.score.bias, torch.zeros(1))
    save_file({**tensors, "score.weight": torch.ones(2, 32)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="one label"):
        load_value_model(ModelConfig(path=str(path)), "cpu")


def test_a_missing_column_is_named(folder: Path) -> None:
    with pytest.raises(BatchError, match="'values'"):
        make_critic(folder).forward_backward(close(make_batch(LENGTHS)))
