"""Idempotence: (model_id, seq_id) names a request, which runs once and in its turn, whatever is lost or sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver import Run, Session
from expect import refused
from measure import DATA, PROBES, Noise, probe

HALVES = (DATA[:3], DATA[3:])


def trained(session: Session, lr: float) -> np.ndarray:
    """What one pass over the data and one step make of a new model."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    return probe(run)


def check_pass_sent_twice_is_one_request(run: Run) -> None:
    """A pass that is sent twice is promised the same result."""
    first, again = (run.submit_pass(DATA, seq=1) for _ in range(2))
    assert first["request_id"] == again["request_id"]


def check_pass_sent_twice_adds_once(session: Session, noise: Noise) -> None:
    """A pass that is sent twice adds its gradient once."""
    probes = []
    for times in (1, 2):
        run = session.model()
        for _ in range(times):
            run.server.wait(run.submit_pass(DATA, seq=1))
        run.server.wait(run.submit_step(seq=2, **noise.push()))  # in proportion to the gradient
        probes.append(probe_at(run, 3))
    noise.alike(probes)


def check_pass_sent_twice_over_a_step(session: Session, noise: Noise) -> None:
    """A pass that is sent again after the step that used it adds nothing to the next step."""
    probes = []
    for again in (False, True):
        run = session.model()
        run.server.wait(run.submit_pass(DATA, seq=1))
        run.server.wait(run.submit_step(seq=2, learning_rate=0.01, beta1=0.0))
        if again:
            run.server.wait(run.submit_pass(DATA, seq=1))
        run.server.wait(run.submit_step(seq=3, learning_rate=0.01, beta1=0.0))
        probes.append(probe_at(run, 4))
    noise.alike(probes)


def probe_at(run: Run, seq: int) -> np.ndarray:
    run.seq = seq
    return probe(run)


def check_step_sent_twice_steps_once(session: Session, noise: Noise, lr: float) -> None:
    """An optimizer step that is sent twice steps once."""
    run = session.model()
    run.forward_backward(DATA)
    for _ in range(2):
        run.server.wait(run.submit_step(seq=2, learning_rate=lr))
    noise.same(probe_at(run, 3), trained(session, lr))


def check_model_created_twice_is_one(session: Session, lr: float, noise: Noise) -> None:
    """A model whose creation is sent again stays what it has become."""
    run = session.model(number=5000)
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    before = probe(run)
    again = session.server.wait(session.create(number=5000))
    assert again["model_id"] == run.id
    noise.same(probe(run), before)


def check_creation_sent_twice_at_once(session: Session) -> None:
    """The creation of a model that is sent twice before it is answered is one promise."""
    first, again = (session.create(number=5001) for _ in range(2))
    assert first["request_id"] == again["request_id"]


def check_save_sent_twice(run: Run) -> None:
    """A save that is sent twice saves once, and answers the same path."""
    given = {"path": "twice", "type": "save_weights"}
    paths = [run.server.wait(run.submit("save_weights", given, seq=1))["path"] for _ in range(2)]
    assert paths[0] == paths[1]


def check_snapshot_sent_twice(run: Run) -> None:
    """A snapshot for sampling that is sent twice is one sampler."""
    given = {"sampling_session_seq_id": 7000, "type": "save_weights_for_sampler"}
    answers = [run.server.wait(run.submit("save_weights_for_sampler", given, seq=1)) for _ in range(2)]
    assert answers[0]["sampling_session_id"] == answers[1]["sampling_session_id"]


def check_sampler_created_twice(session: Session) -> None:
    """A sampler whose creation is sent twice is one sampler."""
    given = {"session_id": session.id, "sampling_session_seq_id": 7001, "base_model": session.server.model}
    names = {session.server.call("create_sampling_session", given)["sampling_session_id"] for _ in range(2)}
    assert len(names) == 1


def check_samples_sent_twice(session: Session) -> None:
    """Samples that are asked for twice are drawn once: the same promise, names and tokens, though no seed was given."""
    sampler = session.sampler()
    first, again = (sampler.submit(PROBES[0], seq=3, params={"max_tokens": 16}) for _ in range(2))
    assert first["request_id"] == again["request_id"]
    assert first["sample_sequence_ids"] == again["sample_sequence_ids"]
    tokens = [session.server.wait(promise)["sequences"][0]["tokens"] for promise in (first, again)]
    assert tokens[0] == tokens[1]


def check_result_is_read_twice(run: Run) -> None:
    """A result that was read is read again, byte by byte: the answer to the first reading may have been lost."""
    promise = run.submit_pass(DATA)
    run.server.wait(promise)
    bodies = {run.server.retrieve(promise["request_id"]).body for _ in range(3)}
    assert len(bodies) == 1


def check_error_is_read_twice(run: Run) -> None:
    """An error that was read is read again."""
    messages = []
    promise = run.submit_pass(DATA, loss="no_such_loss")
    for _ in range(2):
        messages.append(refused(lambda: run.server.wait(promise)))
    assert messages[0] == messages[1]


def check_sent_again_after_it_was_read(run: Run) -> None:
    """A request that is sent again after its result was read is promised that result."""
    promise = run.submit_pass(DATA, seq=1)
    first = run.server.wait(promise)
    again = run.submit_pass(DATA, seq=1)
    assert run.server.wait(again) == first


def check_sent_again_while_it_waits(run: Run) -> None:
    """A request that is sent again while it waits for its turn is promised the same result."""
    first, again = (run.submit_pass(DATA, seq=2) for _ in range(2))
    assert first["request_id"] == again["request_id"]
    run.server.wait(run.submit_pass(DATA, seq=1))
    assert run.server.wait(first) == run.server.wait(again)


def check_many_at_once(session: Session, noise: Noise) -> None:
    """A pass that is sent eight times at the same moment adds its gradient once."""
    single, many = session.model(), session.model()
    single.server.wait(single.submit_pass(DATA, seq=1))
    names: list[str] = []
    at_once([lambda: names.append(many.submit_pass(DATA, seq=1)["request_id"])] * 8)
    assert len(names) == 8
    assert len(set(names)) == 1
    for run in (single, many):
        run.server.wait(run.submit_step(seq=2, **noise.push()))
    noise.same(probe_at(single, 3), probe_at(many, 3))


def at_once(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("verb", ["pass", "step", "save"])
def check_number_used_for_another_request(session: Session, noise: Noise, lr: float, verb: str) -> None:
    """A number that was used is refused to another request, a {verb}, and nothing of it is done."""
    run = session.model()
    run.server.wait(run.submit_pass(DATA, seq=1))
    if verb == "pass":
        refused(lambda: run.server.wait(run.submit_pass(DATA[:1], seq=1)))
    elif verb == "step":
        refused(lambda: run.server.wait(run.submit_step(seq=1, learning_rate=1.0)))
    else:
        refused(lambda: run.server.wait(run.submit("save_weights", {"path": "other", "type": "save_weights"}, seq=1)))
    run.server.wait(run.submit_step(seq=2, learning_rate=lr))
    noise.same(probe_at(run, 3), trained(session, lr))


def check_numbers_of_two_models(session: Session, noise: Noise, lr: float) -> None:
    """The same number on two models is two requests."""
    left, right = session.model(), session.model()
    promises = [left.submit_pass(DATA, seq=1), right.submit_pass(DATA, seq=1)]
    assert promises[0]["request_id"] != promises[1]["request_id"]
    for run, promise in zip((left, right), promises):
        run.server.wait(promise)
        run.server.wait(run.submit_step(seq=2, learning_rate=lr))
    noise.same(probe_at(left, 3), probe_at(right, 3))


def check_numbers_of_two_samplers(session: Session) -> None:
    """The same number on two samplers is two requests: each sampler counts from 0."""
    promises = [session.sampler().submit(PROBES[0], seq=0) for _ in range(2)]
    assert promises[0]["request_id"] != promises[1]["request_id"]
    assert not set(promises[0]["sample_sequence_ids"]) & set(promises[1]["sample_sequence_ids"])


def check_later_request_waits(session: Session, noise: Noise, lr: float) -> None:
    """A step that arrives before the pass that it steps over waits for it."""
    run = session.model()
    step = run.submit_step(seq=2, learning_rate=lr)
    run.server.wait(run.submit_pass(DATA, seq=1))
    run.server.wait(step)
    noise.same(probe_at(run, 3), trained(session, lr))


@pytest.mark.parametrize("order", ["321", "231", "312", "213"])
def check_any_order_of_arrival(session: Session, noise: Noise, order: str) -> None:
    """Two passes and a step that arrive in the order {order} do what they do in order."""
    probes = []
    for arrival in ("123", order):
        run = session.model()
        promises = []
        for place in arrival:
            if place == "3":
                promises.append(run.submit_step(seq=3, **noise.push()))
            else:
                promises.append(run.submit_pass(HALVES[int(place) - 1], seq=int(place)))
        for promise in promises:
            run.server.wait(promise)
        probes.append(probe_at(run, 4))
    noise.alike(probes)


def check_failed_request_gives_way(run: Run) -> None:
    """A request that fails has had its turn: the one after it runs. The SDK never uses its number again."""
    refused(lambda: run.server.wait(run.submit_pass(DATA, loss="no_such_loss")))
    assert len(run.forward(DATA).logprobs) == len(DATA)


def check_number_below_the_last(run: Run) -> None:
    """A number below those that ran is refused to a request that was not seen before."""
    refused(lambda: run.server.wait(run.submit_pass(DATA, seq=0)))


@pytest.mark.needs_restart
def check_restart_keeps_weights(session: Session, noise: Noise, lr: float, restart: Callable[[], None]) -> None:
    """A model that was stepped is the same after the server was killed and started again."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    before = probe(run)
    restart()
    noise.same(probe(run), before)


@pytest.mark.needs_restart
def check_restart_keeps_the_gradient(session: Session, noise: Noise, lr: float, restart: Callable[[], None]) -> None:
    """A gradient that was acknowledged is used by the step after a restart."""
    run = session.model()
    run.forward_backward(DATA)
    restart()
    run.step(learning_rate=lr)
    noise.same(probe(run), trained(session, lr))


@pytest.mark.needs_restart
def check_restart_keeps_the_optimizer(session: Session, noise: Noise, lr: float, restart: Callable[[], None]) -> None:
    """AdamW goes on after a restart as if there had been none."""
    probes = []
    for killed in (False, True):
        run = session.model()
        for step in range(3):
            run.forward_backward(DATA)
            run.step(learning_rate=lr)
            if killed and step == 1:
                restart()
        probes.append(probe(run))
    noise.alike(probes)


@pytest.mark.needs_restart
def check_restart_remembers_requests(session: Session, noise: Noise, lr: float, restart: Callable[[], None]) -> None:
    """A pass and a step that are sent again after a restart run no second time."""
    run = session.model()
    promises = []
    for _ in range(2):
        promises.append([run.submit_pass(DATA, seq=1), run.submit_step(seq=2, learning_rate=lr)])
        for promise in promises[-1]:
            run.server.wait(promise)
        restart()
    assert [promise["request_id"] for promise in promises[0]] == [promise["request_id"] for promise in promises[1]]
    noise.same(probe_at(run, 3), trained(session, lr))


@pytest.mark.needs_restart
def check_restart_keeps_results(session: Session, restart: Callable[[], None]) -> None:
    """Results that were promised before a restart are read after it, of samples as of passes."""
    run = session.model()
    sampler = session.sampler()
    promises = [run.submit_pass(DATA), sampler.submit(PROBES[0], params={"max_tokens": 6})]
    before = [session.server.wait(promise) for promise in promises]
    restart()
    after = [session.server.wait(promise) for promise in promises]
    assert after[0]["loss_fn_outputs"] == before[0]["loss_fn_outputs"]
    assert after[1]["sequences"][0]["tokens"] == before[1]["sequences"][0]["tokens"]


@pytest.mark.needs_restart
def check_restart_keeps_what_waits(session: Session, noise: Noise, lr: float, restart: Callable[[], None]) -> None:
    """A request that waits for its turn when the server is killed runs when the turn comes."""
    run = session.model()
    step = run.submit_step(seq=2, learning_rate=lr)
    restart()
    run.server.wait(run.submit_pass(DATA, seq=1))
    run.server.wait(step)
    noise.same(probe_at(run, 3), trained(session, lr))
