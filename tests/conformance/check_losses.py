"""Losses: values by the formula on the returned log-probabilities, gradients by the derivative of that formula.

The formulas are those of the public documentation (tinker-docs.thinkingmachines.ai, "Loss functions"), written here once
more in float64. A gradient is compared through the linear loss that the SDK's own custom losses use: cross-entropy with the
weights `-dL/dlogp` has the gradient of any loss L at the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Output, Run, Session, datum, sequence
from expect import refused
from measure import DATA, SEQUENCES, Noise, probe
from wire import Json

LOSSES = ["importance_sampling", "ppo", "cispo", "dro"]
TIGHT = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
WIDE = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
CONFIGS: dict[str, list[Json | None]] = {
    "importance_sampling": [None],
    "ppo": [None, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, WIDE],
    "cispo": [TIGHT, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, WIDE],
    "dro": [{"beta": 0.05}, {"beta": 0.7}],
}
CASES = [(loss, index) for loss in LOSSES for index in range(len(CONFIGS[loss]))]


def value_and_slope(loss: str, config: Json | None, new: np.ndarray, old: np.ndarray, advantages: np.ndarray) -> Any:
    """Each token's loss and its derivative by the log-probability."""
    given, ratio = config or {}, np.exp(new - old)
    if loss == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    if loss == "dro":
        distance = new - old
        value = -(new * advantages - 0.5 * given["beta"] * distance**2)
        return value, -(advantages - given["beta"] * distance)
    cut = np.clip(ratio, given.get("clip_low_threshold", 0.8), given.get("clip_high_threshold", 1.2))
    if loss == "cispo":
        return -cut * new * advantages, -cut * advantages
    value = -np.minimum(ratio * advantages, cut * advantages)
    return value, np.where(ratio * advantages <= cut * advantages, -ratio * advantages, 0.0)


def made(run: Run) -> tuple[list[Json], list[np.ndarray], list[np.ndarray]]:
    """Datums whose old log-probabilities lie below, at and above the model's, with advantages of both signs and of 0."""
    numbers = np.random.default_rng(3)
    new = run.forward(DATA).logprobs
    shifts = [np.resize([0.0, 0.4, -0.4, 0.15, -0.15, 0.8, -0.8], len(each)) for each in new]
    old = [np.float32(each - shift).astype(float) for each, shift in zip(new, shifts)]
    advantages = [np.float32(numbers.choice([-1.5, -0.5, 0.0, 0.7, 2.0], size=len(each))).astype(float) for each in new]
    data = [
        datum(each[:-1], each[1:], logprobs=one, advantages=two) for each, one, two in zip(SEQUENCES, old, advantages)
    ]
    return data, old, advantages


def uniform(run: Run, shift: float, advantage: float) -> list[Json]:
    """Datums whose every probability ratio is `exp(shift)` and whose every advantage is one."""
    new = run.forward(DATA).logprobs
    return [
        datum(each[:-1], each[1:], logprobs=one - shift, advantages=[advantage] * len(one))
        for each, one in zip(SEQUENCES, new)
    ]


def pushed(session: Session, noise: Noise, data: list[Json], loss: str, config: Json | None = None) -> np.ndarray:
    """The probe of a new model after one pass and a step in proportion to its gradient."""
    run = session.model()
    run.forward_backward(data, loss, config)
    run.step(**noise.push())
    return probe(run)


def equal_sum(output: Output, expected: float, noise: Noise, size: float) -> None:
    apart, allowed = abs(output.loss - expected), noise.tolerance() * size
    assert apart <= allowed, f"loss:sum is {output.loss}, the formula says {expected}; {allowed:.3g} apart is allowed"


def check_cross_entropy_value(run: Run, noise: Noise) -> None:
    """The loss of cross_entropy is the weighted sum of the negative log-probabilities that are returned with it."""
    numbers = np.random.default_rng(5)
    weights = [numbers.uniform(-1, 2, size=len(each) - 1).astype(np.float32) for each in SEQUENCES]
    output = run.forward_backward([sequence(each, one.tolist()) for each, one in zip(SEQUENCES, weights)])
    expected = -sum(float((one * new).sum()) for one, new in zip(weights, output.logprobs))
    equal_sum(output, expected, noise, sum(float(np.abs(one).sum()) for one in weights))


@pytest.mark.parametrize(("loss", "index"), CASES)
def check_value(run: Run, noise: Noise, loss: str, index: int) -> None:
    """The loss of {loss} (settings {index}) is the formula's on the log-probabilities that are returned with it."""
    data, old, advantages = made(run)
    config = CONFIGS[loss][index]
    output = run.forward_backward(data, loss, config)
    parts = [value_and_slope(loss, config, *each)[0] for each in zip(output.logprobs, old, advantages)]
    size = sum(float(np.abs(each).sum()) + len(each) for each in parts)
    equal_sum(output, sum(float(each.sum()) for each in parts), noise, size)


@pytest.mark.parametrize(("loss", "index"), CASES)
def check_gradient(session: Session, noise: Noise, loss: str, index: int) -> None:
    """The gradient of {loss} (settings {index}) is the derivative of the formula: clipped tokens pull nothing, others do."""
    data, old, advantages = made(session.model())
    config = CONFIGS[loss][index]
    new = session.model().forward(data, loss, config).logprobs
    slopes = [value_and_slope(loss, config, *each)[1] for each in zip(new, old, advantages)]
    linear = [sequence(each, list(-slope)) for each, slope in zip(SEQUENCES, slopes)]
    moved = pushed(session, noise, data, loss, config)
    noise.same(moved, pushed(session, noise, linear, "cross_entropy"), scale=4)
    noise.differ(moved, probe(session.model()))


@pytest.mark.parametrize("loss", LOSSES)
def check_logprobs_are_the_models(run: Run, noise: Noise, loss: str) -> None:
    """The log-probabilities that {loss} returns are those of forward, not the ones that were sent."""
    data, _, _ = made(run)
    noise.same(run.forward_backward(data, loss, CONFIGS[loss][0]).flat, run.forward(DATA).flat, "forward")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def check_sign(session: Session, noise: Noise, loss: str, advantage: float) -> None:
    """By {loss} an advantage of {advantage} moves the probability of the tokens the way of its sign."""
    before = session.model()
    run = session.model()
    run.forward_backward(uniform(run, 0.0, advantage), loss, CONFIGS[loss][0])
    run.step(**noise.push())
    change = float((run.forward(DATA).flat - before.forward(DATA).flat).sum())
    assert change * advantage > 20 * noise.tolerance(), change


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def check_advantage_of_zero(session: Session, noise: Noise, loss: str) -> None:
    """By {loss} tokens with an advantage of 0 pull nothing."""
    noise.same(
        pushed(session, noise, uniform(session.model(), 0.1, 0.0), loss, CONFIGS[loss][0]), probe(session.model())
    )


@pytest.mark.parametrize(
    ("shift", "advantage", "moves"),
    [
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (-0.5, -1.0, False),
        (-0.5, 1.0, True),
        (0.1, 1.0, True),
        (-0.1, -1.0, True),
    ],
)
def check_ppo_edges(session: Session, noise: Noise, shift: float, advantage: float, moves: bool) -> None:
    """By ppo a ratio of exp({shift}) with an advantage of {advantage} moves the weights: {moves}."""
    moved = pushed(session, noise, uniform(session.model(), shift, advantage), "ppo")
    (noise.differ if moves else noise.same)(moved, probe(session.model()))


@pytest.mark.parametrize("shift", [0.5, -0.5])
def check_cispo_never_stops(session: Session, noise: Noise, shift: float) -> None:
    """By cispo a ratio of exp({shift}), beyond the threshold, still pulls, by the threshold."""
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    moved = pushed(session, noise, uniform(session.model(), shift, 1.0), "cispo", config)
    expected = [sequence(each, 1.2 if shift > 0 else 0.8) for each in SEQUENCES]
    noise.same(moved, pushed(session, noise, expected, "cross_entropy"), scale=2)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def check_thresholds_are_ratios(run: Run, noise: Noise, loss: str) -> None:
    """The thresholds of {loss} are ratios themselves, not distances from 1."""
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
    output = run.forward_backward(uniform(run, 0.5, 1.0), loss, config)
    count = len(output.flat)
    expected = -1.3 * (count if loss == "ppo" else float(output.flat.sum()))
    equal_sum(output, expected, noise, 10 * count)


def check_ppo_on_policy(session: Session, noise: Noise) -> None:
    """At a ratio of exactly 1, where every first step stands, ppo pulls as importance_sampling does."""
    data = uniform(session.model(), 0.0, 1.0)
    moved = pushed(session, noise, data, "ppo")
    noise.same(moved, pushed(session, noise, data, "importance_sampling"), scale=2)
    noise.differ(moved, probe(session.model()))


def check_importance_sampling_on_policy(session: Session, noise: Noise) -> None:
    """At a ratio of 1 importance_sampling pulls as cross-entropy does with the advantages for weights."""
    data = uniform(session.model(), 0.0, 1.0)
    noise.same(
        pushed(session, noise, data, "importance_sampling"), pushed(session, noise, DATA, "cross_entropy"), scale=2
    )


def check_negative_weights(session: Session, noise: Noise) -> None:
    """A negative weight of cross_entropy pushes a token away, as far as the positive one pulls it."""
    base = probe(session.model())
    up, down = (
        pushed(session, noise, [sequence(each, weight) for each in SEQUENCES], "cross_entropy")
        for weight in (1.0, -1.0)
    )
    noise.differ(up, down)
    assert float((down - base).sum()) < 0 < float((up - base).sum())


def check_weights_of_some_tokens(session: Session, noise: Noise) -> None:
    """A token of weight 0 pulls nothing, whatever it is."""
    weights = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    tokens = SEQUENCES[0]
    targets = [tokens[place + 1] if weight else 3 for place, weight in enumerate(weights)]
    masked = datum(tokens[:-1], targets, weights=weights)
    noise.same(
        pushed(session, noise, [masked], "cross_entropy"),
        pushed(session, noise, [sequence(tokens, weights)], "cross_entropy"),
    )


def check_targets_are_free(run: Run, noise: Noise) -> None:
    """Targets need not be the next tokens: each position's log-probability is of the target that is named."""
    tokens = SEQUENCES[1][:-1]
    one, two = (
        run.forward([datum(tokens, [token] * len(tokens), weights=[1.0] * len(tokens))]).flat for token in (5, 9)
    )
    mixed = run.forward([datum(tokens, [5, 9] * (len(tokens) // 2), weights=[1.0] * len(tokens))]).flat
    noise.same(mixed, np.where(np.arange(len(tokens)) % 2 == 0, one, two), "forward")


def check_future_tokens_do_not_matter(run: Run, noise: Noise) -> None:
    """A log-probability depends on the tokens before it alone."""
    tokens = SEQUENCES[1]
    changed = [*tokens[:8], *[7] * (len(tokens) - 8)]
    whole, cut = (run.forward([sequence(each)]).flat for each in (tokens, changed))
    noise.same(whole[:7], cut[:7], "forward")
    noise.differ(whole[8:], cut[8:])


def check_logprobs_are_normal(run: Run, noise: Noise) -> None:
    """Log-probabilities are finite and not above 0."""
    values = run.forward(DATA).flat
    assert np.isfinite(values).all()
    assert values.max() <= noise.tolerance()


def check_forward_tells_the_loss(run: Run, noise: Noise) -> None:
    """A pass with forward_only tells the loss, too."""
    assert abs(run.forward(DATA).loss - run.forward_backward(DATA).loss) <= noise.tolerance() * 60


@pytest.mark.parametrize("loss", ["no_such_loss", "custom"])
def check_unknown_loss(run: Run, loss: str) -> None:
    """The loss '{loss}' without what it needs is refused by name."""
    assert loss in refused(lambda: run.forward_backward(DATA, loss))


def check_stable_reinforce(run: Run) -> None:
    """stable_reinforce, which has no public formula, is refused by name where its stability information is missing."""
    data, _, _ = made(run)
    assert "stable_reinforce" in refused(lambda: run.forward_backward(data, "stable_reinforce"))


@pytest.mark.full(needs="loss:gspo")
def check_gspo_sign(session: Session, noise: Noise) -> None:
    """By gspo a positive advantage makes the tokens more probable."""
    run = session.model()
    before = run.forward(DATA).flat
    run.forward_backward(uniform(run, 0.0, 1.0), "gspo")
    run.step(**noise.push())
    assert float((run.forward(DATA).flat - before).sum()) > 20 * noise.tolerance()
