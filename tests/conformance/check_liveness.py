"""Liveness: long polls, what waits, cancelled samples, heartbeats, a slow request beside a fast one, many clients."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from driver import Answer, RequestFailed, Run, Server, Session, StatusError
from measure import DATA, PROBES
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

LONGEST_POLL_S = 45.0  # after which the SDK gives up on a poll
LONG = {"max_tokens": 1500, "stop": [], "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def polled(request: pytest.FixtureRequest, session: Session) -> Iterator[tuple[Run, dict[str, str], Future[Answer]]]:
    """A request that waits for the one before it, and a poll of it, which may be held for half a minute: meanwhile the other
    checks of this file run."""
    run = session.model()
    promise = run.submit_pass(DATA, seq=2)
    with ThreadPoolExecutor(1) as thread:
        is_wanted = any("pending" in getattr(item, "fixturenames", ()) for item in request.session.items)
        poll = thread.submit(session.server.retrieve, promise["request_id"]) if is_wanted else Future[Answer]()
        yield run, promise, poll


@pytest.fixture(scope="module")
def pending(polled: tuple[Run, dict[str, str], Future[Answer]]) -> tuple[Run, dict[str, str], Answer]:
    """A request that waits for the one before it, and the answer to a poll of it."""
    run, promise, poll = polled
    return run, promise, poll.result()


def check_promise_is_prompt(run: Run) -> None:
    """A verb is promised at once, however long it will take."""
    begun = time.perf_counter()
    promise = run.submit_pass(DATA * 40)
    assert time.perf_counter() - begun < 5
    run.server.wait(promise)


def check_poll_wakes(session: Session) -> None:
    """A poll that is held is answered as soon as the result is there: within a moment and the time that a pass takes."""
    run = session.model()
    later, found = run.submit_pass(DATA, seq=2), []

    def ask() -> None:
        session.server.wait(later)
        found.append(time.perf_counter())

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    begun = time.perf_counter()
    session.server.wait(run.submit_pass(DATA, seq=1))
    done = time.perf_counter()
    thread.join()
    assert found[0] - done < 0.6 + (done - begun)  # the later pass is computed in between


def check_finished_is_answered_at_once(run: Run) -> None:
    """A poll of what is finished is answered at once."""
    promise = run.submit_pass(DATA)
    run.server.wait(promise)
    assert run.server.retrieve(promise["request_id"]).seconds < 0.5


def check_metadata_first(session: Session) -> None:
    """Where metadata alone are allowed, the answer is the result or its size, and the result comes when it is asked for."""
    run = session.model()
    promise = run.submit_pass(DATA * 30)
    run.server.wait(promise)
    answer = run.server.retrieve(promise["request_id"], metadata=True)
    assert answer.status == 200
    if "json" in answer.headers["content-type"] and b"complete_metadata" in answer.body:
        assert answer.json()["response_payload_size"] > 0
    assert len(run.server.wait(promise)["loss_fn_outputs"]) == 30 * len(DATA)


def check_slow_samples_beside_fast_ones(session: Session) -> None:
    """A short sample that is asked for after a long one is answered before it."""
    begun = time.perf_counter()
    slow = session.sampler().submit(PROBES[0], params=LONG, num_samples=8)
    assert session.sampler().sample(PROBES[1], {"max_tokens": 2})["sequences"]
    quick = time.perf_counter() - begun
    session.server.wait(slow)
    assert quick < 0.8 * (time.perf_counter() - begun)


def check_training_beside_slow_samples(session: Session) -> None:
    """A pass that is asked for after a long sample is answered before it."""
    run = session.model()
    begun = time.perf_counter()
    slow = session.sampler().submit(PROBES[0], params={**LONG, "seed": 2}, num_samples=8)
    run.forward_backward(DATA[:1])
    quick = time.perf_counter() - begun
    session.server.wait(slow)
    assert quick < 0.8 * (time.perf_counter() - begun)


@pytest.mark.since("0.29")
@pytest.mark.full(needs="cancel")
def check_cancelled_sample_ends(session: Session) -> None:
    """A sample that is cancelled ends long before it would have, in an error or with what it had."""
    sampler = session.sampler()
    begun = time.perf_counter()
    session.server.wait(sampler.submit(PROBES[0], params={**LONG, "seed": 3}, num_samples=12))
    whole = time.perf_counter() - begun
    promise = sampler.submit(PROBES[0], params={**LONG, "seed": 4}, num_samples=12)
    begun = time.perf_counter()
    session.server.call("cancel_future", {"request_id": promise["request_id"]})
    with contextlib.suppress(RequestFailed, StatusError):
        session.server.wait(promise)
    assert time.perf_counter() - begun < 0.5 * whole + 0.2


@pytest.mark.since("0.29")
@pytest.mark.full(needs="cancel")
def check_cancelled_after_its_end(session: Session) -> None:
    """A cancellation that comes after the end changes nothing of the result."""
    promise = session.sampler().submit(PROBES[0])
    before = session.server.wait(promise)
    session.server.call("cancel_future", {"request_id": promise["request_id"]})
    assert session.server.wait(promise)["sequences"] == before["sequences"]


@pytest.mark.since("0.29")
@pytest.mark.full(needs="cancel")
def check_cancelled_training_goes_on(run: Run) -> None:
    """A pass or its order is not lost by a cancellation: the requests after it run."""
    promise = run.submit_pass(DATA)
    run.server.send(
        "POST",
        "cancel_future",
        b'{"request_id": "%s"}' % promise["request_id"].encode(),
        {"Content-Type": "application/json"},
    )
    assert len(run.forward(DATA).logprobs) == len(DATA)


def check_heartbeat(session: Session) -> None:
    """A session's heartbeat is answered in the SDK's schema."""
    given = {"session_id": session.id, "type": "session_heartbeat"}
    types.SessionHeartbeatResponse.model_validate(session.server.call("session_heartbeat", given))


def check_heartbeat_of_nobody(server: Server) -> None:
    """The heartbeat of a session that does not exist is 404 or 410."""
    assert server.post("session_heartbeat", {"session_id": "nobody", "type": "session_heartbeat"}).status in (404, 410)


@pytest.mark.since("0.29")
def check_finished_session(server: Server) -> None:
    """A session that its client finished has no heartbeat any more: 410 ends the client's loop."""
    own = server.session()
    given = {"reason": {"type": "success"}, "detail": None}
    assert server.post(f"sessions/{own.id}/finish", given).status in (200, 204)
    assert server.post("session_heartbeat", {"session_id": own.id, "type": "session_heartbeat"}).status == 410


def check_vanished_client(session: Session) -> None:
    """A request whose client went away without its result is done all the same, in its turn."""
    run = session.model()
    run.submit_pass(DATA)
    run.submit_step(learning_rate=1e-3)
    assert len(run.forward(DATA).logprobs) == len(DATA)


@pytest.mark.parametrize("clients", [16, 64])
def check_many_clients(server: Server, clients: int) -> None:
    """{clients} clients at the same time each get their own answers."""
    errors: list[BaseException] = []
    lengths: list[int] = []

    def work(index: int) -> None:
        try:
            run = Session(server, server.session().id).model()
            lengths.append(len(run.forward(DATA[: 1 + index % 5]).logprobs) - index % 5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert lengths == [1] * clients


def check_poll_ends(pending: tuple[Run, dict[str, str], Answer]) -> None:
    """A poll of what is not finished ends by 408 before the SDK gives it up."""
    assert pending[2].status == 408
    assert pending[2].seconds < LONGEST_POLL_S


def check_poll_says_try_again(pending: tuple[Run, dict[str, str], Answer]) -> None:
    """The body of 408 says try_again, in the SDK's schema, with a state of the queue."""
    said = TryAgainResponse.model_validate(pending[2].json())
    assert said.type == "try_again"
    assert said.queue_state in ("active", "paused_capacity", "paused_rate_limit")


def check_poll_names_its_request(pending: tuple[Run, dict[str, str], Answer]) -> None:
    """The body of 408 names the request that was asked for."""
    assert pending[2].json()["request_id"] == pending[1]["request_id"]


def check_poll_is_not_spinning(pending: tuple[Run, dict[str, str], Answer]) -> None:
    """A poll of what is not finished is held for a while: the SDK asks again at once."""
    assert pending[2].seconds > 0.3


def check_other_models_do_not_wait(session: Session, pending: tuple[Run, dict[str, str], Answer]) -> None:
    """A model whose request waits for a number holds up no other model."""
    assert pending[2].status == 408
    begun = time.perf_counter()
    session.model().forward(DATA)
    assert time.perf_counter() - begun < 10
