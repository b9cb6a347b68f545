"""The policy learner: what it computes, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig, ReferenceConfig, ReferenceModelConfig
from skyrl_train.errors import BatchError, ModelError, NonFiniteError, SkyrlTrainError
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.telemetry import to_values
from tests.support.learner_cases import (
    LENGTHS,
    close,
    make_batch,
    make_double,
    make_learner,
    policy_of,
    same,
    save_tiny_model,
    snapshot,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


def gradient(learner: PolicyLearner) -> Tensor:
    gradients = [parameter.grad for parameter in learner.engine.parameters.values()]
    return torch.cat([value.flatten() for value in gradients if value is not None])


def model_logprobs(folder: Path, batch: TrainingInputBatch, temperature: float) -> Tensor:
    """Row by row with the model's own logits: the plain way."""
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for row in range(batch.num_rows):
        start, stop = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
        ids = batch["input_ids"][start:stop].long()
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)
        expected[start + 1 : stop] = log_p[:-1].gather(1, ids[1:, None]).squeeze(1)
    return torch.where(batch["loss_mask"], expected, torch.zeros_like(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_per_micro_batch", [1, 3, 100])
def test_forward_gives_the_logprob_of_each_trained_token(
    folder: Path, temperature: float, rows_per_micro_batch: int
) -> None:
    batch = make_batch(LENGTHS)
    learner = make_learner(folder, double=True, temperature=temperature, rows_per_micro_batch=rows_per_micro_batch)
    found = learner.forward(batch)
    torch.testing.assert_close(found, model_logprobs(folder, batch, temperature), rtol=1e-10, atol=1e-12)
    assert not found.requires_grad


def test_greedy_rollouts_are_scored_at_temperature_one(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    greedy = make_learner(folder, temperature=0.0).forward(batch)
    assert torch.equal(greedy, make_learner(folder, temperature=1.0).forward(batch))


def test_rows_without_loss_and_padding_rows_score_zero(folder: Path) -> None:
    batch = make_batch([3, 6]).pad_rows(2)
    found = make_learner(folder).forward(batch)
    assert found.shape == (13,)
    assert found[:6].tolist() == [0.0] * 6
    assert (found[6:9] < 0).all()
    assert found[9:].tolist() == [0.0] * 4


def test_a_batch_of_padding_alone_scores_zero(folder: Path) -> None:
    batch = make_batch([3]).slice(0, 0).pad_rows(2, uid="p0")
    assert make_learner(folder).forward(batch).tolist() == [0.0] * 4


def test_the_loss_is_the_weighted_sum_of_its_terms(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01, kl_estimator="k2")
    learner = make_learner(folder, double=True, algorithm=algorithm)
    logprobs = model_logprobs(folder, batch, 1.0)
    mask, advantages = batch["loss_mask"], batch["advantages"]
    ratio = (logprobs - batch["old_logprobs"]).exp()
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)[mask].mean()
    kl = 0.5 * (logprobs - batch["ref_logprobs"]).square()[mask].mean()

    metrics = to_values(learner.forward_backward(close(batch)))

    assert metrics["loss/policy"] == pytest.approx(float(policy), rel=1e-9)
    assert metrics["loss/kl"] == pytest.approx(float(kl), rel=1e-9)
    assert metrics["policy/entropy"] == pytest.approx(metrics["loss/entropy"], rel=1e-9)
    assert 0 < metrics["policy/entropy"] < math.log(50)
    total = metrics["loss/policy"] + 0.1 * metrics["loss/kl"] - 0.01 * metrics["loss/entropy"]
    assert metrics["loss/total"] == pytest.approx(total, rel=1e-9)
    difference = (batch["old_logprobs"] - batch["rollout_logprobs"])[mask].abs()
    assert metrics["policy/rollout_logprob_diff"] == pytest.approx(float(difference.mean()), rel=1e-9)
    assert metrics["policy/rollout_logprob_diff_max"] == pytest.approx(float(difference.max()), rel=1e-9)


def test_on_policy_the_gradient_is_that_of_advantage_weighted_logprobs(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    learner = make_learner(folder, double=True)
    batch = batch.with_columns(old_logprobs=learner.forward(batch))
    metrics = to_values(learner.forward_backward(close(batch)))
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-12)

    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(batch.num_rows):
        start, stop = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
        ids = batch["input_ids"][start:stop].long()
        log_p = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
        taken = log_p[:-1].gather(1, ids[1:, None]).squeeze(1)
        loss = loss - (taken * batch["advantages"][start + 1 : stop])[batch["loss_mask"][start + 1 : stop]].sum()
    (loss / int(batch["loss_mask"].sum())).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient(learner), expected, rtol=1e-9, atol=1e-12)


def test_gradients_add_up_until_the_step(folder: Path) -> None:
    learner = make_learner(folder, double=True)
    mini_batch = close(make_batch(LENGTHS))
    learner.forward_backward(mini_batch)
    once = gradient(learner).clone()
    learner.forward_backward(mini_batch)
    torch.testing.assert_close(gradient(learner), 2 * once, rtol=1e-12, atol=0)


def test_a_missing_column_is_named(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    without = dataclasses.replace(
        batch, token_columns={k: v for k, v in batch.token_columns.items() if k != "ref_logprobs"}
    )
    make_learner(folder).forward_backward(close(without))
    with pytest.raises(BatchError, match=r"no column 'ref_logprobs'"):
        make_learner(folder, algorithm=AlgorithmConfig(kl_loss_coef=0.1)).forward_backward(close(without))


def test_a_token_id_outside_the_vocabulary_is_named(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    ids = batch["input_ids"].clone()
    ids[15] = 50
    with pytest.raises(BatchError, match=r"token id 50 in a row of 'p1', but the model's vocabulary has 50 entries"):
        make_learner(folder).forward(batch.with_columns(input_ids=ids))


def test_the_reference_only_scores(folder: Path) -> None:
    reference = make_learner(folder, role="reference")
    batch = make_batch(LENGTHS)
    assert (reference.forward(batch)[batch["loss_mask"]] < 0).all()
    for call in (lambda: reference.forward_backward(close(batch)), reference.optim_step):
        with pytest.raises(SkyrlTrainError, match=r"the reference model is only scored"):
            call()


def test_sgd_moves_each_weight_by_its_gradient(folder: Path) -> None:
    optimizer = OptimizerConfig(name="sgd", lr=0.5, max_grad_norm=0.0, weight_decay=0.0)
    learner = make_learner(folder, double=True, optimizer=optimizer)
    before = torch.cat([weight.flatten() for weight in snapshot(learner).values()])
    learner.forward_backward(close(make_batch(LENGTHS)))
    step = gradient(learner).clone()
    metrics = to_values(learner.optim_step())
    after = torch.cat([weight.flatten() for weight in snapshot(learner).values()])
    torch.testing.assert_close(after, before - 0.5 * step, rtol=1e-12, atol=1e-14)
    assert metrics == {"policy/grad_norm": pytest.approx(float(step.norm())), "policy/lr": 0.5}


def test_the_gradient_is_clipped_by_its_global_norm(folder: Path) -> None:
    optimizer = OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=0.01, weight_decay=0.0)
    learner = make_learner(folder, double=True, optimizer=optimizer)
    before = torch.cat([weight.flatten() for weight in snapshot(learner).values()])
    learner.forward_backward(close(make_batch(LENGTHS)))
    assert to_values(learner.optim_step())["policy/grad_norm"] > 0.01
    after = torch.cat([weight.flatten() for weight in snapshot(learner).values()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_spares_biases_and_norms(folder: Path) -> None:
    learner = make_learner(folder, optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = snapshot(learner)
    learner.optim_step()
    for name, weight in learner.weights():
        factor = 1.0 if "norm" in name or "bias" in name else 0.95
        torch.testing.assert_close(weight, before[name] * factor)


def test_the_learning_rate_follows_the_schedule(folder: Path) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", weight_decay=0.0)
    learner = make_learner(folder, optimizer=optimizer, total_optimizer_steps=6)
    assert [to_values(learner.optim_step())["policy/lr"] for _ in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_documents_drive_the_schedule_where_steps_close_by_them(folder: Path, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=1.0, schedule="linear")
    learner = make_learner(folder, optimizer=optimizer, total_optimizer_steps=4, total_documents=40)
    batch, rates = close(make_batch(LENGTHS)).batch, []
    for num_documents in (10, 20, 5):
        learner.engine.forward_backward(batch, lambda *_: (_zero(learner), {}), num_documents=num_documents)
        rates.append(to_values(learner.optim_step())["policy/lr"])
    assert rates == [1.0, 0.75, 0.25]
    learner.save(tmp_path)
    resumed = make_learner(folder, optimizer=optimizer, total_optimizer_steps=4, total_documents=40)
    resumed.load(tmp_path)
    assert to_values(resumed.optim_step())["policy/lr"] == 0.125


def _zero(learner: PolicyLearner) -> Tensor:
    """A loss of 0 that has a gradient."""
    return 0.0 * next(iter(learner.engine.parameters.values())).sum()


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_non_finite_loss_moves_no_weight_and_training_can_go_on(folder: Path, spoilt: float) -> None:
    batch = make_batch(LENGTHS)
    advantages = batch["advantages"].clone()
    advantages[10] = spoilt
    learner, clean = make_learner(folder), make_learner(folder)
    before = snapshot(learner)
    learner.forward_backward(close(batch.with_columns(advantages=advantages)))
    with pytest.raises(NonFiniteError, match=r"policy, optimizer step 0: loss .* No weight was changed"):
        learner.optim_step()
    assert same(snapshot(learner), before)
    for either in (learner, clean):
        either.forward_backward(close(batch))
        either.optim_step()
    assert same(snapshot(learner), snapshot(clean))


def test_a_non_finite_gradient_names_the_parameter(folder: Path) -> None:
    learner = make_learner(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    bad = learner.engine.parameters["model.norm.weight"].grad
    assert bad is not None
    bad[3] = math.nan
    with pytest.raises(NonFiniteError, match=r"not finite in 1 of 26 parameters, first model.norm.weight"):
        learner.optim_step()


def test_a_step_of_padding_alone_is_a_step_with_gradient_zero(folder: Path) -> None:
    learner, other = make_learner(folder), make_learner(folder)
    batch = make_batch(LENGTHS)
    for each in (learner, other):
        each.forward_backward(close(batch))
        each.optim_step()
    learner.forward_backward(close(batch.slice(0, 0).pad_rows(3, uid="p0")))
    other.forward_backward(close(batch.with_columns(advantages=torch.zeros(batch.num_tokens))))
    assert to_values(learner.optim_step())["policy/grad_norm"] == 0.0
    other.optim_step()
    assert same(snapshot(learner), snapshot(other))


def test_the_same_inputs_give_the_same_bits(folder: Path) -> None:
    def train() -> dict[str, Tensor]:
        learner = make_learner(folder)
        for seed in range(3):
            learner.forward_backward(close(make_batch(LENGTHS, seed=seed, dtype=torch.float32)))
            learner.optim_step()
        return snapshot(learner)

    assert same(train(), train())


def test_bfloat16_keeps_float32_weights_and_comes_near(folder: Path) -> None:
    batch = make_batch(LENGTHS, dtype=torch.float32)
    exact, rounded = make_learner(folder), make_learner(folder)
    rounded.engine.oom_retry.use(dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.forward(batch), exact.forward(batch), rtol=0, atol=0.2)
    for learner in (exact, rounded):
        learner.forward_backward(close(batch))
    assert gradient(rounded).dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(gradient(rounded), gradient(exact), dim=0)
    assert float(similarity) > 0.99
    rounded.optim_step()
    assert {weight.dtype for _, weight in rounded.weights()} == {torch.float32}


def built(config: Config, role: Literal["policy", "reference"]) -> PolicyLearner:
    return policy_of(config, role=role)


def test_a_reference_of_its_own_scores_and_may_become_the_policy(folder: Path, tmp_path: Path) -> None:
    teacher = save_tiny_model(tmp_path / "teacher", tokenizer=True, seed=1)
    config = Config(
        model=ModelConfig(path=str(folder)), reference=ReferenceConfig(model=ReferenceModelConfig(path=str(teacher)))
    )
    batch = make_batch(LENGTHS)
    reference, policy = built(config, "reference"), built(config, "policy")
    assert torch.equal(reference.forward(batch), make_learner(teacher).forward(batch))
    assert not torch.equal(reference.forward(batch), policy.forward(batch))
    reference.load_weights(policy.weights())
    assert torch.equal(reference.forward(batch), policy.forward(batch))
    with pytest.raises(ModelError, match="parameters and got"):
        reference.load_weights(iter([]))


def test_a_reference_with_another_tokenizer_is_refused(folder: Path) -> None:
    other = ReferenceConfig(model=ReferenceModelConfig(path="builtin:tiny_qwen2"))
    with pytest.raises(ModelError, match="its tokenizer is not that of"):
        built(Config(model=ModelConfig(path=str(folder)), reference=other), "reference")


def test_the_ledger_tells_staleness_from_numerics_and_drift(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    learner = make_learner(folder)
    old = learner.forward(batch) - 0.25
    shift = torch.where(batch["loss_mask"], torch.full_like(old, 0.5), torch.zeros_like(old))
    row_of_token = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths)
    versions = torch.where(row_of_token == 0, batch.metadata.weight_version - 1, batch.metadata.weight_version).int()
    batch = batch.with_columns(old_logprobs=old, rollout_logprobs=old - shift, weight_version=versions)
    found = to_values(learner.forward_backward(close(batch)))
    share = float(batch.padded("loss_mask")[0].sum() / batch["loss_mask"].sum())
    assert found["off_policy/drift_mean"] == pytest.approx(0.25, abs=1e-5)
    assert found["off_policy/unattributed_mean"] == pytest.approx(0.5 * share, abs=1e-5)
    assert found["off_policy/numerics_mean"] == pytest.approx(0.5 * (1 - share), abs=1e-5)
    assert [found[f"off_policy/abs/age_{age}"] for age in (0, 1)] == pytest.approx([0.5, 0.5], abs=1e-5)
    assert found["off_policy/drift/age_1"] == pytest.approx(0.25, abs=1e-5)


def test_where_one_version_sampled_everything_nothing_is_said_of_ages(folder: Path) -> None:
    found = make_learner(folder).forward_backward(close(make_batch(LENGTHS)))
    assert "off_policy/numerics_mean" in found
    assert not [name for name in found if "age" in name]


def test_where_older_weights_may_sample_the_first_batch_has_age_0(folder: Path) -> None:
    batch = make_batch(LENGTHS)
    batch = dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata, max_staleness=1))
    found = to_values(make_learner(folder).forward_backward(close(batch)))
    assert [name for name in found if "age" in name] == [
        f"off_policy/{name}/age_0" for name in ("abs", "drift", "k1", "kl")
    ]
    assert found["off_policy/abs/age_0"] == pytest.approx(found["off_policy/numerics_abs_mean"])


def without_column(batch: TrainingInputBatch, name: str) -> TrainingInputBatch:
    return dataclasses.replace(batch, token_columns={k: v for k, v in batch.token_columns.items() if k != name})


@pytest.mark.parametrize("loss", ["regular", "gspo", "cispo", "importance_sampling"])
def test_the_engines_log_probabilities_stand_for_those_before_the_update(folder: Path, loss: str) -> None:
    batch = make_batch(LENGTHS)
    learner = make_learner(folder, double=True, algorithm=AlgorithmConfig(policy_loss=loss))
    learner.forward_backward(close(batch.with_columns(old_logprobs=batch["rollout_logprobs"])))
    expected = gradient(learner).clone()

    algorithm = AlgorithmConfig(policy_loss=loss, proximal="behaviour")
    learner = make_learner(folder, double=True, algorithm=algorithm)
    learner._on_policy = True
    found = to_values(learner.forward_backward(close(without_column(batch, "old_logprobs"))))
    torch.testing.assert_close(gradient(learner), expected, rtol=1e-12, atol=1e-14)
    difference = (model_logprobs(folder, batch, 1.0) - batch["rollout_logprobs"])[batch["loss_mask"]]
    assert found["policy/rollout_logprob_diff"] == pytest.approx(float(difference.abs().mean()), rel=1e-9)
    assert found["off_policy/unattributed_mean"] == pytest.approx(float(difference.mean()), rel=1e-9)
    assert found["off_policy/numerics_abs_max"] == found["off_policy/drift_abs_max"] == 0
    versions = torch.full((batch.num_tokens,), batch.metadata.weight_version - 1, dtype=torch.int32)
    stale = without_column(batch.with_columns(weight_version=versions), "old_logprobs")
    found = to_values(learner.forward_backward(close(stale)))
    assert found["off_policy/abs/age_1"] == pytest.approx(float(difference.abs().mean()), rel=1e-9)
    assert "off_policy/drift/age_1" not in found


def test_they_are_missed_by_name(folder: Path) -> None:
    learner = make_learner(folder, algorithm=AlgorithmConfig(proximal="behaviour"))
    with pytest.raises(BatchError, match=r"no column 'rollout_logprobs'"):
        learner.forward_backward(close(without_column(make_batch(LENGTHS), "rollout_logprobs")))


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
@pytest.mark.parametrize("rows_per_micro_batch", [1, 4])
def test_what_the_ledger_says_of_ages_depends_on_no_layout(
    folder: Path, layout: Literal["padded", "packed", "prefix_shared"], rows_per_micro_batch: int
) -> None:
    batch = make_batch(LENGTHS)
    versions = batch.metadata.weight_version - torch.arange(batch.num_tokens).remainder(3).int()
    batch = batch.with_columns(weight_version=versions.int())
    learner = make_learner(folder, double=True, layout=layout, rows_per_micro_batch=rows_per_micro_batch)
    current, mask = model_logprobs(folder, batch, 1.0), batch["loss_mask"]
    found = to_values(learner.forward_backward(close(batch)))
    for age in range(3):
        of_age = mask & (versions == batch.metadata.weight_version - age)
        before = (batch["old_logprobs"] - batch["rollout_logprobs"])[of_age]
        drift = (current - batch["old_logprobs"])[of_age]
        assert found[f"off_policy/abs/age_{age}"] == pytest.approx(float(before.abs().mean()), rel=1e-9)
        assert found[f"off_policy/k1/age_{age}"] == pytest.approx(-float(before.mean()), rel=1e-9)
        assert found[f"off_policy/kl/age_{age}"] == pytest.approx(float((before.exp() - 1 - before).mean()), rel=1e-9)
        assert found[f"off_policy/drift/age_{age}"] == pytest.approx(float(drift.abs().mean()), rel=1e-9)


@pytest.mark.parametrize("rows_per_micro_batch", [1, 4])
def test_the_distance_of_a_kept_cache_is_over_the_step(folder: Path, rows_per_micro_batch: int) -> None:
    """The last trained token of each row is of age 0, behind others; in the first row all are."""
    batch = make_batch(LENGTHS)
    learner = make_learner(folder, double=True, rows_per_micro_batch=rows_per_micro_batch)
    versions = torch.full((batch.num_tokens,), batch.metadata.weight_version - 1)
    last = [int(batch["loss_mask"][:stop].nonzero()[-1]) for stop in batch.row_offsets[1:].tolist()]
    versions[last] += 1
    versions[: last[0]] += 1
    found = to_values(learner.forward_backward(close(batch.with_columns(weight_version=versions.int()))))
    distance = (batch["old_logprobs"] - batch["rollout_logprobs"])[last[1:]].abs()
    assert found["off_policy/in_flight/cache_distance"] == pytest.approx(float(distance.mean()), rel=1e-9)
    assert found["off_policy/in_flight/cache_distance_max"] == pytest.approx(float(distance.max()), rel=1e-9)


def test_the_loss_is_around_the_weights_at_batch_close_and_weighs_what_sampled(folder: Path) -> None:
    """Decoupled PPO: min(w, 2) times the clipped surrogate, with w = proximal / behaviour and current / proximal clipped."""
    batch = make_batch(LENGTHS)
    algorithm = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", weight_high=2.0))
    learner = make_learner(folder, double=True, algorithm=algorithm)
    mask, advantages = batch["loss_mask"], batch["advantages"]
    proximal = model_logprobs(folder, batch, 1.0) + batch["old_logprobs"] + 4.0
    batch = batch.with_columns(old_logprobs=torch.where(mask, proximal, 0.0))
    weight = (proximal - batch["rollout_logprobs"]).exp().clamp(max=2.0)
    ratio = (model_logprobs(folder, batch, 1.0) - proximal).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    metrics = to_values(learner.forward_backward(close(batch)))
    assert metrics["loss/policy"] == pytest.approx(-float((weight * surrogate)[mask].mean()), rel=1e-9)
    assert 0 < metrics["policy/clip_fraction"] < 1


@pytest.mark.parametrize(("proximal", "base"), [("recompute", "old_logprobs"), ("behaviour", "rollout_logprobs")])
def test_the_unbiased_kl_is_weighed_from_the_proximal_policy(
    folder: Path, proximal: Literal["recompute", "behaviour"], base: str
) -> None:
    batch = make_batch(LENGTHS)
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, kl_estimator="k3", kl_bias_correction=True, proximal=proximal)
    metrics = to_values(make_learner(folder, double=True, algorithm=algorithm).forward_backward(close(batch)))
    logprobs, mask = model_logprobs(folder, batch, 1.0), batch["loss_mask"]
    distance = logprobs - batch["ref_logprobs"]
    kl = (logprobs - batch[base]).exp() * (torch.exp(-distance) - 1 + distance)
    assert metrics["loss/kl"] == pytest.approx(float(kl[mask].mean()), rel=1e-9)
