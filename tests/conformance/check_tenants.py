"""Tenants: two keys, of which neither sees, changes or slows what is the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver import Run, Server, Session, StatusError
from measure import DATA, PROBES, Noise, probe

pytestmark = pytest.mark.needs_other_key


@pytest.fixture(scope="module")
def guest(other: Server) -> Session:
    return other.session()


@pytest.fixture(scope="module")
def mine(session: Session) -> dict[str, Any]:
    """A model, a checkpoint, a snapshot, a sampler and a result of the first tenant."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(learning_rate=0.01)
    promise = run.submit_pass(DATA, forward_only=True)
    return {
        "run": run,
        "path": run.save("private"),
        "snapshot": run.save_for_sampler("private"),
        "sampler": run.snapshot(),
        "promise": promise,
    }


def hidden(call: Callable[[], Any]) -> None:
    """Raise AssertionError unless the call is answered by 404 (or 403), or by a future that fails."""
    from driver import RequestFailed

    with pytest.raises((StatusError, RequestFailed)) as caught:
        call()
    if isinstance(caught.value, StatusError):
        assert caught.value.answer.status in (403, 404), caught.value


@pytest.mark.parametrize("verb", ["pass", "step", "save", "snapshot", "info"])
def check_model_of_another(mine: dict[str, Any], guest: Session, verb: str) -> None:
    """Another tenant's model takes no {verb}."""
    stolen = Run(guest, mine["run"].id, seq=50)
    calls = {
        "pass": lambda: stolen.forward(DATA),
        "step": lambda: stolen.step(learning_rate=1.0),
        "save": lambda: stolen.save("stolen"),
        "snapshot": lambda: stolen.save_for_sampler("stolen"),
        "info": lambda: guest.server.call("get_info", {"model_id": stolen.id}),
    }
    hidden(calls[verb])


@pytest.mark.parametrize("optimizer", [True, False])
def check_checkpoint_of_another_loads(mine: dict[str, Any], guest: Session, optimizer: bool) -> None:
    """Another tenant's checkpoint is not loaded (optimizer={optimizer})."""
    hidden(lambda: guest.load(mine["path"], optimizer))


@pytest.mark.parametrize("which", ["path", "snapshot"])
def check_checkpoint_of_another_samples(mine: dict[str, Any], guest: Session, which: str) -> None:
    """Another tenant's {which} is not sampled."""
    hidden(lambda: guest.sampler(mine[which]).sample(PROBES[0]))


def check_sampler_of_another(mine: dict[str, Any], guest: Session) -> None:
    """Another tenant's sampler answers nothing."""
    from driver import Sampler

    hidden(lambda: Sampler(guest, mine["sampler"].id, seq=90).sample(PROBES[0]))


def check_sampler_record_of_another(mine: dict[str, Any], guest: Session) -> None:
    """The record of another tenant's sampler is not shown."""
    hidden(lambda: guest.server.get(f"samplers/{mine['sampler'].id}"))


def check_result_of_another(mine: dict[str, Any], guest: Session) -> None:
    """Another tenant's result is not read, even by who knows its name."""
    hidden(lambda: guest.server.wait(mine["promise"]))


def check_session_of_another(session: Session, guest: Session) -> None:
    """Nothing is made in another tenant's session."""
    stolen = Session(guest.server, session.id)
    hidden(lambda: stolen.model(number=6100))
    hidden(lambda: stolen.sampler())


@pytest.mark.parametrize("path", ["training_runs/{run}", "training_runs/{run}/checkpoints", "sessions/{session}"])
def check_record_of_another(mine: dict[str, Any], guest: Session, session: Session, path: str) -> None:
    """GET {path} of another tenant is not answered."""
    hidden(lambda: guest.server.get(path.format(run=mine["run"].id, session=session.id)))


def check_lists_are_apart(mine: dict[str, Any], guest: Session) -> None:
    """The lists of training runs, checkpoints and sessions hold nothing of another tenant."""
    for path in ("training_runs?limit=500", "checkpoints?limit=500", "sessions?limit=500"):
        assert mine["run"].id.partition(":")[0] not in str(guest.server.get(path))


def check_delete_of_another(mine: dict[str, Any], guest: Session, session: Session) -> None:
    """Another tenant's checkpoint is not deleted."""
    name = mine["path"].removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
    answer = guest.server.send("DELETE", f"training_runs/{name}")
    assert answer.status in (403, 404)
    assert session.load(mine["path"], False)


def check_same_names(guest: Session, session: Session, noise: Noise, lr: float) -> None:
    """Two tenants save under the same name, and each loads its own."""
    runs = []
    for owner, data in ((session, DATA[:3]), (guest, DATA[3:])):
        run = owner.model()
        run.forward_backward(data)
        run.step(learning_rate=lr)
        runs.append((owner, run, run.save("the-same-name")))
    for owner, run, path in runs:
        noise.same(probe(owner.load(path, False)), probe(run))
    noise.differ(probe(runs[0][1]), probe(runs[1][1]))


def check_same_idempotence(guest: Session, session: Session) -> None:
    """The same numbers of two tenants are different requests."""
    names = [owner.model(number=6200).submit_pass(DATA, seq=1)["request_id"] for owner in (session, guest)]
    assert names[0] != names[1]


def check_training_together(guest: Session, session: Session, noise: Noise, lr: float) -> None:
    """Two tenants whose requests alternate end where each ends alone."""
    alone, together = [], []
    for owner, data in ((session, DATA[:3]), (guest, DATA[3:])):
        run = owner.model()
        for _ in range(3):
            run.forward_backward(data)
            run.step(learning_rate=lr)
        alone.append(probe(run))
    pair = [(session.model(), DATA[:3]), (guest.model(), DATA[3:])]
    for _ in range(3):
        promises = [(run, run.submit_pass(data)) for run, data in pair] + [
            (run, run.submit_step(learning_rate=lr)) for run, _ in pair
        ]
        for run, promise in promises:
            run.server.wait(promise)
    together = [probe(run) for run, _ in pair]
    for left, right in zip(alone, together):
        noise.same(left, right)


def check_sampling_together(guest: Session, session: Session, noise: Noise, lr: float) -> None:
    """Samplers of two tenants that are asked at the same time answer by their own weights."""
    run = session.model()
    run.forward_backward(DATA)
    run.step(learning_rate=lr)
    samplers = [run.snapshot(), guest.sampler()]
    asked = [each.submit(PROBES[0], params={"max_tokens": 1}, prompt_logprobs=True) for each in samplers * 3]
    found = [
        np.array(each.session.server.wait(promise)["prompt_logprobs"][1:]) for each, promise in zip(samplers * 3, asked)
    ]
    noise.differ(found[0], found[1], "sampling")
    for index in range(2, 6):
        noise.same(found[index], found[index % 2], "sampling")
