"""What parts read and which arguments they take: the declarations hold, and what a run computes follows from them."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.algorithms import AdvantageInputs, AdvantageOutput, advantage_inputs, estimate_advantages
from skyrl_train.algorithms.losses import PolicyLossInputs, PolicyLossOutput, is_tokenwise, policy_loss, token_kl
from skyrl_train.batch.planner import Forward, RowFacts
from skyrl_train.batch.steps import RowCounts, close_mini_batch
from skyrl_train.config.algorithm.settings import AlgorithmConfig, needs_critic, needs_reference
from skyrl_train.config.derived.learners import old_logprobs_scored
from skyrl_train.config.door.load import load_config
from skyrl_train.config.fields.fields import parts_of
from skyrl_train.config.models.models import CriticConfig, CriticModelConfig, OptimizerConfig
from skyrl_train.config.rules.validate_batch import validate_config
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.errors import BatchError, ConfigError
from skyrl_train.learner import build_optimizer
from skyrl_train.parts import ADVANTAGE_ESTIMATORS, ENGINES, MICRO_BATCH_STRATEGIES, POLICY_LOSSES
from skyrl_train.registry import Seam, reads, split_spec
from skyrl_train.telemetry import Metric, Sum
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers import Observers, RunEvent, StepFacts
from skyrl_train.types import RolloutBatch
from tests.support.advantage_oracles import advantage_inputs_of, random_samples
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model
from tests.support.loss_oracles import loss_with, random_loss_inputs

PARTS = parts_of(Config)
OPTIONAL = ("values", "old_logprobs", "ref_logprobs", "sum_pi_squared", "greedy_rewards", "reward_components")
COMPONENTS = AlgorithmConfig(reward_components={"correct": 1.0, "length": 0.5})


def groups() -> AdvantageInputs:
    return advantage_inputs_of(random_samples(5, binary_rewards=True), step_wise=True)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_an_estimator_computes_the_same_from_the_columns_that_it_declares(name: str) -> None:
    declared = ADVANTAGE_ESTIMATORS.reads(name).columns
    hidden = replace(groups(), **dict.fromkeys(set(OPTIONAL) - declared))
    expected = ADVANTAGE_ESTIMATORS[name](groups(), COMPONENTS)
    assert torch.equal(ADVANTAGE_ESTIMATORS[name](hidden, COMPONENTS).advantages, expected.advantages)
    for column in declared:
        with pytest.raises(BatchError, match=f"needs {column}"):
            ADVANTAGE_ESTIMATORS[name](replace(groups(), **{column: None}), COMPONENTS)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_an_estimator_of_whole_groups_gives_a_prompts_only_sample_nothing(name: str) -> None:
    inputs = groups()
    alone = replace(inputs, prompt_index=inputs.trajectory_index)
    worthless = not ADVANTAGE_ESTIMATORS[name](alone, COMPONENTS).advantages.any()
    assert worthless == ADVANTAGE_ESTIMATORS.reads(name).whole_groups


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_computes_the_same_from_the_columns_that_it_declares(name: str) -> None:
    """`policy_loss` hides the others; a loss that reads one of them gives NaN or fails."""
    inputs = random_loss_inputs(3)
    expected = POLICY_LOSSES[name](inputs, AlgorithmConfig()).token_losses
    assert torch.equal(policy_loss(inputs, AlgorithmConfig(policy_loss=name)).token_losses, expected)
    for column in POLICY_LOSSES.reads(name).columns:
        changed = replace(inputs, **{column: getattr(inputs, column) - 0.5})
        assert not torch.equal(POLICY_LOSSES[name](changed, AlgorithmConfig()).token_losses, expected), column


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_tokenwise_loss_reads_nothing_of_other_tokens(name: str) -> None:
    inputs = random_loss_inputs(3, spread=1.0)
    one_a_row = {
        column: value.flatten().unsqueeze(1) for column, value in vars(inputs).items() if torch.is_tensor(value)
    }
    loss = loss_with(name, {"clip_cov": {"share": 0.3, "low": 0.0}, "kl_cov": {"share": 0.3}})
    whole = loss(inputs, AlgorithmConfig()).token_losses.flatten()
    apart = loss(PolicyLossInputs(**one_a_row), AlgorithmConfig()).token_losses.flatten()
    assert torch.equal(whole, apart) == POLICY_LOSSES.reads(name).tokenwise


@pytest.mark.parametrize("path", sorted(PARTS))
def test_every_built_in_name_is_there_and_needs_no_argument(path: str) -> None:
    for name, builtin in PARTS[path].builtins.items():
        assert callable(PARTS[path][name])
        if PARTS[path].names_elsewhere:  # who looks those up checks their arguments
            continue
        assert builtin.settings or PARTS[path].violations({"_target_": builtin.target}) == []


# Custom parts, as a user's module has them.


@reads("ref_logprobs", "old_logprobs", whole_groups=True)
def nearer_to_reference(inputs: AdvantageInputs, _config: AlgorithmConfig, *, scale: float = 1.0) -> AdvantageOutput:
    assert inputs.values is None, "not declared"
    assert inputs.ref_logprobs is not None
    assert inputs.old_logprobs is not None
    found = torch.where(inputs.loss_mask, scale * (inputs.ref_logprobs - inputs.old_logprobs), 0.0)
    return AdvantageOutput(advantages=found.to(inputs.rewards.dtype), returns=torch.zeros_like(inputs.rewards))


@reads("advantages", "ref_logprobs", "values", tokenwise=True)
def of_everything(inputs: PolicyLossInputs, _config: AlgorithmConfig, *, tau: float) -> PolicyLossOutput:
    assert inputs.rollout_logprobs is None, "not declared"
    assert inputs.ref_logprobs is not None
    assert inputs.values is not None
    losses = inputs.logprobs * (tau * inputs.ref_logprobs + inputs.values - inputs.advantages)
    return PolicyLossOutput(token_losses=torch.where(inputs.loss_mask, losses, 0.0))


@reads("advantages")
def reads_more_than_it_says(inputs: PolicyLossInputs, _config: AlgorithmConfig) -> PolicyLossOutput:
    return PolicyLossOutput(token_losses=torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0))


@reads("advantages", "entropies")
def reads_what_there_is_not(inputs: PolicyLossInputs, _config: AlgorithmConfig) -> PolicyLossOutput:
    return PolicyLossOutput(token_losses=inputs.logprobs)


def in_one_go(rows: RowFacts, *, parts: int = 1) -> list[Forward]:
    return [Forward(part) for part in np.array_split(np.arange(rows.num_rows), parts)]


LOSS = {"_target_": "test_parts:of_everything", "tau": 0.25}
ESTIMATOR = {"_target_": "test_parts.nearer_to_reference", "scale": 3.0}


def test_what_a_run_computes_follows_from_what_custom_parts_read() -> None:
    loss, estimator = AlgorithmConfig(policy_loss=LOSS), AlgorithmConfig(advantage_estimator=ESTIMATOR)
    assert needs_reference(loss)
    assert needs_reference(estimator)
    assert needs_critic(loss)
    assert not needs_critic(estimator)
    assert is_tokenwise(loss)
    several_steps = TrainerConfig(train_batch_size=8, policy_mini_batch_size=4)
    assert old_logprobs_scored(replace(several_steps, algorithm=loss)) == "none"
    assert old_logprobs_scored(replace(several_steps, algorithm=estimator)) == "all"
    one_sample = load_config(
        {"generator": {"n_samples_per_prompt": 1}, "trainer": {"algorithm": {"advantage_estimator": ESTIMATOR}}}
    )
    assert "generator.n_samples_per_prompt" in [violation.field for violation in validate_config(one_sample)]


def test_a_custom_estimator_is_given_the_reference_that_it_declares() -> None:
    batch = make_batch([5, 9, 7, 12]).with_columns(values=torch.zeros(33))
    config = AlgorithmConfig(advantage_estimator=ESTIMATOR)
    found = estimate_advantages(batch, config)["advantages"]
    expected = torch.where(batch["loss_mask"], 3.0 * (batch["ref_logprobs"] - batch["old_logprobs"]), 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert advantage_inputs(batch, config).values is not None, "the batch has them"


def test_a_custom_loss_is_given_the_reference_and_the_values_that_it_declares(tmp_path: Any) -> None:
    batch = make_batch([5, 9, 7, 12])
    batch = batch.with_columns(values=torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64))
    algorithm = AlgorithmConfig(policy_loss=LOSS)
    learner = make_learner(save_tiny_model(tmp_path, tokenizer=True), algorithm=algorithm, double=True)
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64)
    found = learner.forward_backward(mini_batch)["loss/policy"].value
    token_losses = learner.forward(batch) * (0.25 * batch["ref_logprobs"] + batch["values"] - batch["advantages"])
    assert found == pytest.approx(float(token_losses[batch["loss_mask"]].mean()), rel=1e-9)
    with pytest.raises(BatchError, match="no column 'values'"):
        learner.forward_backward(replace(mini_batch, batch=mini_batch.batch.without_columns("values")))


def test_a_loss_that_reads_more_than_it_declares_is_not_given_a_number() -> None:
    losses = policy_loss(
        random_loss_inputs(0), AlgorithmConfig(policy_loss="test_parts:reads_more_than_it_says")
    ).token_losses
    assert losses.isnan().any()


def of_one(inputs: PolicyLossInputs) -> None:
    """A loss that forgets the configuration."""


class Silent:
    """An engine that lacks most of what one does, and generates on the loop's thread."""

    def __init__(self, settings: Any, tokenizer: Any) -> None:
        """As engines are made."""

    def generate(self, request: Any) -> None:
        """Not a coroutine."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("seam", "spec", "field", "told"),
    [
        (
            POLICY_LOSSES,
            {**LOSS, "tua": 1},
            ".tua",
            "is no argument of test_parts:of_everything, which takes tau; got 1. ",
        ),
        (POLICY_LOSSES, {"_target_": "test_parts:of_everything"}, ".tau", "must be given to test_parts:of_everything"),
        (POLICY_LOSSES, {"_target_": "gspo", "tau": 1}, ".tau", "is no argument of gspo, which takes none"),
        (POLICY_LOSSES, "test_parts:reads_what_there_is_not", "", "cannot read entropies; it can read advantages, "),
        (POLICY_LOSSES, "test_parts:LOSS", "", "must name a class or a function; got 'test_parts:LOSS' (dict)"),
        (POLICY_LOSSES, "test_parts:no_such", "", "There is no 'no_such' in test_parts. It has "),
        (POLICY_LOSSES, "no_such_module:loss", "", "No module named 'no_such_module'"),
        (POLICY_LOSSES, "reglar", "", "Did you mean 'regular'?"),
        (MICRO_BATCH_STRATEGIES, {"_target_": "test_parts:in_one_go", "part": 2}, ".part", "Did you mean 'parts'?"),
        (POLICY_LOSSES, "test_parts:of_one", "", "is called with (inputs, config); got test_parts:of_one(inputs)"),
        (
            ENGINES,
            "test_parts:Silent",
            "",
            "must define async generate, lease, load_weights or update; got 'test_parts",
        ),
    ],
)
def test_what_is_wrong_with_a_part_is_named(seam: Seam, spec: Any, field: str, told: str) -> None:
    (violation,) = seam.violations(spec)
    assert violation.field == seam.setting + field
    assert told in str(violation)


def test_a_target_may_be_written_with_dots_and_built_in_names_take_the_idiom_too() -> None:
    assert split_spec(ESTIMATOR) == ("test_parts:nearer_to_reference", {"scale": 3.0})
    assert POLICY_LOSSES.resolve({"_target_": "gspo"}) is POLICY_LOSSES["gspo"]
    assert POLICY_LOSSES.reads("skyrl_train.algorithms.losses.weighted:reinforce") == POLICY_LOSSES.reads("reinforce")


def test_a_part_is_read_from_a_configuration_and_needs_its_target() -> None:
    tree = {"trainer": {"algorithm": {"policy_loss": LOSS}, "micro_batching": {"_target_": "test_parts:in_one_go"}}}
    config = replace(load_config(tree), critic=CriticConfig(model=CriticModelConfig(path="policy")))
    assert config.trainer.algorithm.policy_loss == LOSS
    assert validate_config(config) == []
    with pytest.raises(
        ConfigError, match=r"micro_batching: must name the part as _target_.*micro_batching=\{_target_:"
    ):
        load_config({"trainer": {"micro_batching": {"parts": 2}}})


def test_a_built_in_part_has_its_name_however_it_is_written() -> None:
    target = "skyrl_train.batch.planner.forwards.token_budget"
    for spec in ("token_budget", {"_target_": "token_budget"}, {"_target_": target}, target.replace(".t", ":t")):
        assert load_config({"trainer": {"micro_batching": spec}}).trainer.micro_batching == "token_budget"


def test_a_part_with_settings_of_its_own_takes_no_arguments() -> None:
    config = load_config({"generator": {"backend": {"_target_": "http", "url": "http://127.0.0.1:8000"}}})
    (violation,) = [each for each in validate_config(config) if each.field == "generator.backend"]
    assert str(violation).endswith("takes no arguments with http; got url. Its settings are generator.http")


def test_a_critic_is_asked_for_by_whatever_reads_values() -> None:
    config = Config(trainer=TrainerConfig(algorithm=AlgorithmConfig(policy_loss=LOSS)))
    found = {violation.field: violation.rule for violation in validate_config(config)}
    assert found == {"critic.model.path": "must be given: policy_loss=test_parts:of_everything needs a value model"}


# Further parts that a loss, the loop or the record is made of.


def half_distance(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, scale: float = 0.5) -> torch.Tensor:
    return scale * (logprobs - ref_logprobs).abs()


def summed(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs - ref_logprobs).sum()


def by_prompt(counts: RowCounts, *, factor: float) -> torch.Tensor:
    return torch.full_like(counts.trajectory_tokens, factor / counts.denominators.num_prompts)


def one_weight(counts: RowCounts) -> torch.Tensor:
    return torch.ones(1)


def test_a_custom_kl_is_taken_at_trained_tokens_and_has_their_shape() -> None:
    new, ref, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, torch.nan]]), torch.tensor([[True, False]])
    spec = {"_target_": "test_parts:half_distance", "scale": 3.0}
    assert token_kl(spec, new, ref, mask).tolist() == [[3.0, 0.0]]
    with pytest.raises(BatchError, match=r"the KL from 'test_parts:summed' has shape \[\]"):
        token_kl("test_parts:summed", new, ref, mask)


def test_a_custom_reduction_weighs_rows_and_is_checked() -> None:
    batch = make_batch([5, 9, 7, 12])
    spec = {"_target_": "test_parts:by_prompt", "factor": 0.5}
    closed = close_mini_batch(batch, loss_reduction=spec, max_sequence_length_for_norm=1).batch
    assert closed["loss_weights"][closed["loss_mask"]].unique().tolist() == [0.25]
    with pytest.raises(BatchError, match=r"loss reduction 'test_parts:one_weight' gave \[1\] weights"):
        close_mini_batch(batch, loss_reduction="test_parts:one_weight", max_sequence_length_for_norm=1)


def test_a_custom_optimizer_must_be_one() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    with pytest.raises(ConfigError, match=r"must make a torch.optim.Optimizer; got list from test_parts:no_optimizer"):
        build_optimizer(parameters, OptimizerConfig(name="test_parts:no_optimizer"))


def no_optimizer(groups: Any, config: OptimizerConfig) -> Any:
    return groups


def tokens(facts: StepFacts, *, name: str = "own/rows") -> dict[str, Metric]:
    return {name: Sum(float(facts.batch.num_rows))}


def broken(*_: Any) -> Any:
    raise ZeroDivisionError("no rows")


HEARD: list[RunEvent] = []


def hear(event: RunEvent) -> None:
    HEARD.append(event)
    event.metrics["reward/mean"] = 1.0  # type: ignore[index]


def test_custom_metrics_are_added_and_callbacks_cannot_write() -> None:
    output = StringIO()
    clash = {"_target_": "test_parts:tokens", "name": "reward/mean"}
    parts = ("test_parts:tokens", clash, "test_parts:broken")
    observers = Observers(parts, ("test_parts:hear",), RunConsole(file=output), total_steps=4)
    batch = make_batch([5, 9])
    rollouts = RolloutBatch(prompts=(), trajectories=(), n_samples_per_prompt=1)
    facts = StepFacts(step=3, rollouts=rollouts, batch=batch)
    assert observers.measure(facts, {"reward/mean": 0.5}) == {"reward/mean": 0.5, "own/rows": 2.0}
    observers.tell("step", 3, metrics={"reward/mean": 0.5})
    assert [RunEvent(kind="step", step=3, total_steps=4, metrics={"reward/mean": 0.5})] == HEARD
    said = " ".join(output.getvalue().split())
    assert "there is a metric 'reward/mean' already" in said
    assert "metric test_parts:broken failed at step 3 (ZeroDivisionError: no rows); training goes on" in said
    assert "callback test_parts:hear failed at step 3 (TypeError" in said


def test_a_part_in_a_list_is_named_by_its_place() -> None:
    config = load_config({"trainer": {"callbacks": ["test_parts:hear", {"_target_": "test_parts:hear", "fil": 1}]}})
    (violation,) = validate_config(config)
    assert violation.field == "trainer.callbacks[1].fil"


def test_a_missing_argument_of_a_part_in_a_list_is_written_in_the_list() -> None:
    (violation,) = validate_config(load_config({"trainer": {"metrics": ["test_parts:by_prompt"]}}))
    assert violation.field == "trainer.metrics[0].factor"
    assert violation.remedy == "write {_target_: test_parts:by_prompt, factor: ...}"


def test_settings_that_moved_say_where_to() -> None:
    with pytest.raises(
        ConfigError, match=r"kwargs: is not a setting.*environment.env_class=\{_target_: NAME, KEY: ...\}"
    ):
        load_config({"environment": {"kwargs": {"topk": 3}}})


def test_a_setting_that_got_another_name_is_told_with_its_values():
    with pytest.raises(ConfigError, match=r"use_rollout_logprobs: is not a setting.*proximal=behaviour for true"):
        load_config({"trainer": {"algorithm": {"use_rollout_logprobs": True}}})
