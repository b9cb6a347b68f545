"""What one tenant may have at a time, and the numbers that it may see: its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.serve_cases import BASE, HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


def limited(**limits: int) -> Any:
    from skyrl_train.serve import Limits

    return Limits(**limits)


def made(caller: Caller, session: str, number: int, status: int) -> Any:
    content = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 1}}
    return caller.send("create_model", content, status=status)


@pytest.mark.slow
def test_adapters_and_bytes_of_a_tenant_are_limited_and_another_tenant_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, limits=limited(max_adapters=2, max_bytes=1)) as http:
        ann, bob = Caller(http), Caller(http, "tml-bob-key")
        session = ann.session()
        models = [ann.model(session, number=number) for number in (0, 1)]
        refused = made(ann, session, 2, 400)
        assert ("of 2 at most (--max-adapters)" in refused["error"], refused["category"]) == (True, "user")
        assert made(ann, session, 1, 422)["category"] == "user", "a number that was used"
        model = bob.model()
        ann.done("save_weights", {"model_id": models[0], "seq_id": 1, "path": "one"})
        full = ann.outcome(ann.send("save_weights", {"model_id": models[0], "seq_id": 2, "path": "two"}))
        assert ("(--max-bytes): delete some" in full["error"], full["category"]) == (True, "user")
        bob.done("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
        ann.http.delete(f"/api/v1/training_runs/{models[0]}/checkpoints/weights/one", headers=ann.headers)
        ann.done("save_weights", {"model_id": models[0], "seq_id": 3, "path": "two"})
        ann.done("unload_model", {"model_id": models[1], "seq_id": 1})
        made(ann, session, 2, 200)
    with serving(tmp_path, limits=limited(max_adapters=2)) as http:
        made(Caller(http), session, 3, 400)


@pytest.mark.slow
def test_requests_on_their_way_are_limited_and_a_retry_is_none(tmp_path: Path) -> None:
    with serving(tmp_path, limits=limited(max_requests=3)) as http:
        ann, bob = Caller(http), Caller(http, "tml-bob-key")
        model = ann.model()
        waiting = [ann.step(model, seq) for seq in (2, 3, 4)]
        sent = {"adam_params": {}, "model_id": model, "seq_id": 5}
        refused = ann.send("optim_step", sent, status=429)
        assert ("of 3 at most (--max-requests)" in refused["error"], refused["category"]) == (True, "server")
        assert ann.step(model, 2) == waiting[0]
        assert bob.logprobs(bob.model(), 1)
    with serving(tmp_path, limits=limited(max_requests=3)) as http:
        Caller(http).send("optim_step", sent, status=429)
    with serving(tmp_path, limits=limited(max_requests=4)) as http:
        ann = Caller(http)
        ann.outcome(ann.train(model, 1, TWO))
        assert all("metrics" in ann.outcome(each) for each in waiting)
        ann.step(model, 5)


def test_prometheus_is_told_a_tenants_own_numbers(tmp_path: Path) -> None:
    with serving(tmp_path) as http:
        ann, bob = Caller(http), Caller(http, "tml-bob-key")
        model = ann.model()
        ann.outcome(ann.train(model, 1, TWO))
        ann.outcome(ann.train(model, 2, TWO, "no_such_loss"))
        ann.done("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
        told = {
            caller: http.get("/metrics", headers={"Authorization": f"Bearer {caller.headers['X-API-Key']}"})
            for caller in (ann, bob)
        }
        assert http.get("/metrics").status_code == 401
    assert told[ann].headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = told[ann].text.splitlines()
    assert 'skyrl_serve_requests_total{verb="forward_backward",outcome="done"} 1' in lines
    assert 'skyrl_serve_requests_total{verb="forward_backward",outcome="failed"} 1' in lines
    assert "skyrl_serve_adapters 1" in lines
    assert "skyrl_serve_requests_open 0" in lines
    assert all(line.startswith("# ") or len(line.split(" ")) == 2 for line in lines)
    assert "skyrl_serve_adapters 0" in told[bob].text
    assert "requests_total{" not in told[bob].text


@pytest.mark.parametrize("words", [["--max-bytes", "0"], ["--max-adapters", "many"], ["--max-requests", "-1"]])
def test_limits_that_are_no_numbers_from_1_on_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from skyrl_train.main_serve import main

    with pytest.raises(SystemExit):
        main(words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("clients", [150, pytest.param(500, marks=pytest.mark.nightly)])
def test_many_clients_at_once_each_get_their_own_in_bounded_memory(tmp_path: Path, clients: int) -> None:
    """Each sends a pass of 40 KB and reads what came of it; all of them are in this process, with their threads."""
    import psutil

    rows = [datum([1 + number % 400 for number in range(500)])] * 4
    with serving(tmp_path) as http:
        ann = Caller(http)
        model = ann.model()
        expected = ann.outcome(ann.train(model, 1, rows, forward=True))
        session, process = ann.session(), psutil.Process()
        base = ann.model(session)
        ann.outcome(ann.train(base, 1, rows, forward=True))
        before, found, failed = process.memory_info().rss, [], []

        def ask(number: int) -> None:
            try:
                promise = ann.train(base, 2 + number, rows, forward=True)
                told: Any = {"type": "try_again"}
                while told.get("type") == "try_again":
                    told = ann.send("retrieve_future", {"request_id": promise["request_id"]}, status=None)
                found.append(told["loss_fn_outputs"])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        grown = process.memory_info().rss - before
    assert not failed, failed[0]
    assert found == [expected["loss_fn_outputs"]] * clients
    print(f"\n{clients} clients: {grown / 2**20:.0f} MiB more than one")
    assert grown < 256 << 20, f"{grown / 2**20:.0f} MiB"
