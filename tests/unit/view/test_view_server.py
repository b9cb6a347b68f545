"""Who the viewer's server answers, and who not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("duckdb")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view import server
from skyrl_train.view.answers import Answers
from skyrl_train.view.rollouts import RolloutIndex
from skyrl_train.view.server import STATIC, make_app, static_file
from tests.support.view_runs import write_run

TOKEN = "a-token"
HOME = "http://127.0.0.1:8000"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    runs = find_runs([write_run(tmp_path / "run", steps=1, prompts=1, samples=1)])
    (tmp_path / "scratch").mkdir()
    answers = Answers(runs, RolloutIndex(tmp_path / "scratch", runs), version="1")
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_text("<html><head></head><body>page</body></html>")
    return TestClient(make_app(answers, token=TOKEN, static=tmp_path / "static"), base_url=HOME)


def enter(client: TestClient) -> None:
    response = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(response.headers["set-cookie"].split("; "))


def test_the_token_opens_the_page_once_and_a_cookie_goes_on(client: TestClient) -> None:
    enter(client)
    assert "page" in client.get("/").text
    assert client.get("/api/runs").json()["runs"][0]["id"] == "run"
    assert client.get("/api/trajectories?reward_min=x").status_code == 400


@pytest.mark.parametrize(
    "path",
    ["/", "/?token=wrong", "/?token=", "/api/runs", "/api/runs?token=a-token", "/static/index.html", "/api/export"],
)
def test_without_the_token_nothing_is_told(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 403
    assert "page" not in response.text
    assert "run" not in response.headers.get("set-cookie", "")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "[", ""])
def test_a_name_that_was_bound_to_this_machine_is_refused(client: TestClient, host: str) -> None:
    enter(client)
    assert client.get("/api/runs", headers={"Host": host}).status_code == 421
    assert client.get(f"/?token={TOKEN}", headers={"Host": host}, follow_redirects=False).status_code == 421


def test_the_forwarded_port_of_another_machine_is_served(client: TestClient) -> None:
    enter(client)
    assert client.get("/api/runs", headers={"Host": "localhost:8000"}).status_code == 200


def test_every_answer_forbids_other_origins_and_storage(client: TestClient) -> None:
    enter(client)
    for path in ("/", "/api/runs", "/static/none", "/api/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/static/../answers.py", "/static/%2e%2e/scratch/x", "/static//etc/passwd", "/static/"]
)
def test_only_files_of_the_page_are_served(client: TestClient, path: str) -> None:
    enter(client)
    assert client.get(path).status_code == 404


def test_nothing_can_be_written(client: TestClient) -> None:
    enter(client)
    assert client.post("/api/runs").status_code == 405
    assert client.delete("/api/trajectories").status_code == 405


@pytest.mark.skipif(not (server.STATIC / "index.html").is_file(), reason="there is no page")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_command_prints_an_address_that_works_and_leaves_nothing_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    folder = write_run(tmp_path / "run", steps=1, prompts=1, samples=1)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    command = [sys.executable, "-m", "skyrl_train.view", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
            with httpx.Client(timeout=20, follow_redirects=True) as browser:
                assert browser.get(address).status_code == 200
                assert browser.get(httpx.URL(address).copy_with(raw_path=b"/api/facets")).json()["num_trajectories"] > 0
            process.send_signal(number)
            assert process.wait(timeout=20) == status
        finally:
            process.kill()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_folder_that_is_none_ends_the_command_with_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyrl_train.view", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr == f"SkyrlTrainError: RUN={tmp_path / 'none'} is no folder. Give the output_dir of a run.\n"


@pytest.mark.parametrize("name", ["\0", "x" * 10_000, "../server.py", "no.js"])
def test_a_name_that_leads_to_no_file_of_the_page_is_none(name: str) -> None:
    assert static_file(STATIC, name) is None


def test_a_step_that_is_no_whole_number_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1e999}\n')
    (run,) = find_runs([tmp_path])
    assert run.describe()["last_step"] is None
