"""How exact a server is, and hence how exactly it is held to what it should answer.

A tolerance is `min(K x measured noise, cap)`. The noise is what the server's own log-probabilities differ by when only the
order, the size or the batch of a request changes, which no arithmetic should feel; the cap is what a server of its precision
may be off by at most. A noise above the cap is a failure of its own (`check_accumulation.py`), not a looser test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from driver import RequestFailed, Run, Session, StatusError, sequence
from numpy.typing import ArrayLike

K = 8.0
EPS = 1e7
LARGE = 16.0  # results travel in float32, whose spacing grows: beyond this a difference counts in proportion
FLOOR = 2.0**-20  # the rounding of a log-probability of up to that
CAPS = {
    "float32": {"forward": 1e-5, "training": 1e-5, "sampling": 1e-5},
    "bfloat16": {"forward": 5e-2, "training": 5e-2, "sampling": 5e-2},
}

_numbers = np.random.default_rng(11)
SEQUENCES = [_numbers.integers(3, 40, size=length).tolist() for length in (9, 17, 5, 12, 2, 8)]
PROBES = [_numbers.integers(3, 40, size=12).tolist() for _ in range(4)]
DATA = [sequence(tokens) for tokens in SEQUENCES]
PROBE_DATA = [sequence(tokens) for tokens in PROBES] + DATA


def probe(run: Run) -> np.ndarray:
    """Log-probabilities by which a model's weights are told apart; training data are among them, so that they move."""
    return run.forward(PROBE_DATA).flat


@dataclass
class Noise:
    """The largest difference seen between log-probabilities that should be equal, by what made them."""

    forward: float
    training: float
    sampling: float
    dtype: str
    rate: float  # what, times the gradient, moves a log-probability by a percent or more

    def tolerance(self, kind: str = "forward") -> float:
        return float(min(K * max(getattr(self, kind), FLOOR), CAPS[self.dtype][kind]))

    def push(self, times: float = 1.0) -> dict[str, float]:
        """AdamW's parameters of a step that is the gradient itself, times a rate: eps far above it outweighs its root."""
        return {"learning_rate": self.rate * times * EPS, "eps": EPS}

    def same(self, left: ArrayLike, right: ArrayLike, kind: str = "training", scale: float = 1.0) -> None:
        """Raise AssertionError unless the two are equal within the tolerance, `scale` times."""
        one, other = np.asarray(left, float), np.asarray(right, float)
        assert one.shape == other.shape, f"shapes {one.shape} and {other.shape} differ"
        apart = distance(one, other)
        allowed = self.tolerance(kind) * scale
        assert apart <= allowed, f"they differ by {apart:.3g}; {allowed:.3g} is allowed ({kind}, x{scale:g})"

    def alike(self, probes: Iterable[np.ndarray], kind: str = "training") -> None:
        """Raise AssertionError unless each of several is the same as the first."""
        first, *others = probes
        assert others, "there is nothing to compare"
        for other in others:
            self.same(first, other, kind)

    def differ(self, left: ArrayLike, right: ArrayLike, kind: str = "training") -> None:
        """Raise AssertionError unless the two are further apart than any tolerance could hide."""
        apart = float(np.abs(np.asarray(left, float) - np.asarray(right, float)).max(initial=0.0))
        least = 20 * self.tolerance(kind)
        assert apart >= least, f"they differ by no more than {apart:.3g}, of which {least:.3g} would show an effect"


def measure(session: Session, dtype: str, lr: float) -> Noise:
    """The noise of a server, from a dozen requests."""
    first, second = session.model(), session.model()
    whole = first.forward(DATA).logprobs
    seen = [first.forward(DATA).logprobs, second.forward(DATA).logprobs]
    seen.append([first.forward([each]).logprobs[0] for each in DATA])
    seen.append(first.forward(DATA[::-1]).logprobs[::-1])
    forward = max(spread(whole, other) for other in seen)
    for run, data in ((first, DATA), (second, DATA[::-1])):
        for _ in range(2):
            run.forward_backward(data)
            run.step(learning_rate=lr)
    training = spread([probe(first)], [probe(second)])
    # Both are seen beside forward, whose rounding they have at least: a server that adds in one order, whatever the order of
    # arrival, trains without noise, and still each weight that differs in its last bit shows as much as forward's own.
    training, sampling = max(training, forward), max(sampling_noise(first), forward)
    return Noise(forward, training, sampling, dtype, visible_rate(session))


def sampling_noise(run: Run) -> float:
    """How far a sampler is from forward on the same tokens; infinite where it does not tell."""
    sampler, worst = run.snapshot(), 0.0
    for tokens, trained in zip(PROBES, run.forward([sequence(each) for each in PROBES]).logprobs):
        try:
            answer = sampler.sample(tokens, {"max_tokens": 1, "temperature": 0.0}, prompt_logprobs=True)
        except (StatusError, RequestFailed):
            return math.inf
        scored = np.array(answer.get("prompt_logprobs", [])[1:], float)
        if scored.shape != trained.shape:
            return math.inf
        worst = max(worst, spread([trained], [scored]))
    return worst


def visible_rate(session: Session) -> float:
    """The smallest rate of a few whose step in proportion to the gradient moves some log-probability by 0.02."""
    for rate in 4.0 ** np.arange(-7, 6):
        run = session.model()
        before = probe(run)
        run.forward_backward(DATA)
        run.step(learning_rate=rate * EPS, eps=EPS)
        if spread([before], [probe(run)]) >= 0.02:
            return float(rate)
    raise AssertionError("no step in proportion to the gradient moves the model: does it train?")


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays of one shape, of numbers beyond LARGE in proportion."""
    return float((np.abs(one - other) / np.maximum(1.0, np.abs(other) / LARGE)).max(initial=0.0))


def spread(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(distance(one, other) for one, other in zip(left, right))
