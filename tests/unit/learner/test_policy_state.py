"""The policy learner's state: saved, loaded, refused, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.errors import CheckpointError, ModelError, SaveError
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model import load_tokenizer
from skyrl_train.telemetry import to_values
from tests.support.file_limits import file_size_limit
from tests.support.learner_cases import LENGTHS, close, make_batch, make_learner, same, save_tiny_model, snapshot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_saved_and_loaded_training_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, name: str, steps_before: int
) -> None:
    optimizer = OptimizerConfig(name=name, lr=1e-2, warmup_steps=3, schedule="cosine")

    def steps(learner: PolicyLearner, seeds: range) -> list[dict[str, float]]:
        metrics = []
        for seed in seeds:
            done = to_values(learner.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=torch.float32))))
            metrics.append({**done, **to_values(learner.optim_step())})
        return metrics

    whole = make_learner(folder, optimizer=optimizer)
    steps(whole, range(steps_before))
    whole.save(tmp_path)
    resumed = make_learner(folder, optimizer=optimizer)
    steps(resumed, range(7, 8))
    resumed.load(tmp_path)
    assert same(snapshot(resumed), snapshot(whole))
    assert steps(resumed, range(2, 5)) == steps(whole, range(2, 5))
    assert same(snapshot(resumed), snapshot(whole))


def test_a_loaded_optimizer_keeps_its_moments_and_takes_settings_from_the_configuration(
    folder: Path, tmp_path: Path
) -> None:
    first = make_learner(folder, optimizer=OptimizerConfig(lr=1e-2))
    for seed in (0, 1):
        first.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=torch.float32)))
        first.optim_step()
    first.save(tmp_path)
    changed = OptimizerConfig(lr=3e-2, betas=(0.5, 0.7), eps=1e-4, weight_decay=0.3, max_grad_norm=0.0)
    learner = make_learner(folder, optimizer=changed)
    learner.load(tmp_path)
    before = {name: parameter.detach().double() for name, parameter in learner.engine.parameters.items()}
    moments = {key: value.double() for key, value in load_file(tmp_path / "optimizer.safetensors").items()}
    learner.forward_backward(close(make_batch(LENGTHS, seed=2, dtype=torch.float32)))
    gradients = {n: p.grad.detach().double() for n, p in learner.engine.parameters.items() if p.grad is not None}
    metrics = to_values(learner.optim_step())
    assert metrics["policy/lr"] == 3e-2
    for name, weight in before.items():
        # Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2, at its third step
        mean = 0.5 * moments[f"exp_avg.{name}"] + 0.5 * gradients[name]
        square = 0.7 * moments[f"exp_avg_sq.{name}"] + 0.3 * gradients[name] ** 2
        step = mean / (1 - 0.5**3) / ((square / (1 - 0.7**3)).sqrt() + 1e-4)
        decay = 0.3 if weight.ndim >= 2 else 0.0
        expected = weight - 3e-2 * (step + decay * weight)
        torch.testing.assert_close(learner.engine.parameters[name].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "other"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_an_optimizer_of_another_name_begins_without_state(folder: Path, tmp_path: Path, name: str, other: str) -> None:
    first = make_learner(folder, optimizer=OptimizerConfig(name=name, lr=1e-2))
    first.forward_backward(close(make_batch(LENGTHS)))
    first.optim_step()
    first.save(tmp_path / "first")
    second = make_learner(folder, optimizer=OptimizerConfig(name=other, lr=1e-2))
    second.load(tmp_path / "first")
    assert dict(second.engine.optimizer.state) == {}
    assert second.engine.num_optimizer_steps == 1
    second.forward_backward(close(make_batch(LENGTHS)))
    second.optim_step()
    second.save(tmp_path / "second")
    stored = load_file(tmp_path / "second" / "optimizer.safetensors")
    assert all(float(value) == 1 for key, value in stored.items() if key.startswith("step."))
    assert bool(stored) is (other == "adamw")


def test_a_save_holds_no_pickle_and_tied_weights_once(folder: Path, tmp_path: Path) -> None:
    learner = make_learner(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    learner.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" not in stored
    assert sorted(stored) == sorted(name for name, _ in learner.weights())
    assert "exp_avg_sq.model.norm.weight" in load_file(tmp_path / "optimizer.safetensors")


def test_an_untied_head_is_its_own_weight(tmp_path: Path) -> None:
    learner = make_learner(save_tiny_model(tmp_path, tied=False))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {name for name, _ in learner.weights()}


def test_saving_with_a_pending_gradient_is_refused(folder: Path, tmp_path: Path) -> None:
    learner = make_learner(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    with pytest.raises(CheckpointError, match=r"pending gradient"):
        learner.save(tmp_path)


def test_the_state_of_another_model_is_refused_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    other = make_learner(save_tiny_model(tmp_path / "other", tied=False))
    other.save(tmp_path / "state")
    learner = make_learner(folder)
    before = snapshot(learner)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is float32 .* but absent in the model. Is model.path"):
        learner.load(tmp_path / "state")
    assert same(snapshot(learner), before)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_missing_or_broken_file_is_refused_and_changes_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    learner = make_learner(folder)
    learner.save(tmp_path)
    before = snapshot(learner)
    (tmp_path / name).write_bytes(b"\x00")
    with pytest.raises(CheckpointError, match=r"the policy model.* cannot be read"):
        learner.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=r"the policy model.* cannot be read"):
        learner.load(tmp_path)
    assert same(snapshot(learner), before)


def test_a_reference_loads_its_own_state_only(folder: Path, tmp_path: Path) -> None:
    reference = make_learner(folder, role="reference")
    reference.save(tmp_path / "reference")
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["model.safetensors", "state.json"]
    reference.load(tmp_path / "reference")
    make_learner(folder).save(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"role 'policy'; expected .*'reference'"):
        reference.load(tmp_path / "policy")


def test_the_export_loads_with_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = make_learner(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    learner.export_hf(tmp_path / "export")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "export").iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.config.use_cache is True
    assert same(dict(model.named_parameters()), snapshot(learner))
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "export"))).encode("w7 w9") == [7, 9]


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_disk_without_room_is_told_from_a_bug(
    folder: Path, tmp_path: Path, num_bytes: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    monkeypatch.setattr(learner.engine.strategy, "sharded", sharded)
    before = snapshot(learner)
    with file_size_limit(num_bytes):
        with pytest.raises(SaveError, match=r"the policy model could not be written"):
            learner.save(tmp_path / "state")
        with pytest.raises(ModelError, match=r"the model could not be exported"):
            learner.export_hf(tmp_path / "export")
    assert same(snapshot(learner), before)
    learner.save(tmp_path / "state")
    resumed = make_learner(folder)
    resumed.load(tmp_path / "state")
    assert same(snapshot(resumed), before)
