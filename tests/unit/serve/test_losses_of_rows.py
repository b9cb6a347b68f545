"""A loss for each row, and adapters side by side, against formulas in float64 on the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train import load_config
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.errors import BatchError
from skyrl_train.learner import AdamWStep, AdapterLearners, PolicyLearner

pytest.importorskip("peft")

from skyrl_train.model import load_causal_lm
from skyrl_train.model.lora import adapter_tensors, add_adapter, attach_adapters
from skyrl_train.serve.examples import loss_of, rows_of
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import Datum, ForwardBackward
from tests.support.learner_cases import make_double

Formula = Callable[..., torch.Tensor]
FORMULAS: dict[str, Formula] = {
    "cross_entropy": lambda new, old, a, w: -(w * new),
    "importance_sampling": lambda new, old, a, w: -w * (new - old).exp() * a,
    "ppo": lambda new, old, a, w: -w * torch.minimum((new - old).exp() * a, (new - old).exp().clamp(0.8, 1.2) * a),
    "cispo": lambda new, old, a, w: -w * (new - old).exp().clamp(0.0, 4.0).detach() * new * a,
    "dro": lambda new, old, a, w: -w * (new * a - 0.5 * 0.05 * (new - old) ** 2),
}
"""As tinker-docs.thinkingmachines.ai/tinker/losses states them, with their defaults; the weight of each token in front."""


@pytest.fixture(scope="module")
def learners() -> AdapterLearners:
    """In float64, with two adapters that are not 0."""
    config = load_config("generator.sampling.temperature=1.0")
    made = AdapterLearners(learner_settings(config, "policy"))
    for name, rank in (("one", 4), ("two", 3)):
        lora = LoraConfig(rank=rank, targets=made.targets(attention=True, mlp=name == "one"))
        made.create(name, lora, seed=rank, optimizer=OptimizerConfig(name="adamw"))
    attach_adapters(made.model, ["one", "two"])
    make_double(made.model)
    torch.manual_seed(0)
    for key, parameter in made.model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.02)
    return made


@pytest.fixture(scope="module")
def plain(learners: AdapterLearners) -> Any:
    """The same model as transformers computes it, with copies of the first adapter."""
    config = load_config("generator.sampling.temperature=1.0")
    model = load_causal_lm(config.model, "cpu")
    add_adapter(model, LoraConfig(rank=4, targets=learners.targets(attention=True, mlp=True)), seed=9)
    make_double(model)
    own = adapter_tensors(model)
    with torch.no_grad():
        for key, tensor in learners.tensors("one").items():
            own[key].copy_(tensor)
    return model


def learner(learners: AdapterLearners, name: str = "one") -> PolicyLearner:
    found: PolicyLearner = learners._learners[name]
    found.engine.zero_grad()
    return found


def examples(loss: str, *, seed: int = 0, model: Any = None) -> list[Datum]:
    """Next tokens as targets but for the last example, whose targets are others; weights of 0 among the rest. With `model`
    ratios lie on both sides of all edges, and some are 1, as in a first step."""
    draw = np.random.default_rng(seed)
    made = []
    for number, size in enumerate((5, 1, 8, 4)):
        tokens = draw.integers(3, 200, size)
        targets = draw.integers(3, 200, size) if number == 3 else np.append(tokens[1:], draw.integers(3, 200))
        inputs: dict[str, Any] = {"target_tokens": targets}
        inputs["weights"] = (draw.normal(size=size) * draw.integers(0, 2, size)).astype(np.float32)
        if loss != "cross_entropy":
            inputs["logprobs"] = draw.normal(-5, 1, size).astype(np.float32)
            if model is not None:
                now = oracle(model, [Datum(tokens=tokens, inputs=inputs)], "cross_entropy")[0][0].detach().numpy()
                inputs["logprobs"] = (now + draw.choice([-2.0, -0.3, -0.1, 0.0, 0.1, 0.3], size)).astype(np.float32)
            inputs["advantages"] = draw.normal(size=size).astype(np.float32)
        made.append(Datum(tokens=tokens, inputs=inputs))
    return made


def asked(data: list[Datum], loss: str, *, backward: bool = True, **config: float) -> ForwardBackward:
    return ForwardBackward(data=data, loss=loss, config=config, backward=backward)


def oracle(model: Any, data: list[Datum], loss: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities and losses of each example's targets, by whole logits."""
    logprobs, losses = [], []
    for each in data:
        logits = model(input_ids=torch.from_numpy(each.tokens)[None]).logits[0]
        targets = torch.from_numpy(each.inputs["target_tokens"])
        new = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
        given = {name: torch.from_numpy(values.astype(np.float64)) for name, values in each.inputs.items()}
        old, a = given.get("logprobs", torch.zeros_like(new)), given.get("advantages", torch.zeros_like(new))
        logprobs.append(new)
        losses.append(FORMULAS[loss](new, old, a, given["weights"]))
    return logprobs, losses


@pytest.mark.parametrize("loss", FORMULAS)
def test_losses_outputs_and_gradients_are_those_of_the_public_formula(
    learners: AdapterLearners, plain: Any, loss: str
) -> None:
    data = examples(loss, model=plain)
    made = rows_of(asked(data, loss), vocabulary=492, max_length=64)
    assert made.batch is not None
    batch = made.batch.with_columns(**{name: made.batch[name].double() for name in ("old_logprobs", "advantages")})
    trained = learner(learners)
    found = trained.forward_losses(batch, [loss_of(loss, {})], backward=True)
    gradient = {key: each.grad.clone() for key, each in trained.engine.parameters.items() if each.grad is not None}
    plain.zero_grad()
    logprobs, losses = oracle(plain, data, loss)
    torch.stack([each.sum() for each in losses]).sum().backward()
    for output, expected in zip(made.spread(found.logprobs), logprobs):
        np.testing.assert_allclose(output, expected.detach(), rtol=1e-6, atol=1e-6)
    for output, expected in zip(made.spread(found.losses), losses):
        np.testing.assert_allclose(output, expected.detach(), rtol=1e-6, atol=1e-6)
    assert float(found.losses.sum()) == pytest.approx(
        float(sum(each.detach().sum() for each in losses)), rel=1e-9, abs=1e-9
    )
    assert gradient
    for key, each in adapter_tensors(plain).items():
        assert each.grad is not None
        torch.testing.assert_close(gradient[key], each.grad, rtol=1e-8, atol=1e-10)


def test_rows_with_losses_of_their_own_are_the_sum_of_passes_with_one(learners: AdapterLearners) -> None:
    first, second = (
        rows_of(asked(examples(n, seed=1), n), vocabulary=492, max_length=64).batch for n in ("ppo", "dro")
    )
    assert first is not None
    assert second is not None
    trained = learner(learners)
    losses = [loss_of("ppo", {}), loss_of("dro", {})]
    apart = [trained.forward_losses(each, [loss], backward=True) for each, loss in zip((first, second), losses)]
    expected = {key: each.grad.clone() for key, each in trained.engine.parameters.items() if each.grad is not None}
    trained.engine.zero_grad()
    number = torch.arange(first.num_rows + second.num_rows, dtype=torch.int32)
    joined = (
        type(first)
        .cat([first, second])
        .with_columns(
            trajectory_index=number,
            prompt_index=number,
            loss_index=torch.tensor([0] * first.num_rows + [1] * second.num_rows, dtype=torch.int32),
        )
    )
    found = trained.forward_losses(joined, losses, backward=True)
    torch.testing.assert_close(found.losses, torch.cat([each.losses for each in apart]), rtol=1e-9, atol=1e-9)
    for key, gradient in expected.items():
        torch.testing.assert_close(trained.engine.parameters[key].grad, gradient, rtol=1e-8, atol=1e-10)


def test_a_forward_gives_what_a_pass_gives_and_leaves_no_gradient(learners: AdapterLearners) -> None:
    batch = rows_of(asked(examples("ppo"), "ppo"), vocabulary=492, max_length=64).batch
    assert batch is not None
    trained = learner(learners)
    forward = trained.forward_losses(batch, [loss_of("ppo", {})], backward=False)
    assert all(each.grad is None for each in trained.engine.parameters.values())
    both = trained.forward_losses(batch, [loss_of("ppo", {})], backward=True)
    torch.testing.assert_close(forward.logprobs.double(), both.logprobs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(forward.losses.double(), both.losses, rtol=1e-9, atol=1e-9)


def test_a_step_of_one_adapter_leaves_the_other_and_its_gradient(learners: AdapterLearners) -> None:
    batch = rows_of(asked(examples("ppo"), "ppo"), vocabulary=492, max_length=64).batch
    assert batch is not None
    one, two = learner(learners, "one"), learner(learners, "two")
    loss = [loss_of("ppo", {})]
    two.forward_losses(batch, loss, backward=True)
    before = {key: (each.detach().clone(), each.grad.clone()) for key, each in two.engine.parameters.items()}
    one.forward_losses(batch, loss, backward=True)
    one.optim_step(AdamWStep(lr=0.1, betas=(0.9, 0.95), eps=1e-12))
    for key, (value, gradient) in before.items():
        assert torch.equal(two.engine.parameters[key], value)
        assert torch.equal(two.engine.parameters[key].grad, gradient)
    learners.model.zero_grad()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_adamw_with_the_settings_of_the_step(learners: AdapterLearners, clip: float) -> None:
    batch = rows_of(asked(examples("dro"), "dro"), vocabulary=492, max_length=64).batch
    assert batch is not None
    trained = learner(learners, "two")
    trained.engine.optimizer.state.clear()
    parameters = list(trained.engine.parameters.values())
    first, second = [each.detach().clone() for each in parameters], [torch.zeros_like(each) for each in parameters]
    squares = [torch.zeros_like(each) for each in parameters]
    for step, (lr, decay) in enumerate(((0.01, 0.1), (0.003, 0.0)), start=1):
        trained.forward_losses(batch, [loss_of("dro", {})], backward=True)
        gradients = [each.grad.clone() for each in parameters if each.grad is not None]
        norm = torch.sqrt(sum((each**2).sum() for each in gradients))  # type: ignore[arg-type]
        if clip:
            gradients = [each * min(1.0, clip / float(norm)) for each in gradients]
        settings = AdamWStep(lr=lr, betas=(0.8, 0.95), eps=1e-12, weight_decay=decay, max_grad_norm=clip)
        trained.optim_step(settings)
        for i, gradient in enumerate(gradients):
            second[i] = 0.8 * second[i] + 0.2 * gradient
            squares[i] = 0.95 * squares[i] + 0.05 * gradient**2
            update = (second[i] / (1 - 0.8**step)) / ((squares[i] / (1 - 0.95**step)).sqrt() + 1e-12)
            first[i] = first[i] * (1 - lr * decay) - lr * update
            torch.testing.assert_close(parameters[i].detach(), first[i], rtol=1e-5, atol=1e-9)


ONES = {"weights": [1.0, 1.0, 1.0]}


def weighing_one(targets: Any) -> dict[str, Any]:
    """The inputs of cross-entropy with a weight of 1 for each target."""
    return {"target_tokens": targets, "weights": np.ones(targets.shape, np.float32)}


def test_a_pass_without_examples_is_refused() -> None:
    with pytest.raises(Refused, match="no example in the pass"):
        rows_of(asked([], "cross_entropy"), vocabulary=10, max_length=64)


def test_targets_that_all_weigh_nothing_are_computed_all_the_same() -> None:
    inputs = {"target_tokens": np.array([[5, 6], [7, 0]]), "weights": np.zeros((2, 2), np.float32)}
    made = rows_of(
        asked([Datum(tokens=np.array([1, 2]), inputs=inputs)], "cross_entropy"), vocabulary=10, max_length=64
    )
    assert made.targets.tolist() == [0, 1, 2, 3]


def test_rows_are_those_of_the_worked_example() -> None:
    data = [Datum(tokens=np.array([1, 2, 3]), inputs=weighing_one(np.array([2, 9, 4])))]
    made = rows_of(asked(data, "cross_entropy"), vocabulary=10, max_length=64)
    assert made.batch is not None
    assert made.batch["input_ids"].tolist() == [1, 2, 3, 4, 1, 2, 9]
    assert made.batch["loss_mask"].tolist() == [False, True, False, True, False, False, True]
    assert made.targets.tolist() == [0, 2, 1]


def test_several_targets_at_a_position_are_rows_of_those_that_weigh_something() -> None:
    inputs = {"target_tokens": np.array([[5, 6], [7, 0]]), "weights": np.array([[1, 2], [3, 0]], np.float32)}
    made = rows_of(
        asked([Datum(tokens=np.array([1, 2]), inputs=inputs)], "cross_entropy"), vocabulary=10, max_length=64
    )
    assert made.batch is not None
    assert made.batch["input_ids"].tolist() == [1, 5, 1, 6, 1, 2, 7]
    assert made.shapes == [(2, 2)]
    assert made.targets.tolist() == [0, 1, 2]


def test_examples_without_tokens_have_outputs_without_numbers() -> None:
    empty = Datum(tokens=np.zeros(0, np.int64), inputs=weighing_one(np.zeros(0, np.int64)))
    made = rows_of(asked([empty, empty], "cross_entropy"), vocabulary=10, max_length=64)
    assert made.batch is None
    assert [each.shape for each in made.spread(torch.zeros(0))] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("stable_reinforce", {}, "no public formula. Take importance_sampling"),
        ("gspo", {}, "no public formula"),
        ("custom", {}, "nothing that a client sends is executed"),
        ("tune_in", {}, "none of cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("ppo", {"clip_low": 0.1}, "ppo takes clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "at most 1"),
        ("cispo", {"clip_high_threshold": float("nan")}, "numbers from 0 on"),
        ("dro", {"beta": "1"}, "numbers from 0 on"),
        ("cross_entropy", {"beta": 1.0}, "takes nothing"),
    ],
)
def test_losses_that_are_not_served_are_refused_by_name(name: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        loss_of(name, config)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"target_tokens": [1, 2], "weights": [1.0, 1.0]}, "one for each of 3 tokens"),
        ({"target_tokens": [1, 2, 99], **ONES}, "token ids are from 0 to 9"),
        ({"target_tokens": [1, 2, -1], **ONES}, "token ids are from 0 to 9"),
        ({"target_tokens": [1.0, 2.0, 3.0], **ONES}, "whole numbers"),
        (ONES, "needs 'target_tokens'"),
        ({"target_tokens": [1, 2, 3]}, "needs 'weights'"),
        ({"target_tokens": [1, 2, 3], "weights": [1.0, 1.0]}, r"weights has the shape \[2\]"),
        ({"target_tokens": [1, 2, 3], "weights": [1.0, float("nan"), 1.0]}, "weights has a value that is not finite"),
        ({"target_tokens": [1, 2, 3], "mask": [1.0, 1.0, 1.0], **ONES}, "does not read 'mask'"),
    ],
)
def test_examples_that_cannot_be_computed_name_what_is_wrong(inputs: dict[str, list[float]], says: str) -> None:
    arrays = {
        name: np.asarray(values, np.int64 if all(type(each) is int for each in values) else np.float32)
        for name, values in inputs.items()
    }
    good = Datum(tokens=np.array([1, 2]), inputs=weighing_one(np.array([2, 3])))
    bad = Datum(tokens=np.array([1, 2, 3]), inputs=arrays)
    with pytest.raises(Refused, match=f"example 1: .*{says}"):
        rows_of(asked([good, bad], "cross_entropy"), vocabulary=10, max_length=64)


@pytest.mark.slow
def test_a_row_beyond_the_context_and_too_many_tokens_are_refused() -> None:
    long = Datum(tokens=np.arange(1, 9), inputs=weighing_one(np.arange(2, 10)))
    with pytest.raises(Refused, match="context length of 8"):
        rows_of(asked([long], "cross_entropy"), vocabulary=10, max_length=8)
    wide = np.tile(np.arange(3000), (3000, 1))
    inputs = {"target_tokens": wide, "weights": np.ones(wide.shape, np.float32)}
    with pytest.raises(BatchError, match="give fewer at once"):
        rows_of(
            asked([Datum(tokens=np.arange(3000), inputs=inputs)], "cross_entropy"), vocabulary=4000, max_length=4000
        )
