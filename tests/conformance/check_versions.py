"""Versions: a sampler has the weights of the moment of its snapshot, for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Run, Sampler, Session
from measure import DATA, PROBES, Noise

PROMPT = PROBES[0]


def scores(sampler: Sampler) -> np.ndarray:
    """What a sampler gives the tokens of a prompt: two samplers with the same weights agree on it."""
    return np.array(sampler.sample(PROMPT, {"max_tokens": 1}, prompt_logprobs=True)["prompt_logprobs"][1:])


def train(run: Run, lr: float, steps: int = 1) -> Run:
    for _ in range(steps):
        run.forward_backward(DATA)
        run.step(learning_rate=lr)
    return run


def taken(run: Run, named: bool, name: str) -> Sampler:
    return run.session.sampler(run.save_for_sampler(name)) if named else run.snapshot()


@pytest.mark.parametrize("named", [True, False])
def check_snapshot_stays(session: Session, noise: Noise, lr: float, named: bool) -> None:
    """A snapshot (named: {named}) answers the same before and after the model learns on."""
    run = train(session.model(), lr)
    sampler = taken(run, named, "stays")
    before = scores(sampler)
    train(run, lr, 2)
    noise.same(scores(sampler), before, "sampling")


@pytest.mark.parametrize("named", [True, False])
def check_next_snapshot_is_newer(session: Session, noise: Noise, lr: float, named: bool) -> None:
    """The next snapshot (named: {named}) has what the model learnt since the one before."""
    run = train(session.model(), lr)
    first = scores(taken(run, named, "first"))
    train(run, lr)
    noise.differ(scores(taken(run, named, "second")), first, "sampling")


def check_named_and_unnamed_agree(session: Session, noise: Noise, lr: float) -> None:
    """A named and an unnamed snapshot of the same moment are the same."""
    run = train(session.model(), lr)
    noise.same(scores(taken(run, True, "same")), scores(taken(run, False, "")), "sampling")


def check_snapshot_has_the_steps_before_it(session: Session, noise: Noise, lr: float) -> None:
    """A snapshot that is asked for before the step ahead of it has run has that step."""
    run = session.model()
    promises = [run.submit_pass(DATA), run.submit_step(learning_rate=lr)]
    sampler = run.snapshot()
    for promise in promises:
        session.server.wait(promise)
    noise.same(scores(sampler), scores(train(session.model(), lr).snapshot()), "sampling")


def check_snapshot_lacks_what_comes_after(session: Session, noise: Noise, lr: float) -> None:
    """A snapshot lacks the step that was asked for right after it."""
    run = train(session.model(), lr)
    given: Any = {"sampling_session_seq_id": 8000, "type": "save_weights_for_sampler"}
    promise = run.submit("save_weights_for_sampler", given)
    rest = [run.submit_pass(DATA), run.submit_step(learning_rate=lr)]
    sampler = Sampler(session, session.server.wait(promise)["sampling_session_id"])
    for each in rest:
        session.server.wait(each)
    noise.same(scores(sampler), scores(train(session.model(), lr).snapshot()), "sampling")


def check_snapshot_ignores_a_waiting_gradient(session: Session, noise: Noise, lr: float) -> None:
    """A gradient that waits for its step is not in a snapshot."""
    run = session.model()
    run.forward_backward(DATA)
    noise.same(scores(run.snapshot()), scores(session.sampler()), "sampling")


def check_base_stays(session: Session, noise: Noise, lr: float) -> None:
    """A sampler of the base model answers the same while adapters of it are trained."""
    sampler = session.sampler()
    before = scores(sampler)
    train(session.model(), lr, 2)
    noise.same(scores(sampler), before, "sampling")


def check_snapshots_side_by_side(session: Session, noise: Noise, lr: float) -> None:
    """Three snapshots of three moments answer in turn, each by its own weights."""
    run, samplers, first = session.model(), [], []
    for _ in range(3):
        train(run, lr)
        samplers.append(run.snapshot())
        first.append(scores(samplers[-1]))
    promises = [each.submit(PROMPT, params={"max_tokens": 1}, prompt_logprobs=True) for each in samplers * 2]
    for promise, expected in zip(promises, first * 2):
        noise.same(session.server.wait(promise)["prompt_logprobs"][1:], expected, "sampling")


def check_samplers_of_one_path(session: Session, noise: Noise, lr: float) -> None:
    """Two samplers of one named snapshot answer the same, and are two."""
    path = train(session.model(), lr).save_for_sampler("shared")
    left, right = session.sampler(path), session.sampler(path)
    assert left.id != right.id
    noise.same(scores(left), scores(right), "sampling")


def check_training_checkpoint_can_be_sampled(session: Session, noise: Noise, lr: float) -> None:
    """A checkpoint of training is sampled by its weights, or refused as what cannot be sampled."""
    from driver import StatusError
    from expect import told

    run = train(session.model(), lr)
    try:
        sampler = session.sampler(run.save("sampled"))
    except StatusError as error:
        told(error.answer)
        return
    noise.same(scores(sampler), scores(run.snapshot()), "sampling")


def check_snapshot_of_a_loaded_model(session: Session, noise: Noise, lr: float) -> None:
    """A snapshot of a model that was loaded has the weights of the checkpoint."""
    run = train(session.model(), lr)
    noise.same(scores(session.load(run.save("loaded"), False).snapshot()), scores(run.snapshot()), "sampling")


@pytest.mark.since("0.38")
@pytest.mark.full(needs="inflight_sampler")
def check_inflight_sampler_moves(session: Session, noise: Noise, lr: float) -> None:
    """A sampler of the kind 'inflight' has newer weights after the next save of its kind."""
    run = train(session.model(), lr)
    given = {"sampling_session_seq_id": 8100, "kind": "inflight", "type": "save_weights_for_sampler"}
    sampler = Sampler(
        session, session.server.wait(run.submit("save_weights_for_sampler", given))["sampling_session_id"]
    )
    before = scores(sampler)
    train(run, lr)
    session.server.wait(run.submit("save_weights_for_sampler", {**given, "sampling_session_seq_id": 8101}))
    noise.differ(scores(sampler), before, "sampling")
