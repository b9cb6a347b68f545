"""Programs that play whole trajectories: functions, commands and services; what they report, and how they fail."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import AGENT_RULES
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.config.rules import run_rules
from skyrl_train.errors import EngineError
from skyrl_train.inference import HFEngine
from skyrl_train.rollout.agents import endpoint, sandbox
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.runs.cli import RL_MACHINE_RULES
from skyrl_train.types import FailureKind, Outcome, RolloutBatch, SamplingParams, Trajectory
from tests.support.agent_cases import letter_by_letter, rolling, scripted
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment
from tests.support.fakes import FakeEngine, make_prompts, make_tiny_model, make_tokenizer

HERE = "test_agent_loop"
Run = Callable[..., Trajectory]


def ask(address: Any, text: str, *, path: str = "/chat/completions") -> str:
    """One answer, by the standard library."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {address.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(address.base_url + path, body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def graded(task: Any, address: Any, *, right: str = "5") -> float:
    return 1.0 if ask(address, task["prompt"][0]["content"]) == right else 0.25


async def in_parallel(task: Any, address: Any) -> Any:
    headers = {"Authorization": f"Bearer {address.api_key}"}
    async with httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=20) as client:
        messages = [{"role": "user", "content": "sub"}]
        await asyncio.gather(*(client.post("/chat/completions", json={"messages": messages, "n": 1}) for _ in "ab"))
    return {"right": 1.0, "short": 0.5}


def silent(task: Any, address: Any) -> None:
    ask(address, "2 + 3?")


def insatiable(task: Any, address: Any) -> None:
    while True:
        ask(address, "2 + 3?")


def idle(task: Any, address: Any) -> float:
    return 1.0


def broken(task: Any, address: Any) -> None:
    ask(address, "2 + 3?")
    raise SystemExit("unknown city 'Oz'")


def wrong(task: Any, address: Any) -> Any:
    ask(address, "2 + 3?")
    return math.nan


ended: list[str] = []


async def hanging(task: Any, address: Any) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        ended.append(task["uid"])


def deaf(task: Any, address: Any) -> float:
    """Goes on whatever the engine does."""
    for _ in range(500):
        try:
            ask(address, "2 + 3?")
        except OSError:
            time.sleep(0.02)
    return 1.0


@pytest.fixture
def roll() -> Iterator[Callable[..., RolloutBatch]]:
    FakeEnvironment.reset()
    with rolling() as roll:
        yield roll
    assert endpoint._OPEN == {}, "an endpoint is left open"


@pytest.fixture
def run(roll: Any) -> Run:
    return lambda *args, **kwargs: roll(*args, **kwargs).trajectories[0]


def test_a_function_plays_and_reports(run: Run) -> None:
    trajectory = run(scripted("5"), {"run": f"{HERE}:graded"})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.DONE, 1.0)
    assert trajectory.turns[0].response_token_ids.tolist() == letter_by_letter("5")
    assert trajectory.metrics["agent/turns"] == 1.0
    assert trajectory.first_messages == ()
    other = {"_target_": f"{HERE}:graded", "right": "6"}
    assert run(scripted("5"), {"run": other}).reward == 0.25


def test_a_coroutine_asks_in_parallel_and_reports_several_rewards(run: Run) -> None:
    trajectory = run(FakeEngine(lambda _: letter_by_letter("x"), delay_s=0.8), {"run": f"{HERE}:in_parallel"})
    assert trajectory.reward == 1.5
    assert (trajectory.metrics["right"], trajectory.metrics["short"]) == (1.0, 0.5)
    # Without the SDK's header the same body in flight is one request that came twice.
    assert (len(trajectory.turns), trajectory.metrics["agent/repeated"]) == (1, 1.0)
    assert trajectory.first_messages == ({"role": "user", "content": "sub"},)


def test_samples_play_side_by_side_and_none_sees_another(roll: Any) -> None:
    engine = FakeEngine(lambda request: letter_by_letter(f"{request.seed}"))
    batch = roll(engine, {"run": f"{HERE}:graded"}, n=8)
    assert len({trajectory.turns[0].response_text for trajectory in batch.trajectories}) == 8
    assert [len(trajectory.turns) for trajectory in batch.trajectories] == [1] * 8


def test_the_environment_scores_the_last_answer_of_who_reports_nothing(run: Run) -> None:
    trajectory = run(scripted("5"), {"run": f"{HERE}:silent"}, env=FAKE_ENVIRONMENT)
    assert trajectory.reward == 1.0
    assert trajectory.metrics["steps"] == 1.0


@pytest.mark.parametrize(
    ("play", "kind", "message"),
    [
        ("silent", FailureKind.ENVIRONMENT_ERROR, "reported no reward, and nothing else gives one"),
        ("idle", FailureKind.ENVIRONMENT_ERROR, "ended without an answer of the model"),
        ("broken", FailureKind.ENVIRONMENT_ERROR, "SystemExit: unknown city 'Oz'"),
        ("wrong", FailureKind.INVALID_REWARD, "returned the reward nan"),
    ],
)
def test_a_program_that_fails_fails_its_trajectory_with_the_reason(
    run: Run, play: str, kind: FailureKind, message: str
) -> None:
    trajectory = run(scripted("5"), {"run": f"{HERE}:{play}"})
    assert trajectory.failure is not None
    assert trajectory.failure.kind is kind
    assert message in trajectory.failure.message


def test_a_program_that_does_not_end_is_ended_and_fails(run: Run) -> None:
    ended.clear()
    trajectory = run(scripted(), {"run": f"{HERE}:hanging", "time_limit_s": 1.0})
    assert trajectory.failure is not None
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT_TIMEOUT
    assert "time_limit_s=1" in trajectory.failure.message
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["p0"]


def test_a_limit_that_breaks_a_program_is_an_outcome_and_scored(run: Run) -> None:
    answers = FakeEngine(lambda _: letter_by_letter("5"))
    trajectory = run(answers, {"run": f"{HERE}:insatiable"}, env=FAKE_ENVIRONMENT, max_turns=3)
    assert (trajectory.outcome, len(trajectory.turns), trajectory.reward) == (Outcome.MAX_TURNS, 3, 1.0)


def test_a_prompt_that_does_not_fit_is_told_as_everywhere(run: Run) -> None:
    failure = run(scripted(), {"run": f"{HERE}:insatiable"}, max_context_length=8).failure
    assert failure is not None
    assert failure.kind is FailureKind.PROMPT_TOO_LONG


def test_an_engine_that_fails_fails_the_trajectory_at_once(run: Run) -> None:
    begin = time.monotonic()
    trajectory = run(FakeEngine(lambda _: EngineError("no luck")), {"run": f"{HERE}:deaf"})
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.message) == (FailureKind.ENGINE_ERROR, "EngineError: no luck")
    assert time.monotonic() - begin < 8


async def branching(task: Any, address: Any) -> float:
    """Three answers to one question at the same time, each of which is gone on with."""
    headers = {"Authorization": f"Bearer {address.api_key}", "x-stainless-retry-count": "0"}
    async with httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=60) as client:

        async def ask(messages: list[Any]) -> list[Any]:
            answer = await client.post("/chat/completions", json={"messages": messages, "max_tokens": 4})
            answer.raise_for_status()
            return [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "?"}]

        begun = await asyncio.gather(*(ask(task["prompt"]) for _ in range(3)))
        await asyncio.gather(*(ask(each) for each in begun))
    return 1.0


def test_parallel_requests_to_an_engine_that_generates_in_waves_are_the_same_again() -> None:
    def sampled() -> list[Any]:
        words = make_tokenizer()
        engine = HFEngine(make_tiny_model(), words, max_batch_size=8, weight_version=0)
        loop = {"_target_": "agent", "run": f"{HERE}:branching"}
        generator = RolloutGenerator(
            engine,
            words,
            GeneratorConfig(agent_loop=loop, max_turns=6, max_context_length=64),
            EnvironmentConfig(env_class="reported", isolation="thread", step_timeout_s=20.0),
            0,
        )
        try:
            batch = generator.generate(
                make_prompts(2), n_samples_per_prompt=2, sampling=SamplingParams(), global_step=1, purpose="train"
            )
        finally:
            generator.close()
            engine.close()
        assert [len(trajectory.turns) for trajectory in batch.trajectories] == [6] * 4
        assert all([turn.parent for turn in each.turns].count(None) == 3 for each in batch.trajectories)
        return [
            sorted((*each.prompt_token_ids(index), *turn.response_token_ids) for index, turn in enumerate(each.turns))
            for each in batch.trajectories
        ]

    assert sampled() == sampled()


# Commands

AGENT = """
import json, os, sys, urllib.request
task = json.load(open(sys.argv[1]))
body = json.dumps({"messages": task["prompt"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
"""


def command(tmp_path: Path, then: str) -> dict[str, Any]:
    (tmp_path / "agent.py").write_text(AGENT + then)
    return {"command": [sys.executable, "-S", str(tmp_path / "agent.py"), "{task_file}", "{report_file}", "{x}"]}


def test_a_command_plays_and_reports(run: Run, tmp_path: Path) -> None:
    then = "assert sys.argv[3] == '{x}'\njson.dump({'reward': float(said == task['answer'])}, open(sys.argv[2], 'w'))"
    trajectory = run(scripted("5"), command(tmp_path, then))
    assert (trajectory.failure, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)


@pytest.mark.parametrize(
    ("then", "kind", "message"),
    [
        ("sys.exit('no such city')", FailureKind.ENVIRONMENT_ERROR, "exit status 1: no such city"),
        ("os.kill(os.getpid(), 9)", FailureKind.ENVIRONMENT_ERROR, "ended by signal 9: it wrote nothing"),
        ("open(sys.argv[2], 'w').write('much')", FailureKind.INVALID_REWARD, "its report is not valid JSON"),
        ("json.dump('much', open(sys.argv[2], 'w'))", FailureKind.INVALID_REWARD, "the reward 'much'"),
        ("", FailureKind.ENVIRONMENT_ERROR, "reported no reward"),
    ],
)
def test_a_command_that_fails_fails_its_trajectory_with_the_reason(
    run: Run, tmp_path: Path, then: str, kind: FailureKind, message: str
) -> None:
    trajectory = run(scripted("5"), command(tmp_path, then))
    assert trajectory.failure is not None
    assert trajectory.failure.kind is kind
    assert message in trajectory.failure.message


@pytest.mark.slow
def test_a_command_that_does_not_end_is_ended_with_what_it_started(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "child"
    then = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
open({str(mark)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "GRACE_S", 0.2)
        trajectory = run(scripted("5"), {**command(tmp_path, then), "time_limit_s": 5.0})
    assert trajectory.failure is not None
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT_TIMEOUT
    pid = int(mark.read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_cannot_be_started_says_why(run: Run) -> None:
    failure = run(scripted(), {"command": ["/no/such/program"]}).failure
    assert failure is not None
    assert "could not be started (FileNotFoundError" in failure.message


def test_programs_are_found_from_where_the_user_stands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = "json.dump(float(said == task['answer']), open(sys.argv[2], 'w'))"
    command(tmp_path, f"#!{sys.executable}\n{then}")
    program = tmp_path / "bin" / "play"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{AGENT}{then}")
    program.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    for words in ([sys.executable, "-S", "agent.py"], ["bin/play"]):
        trajectory = run(scripted("5"), {"command": [*words, "{task_file}", "{report_file}"]})
        assert (trajectory.failure, trajectory.reward) == (None, 1.0)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["python3", "agnt.py", "{task_file}"], "'agnt.py'"),
        (["./play", "{task_file}"], "'./play'"),
        (["no-such-program"], "'no-such-program'"),
        (["python3", "agent.py", "agnt.py"], None),
        (["python3", "-m", "agnt.py"], None),
        (["python3", "{folder}/made.py"], None),
    ],
)
def test_a_program_that_is_not_here_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], missing: str | None
) -> None:
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)
    root = settings({"_target_": "agent", "command": words})
    rules = [rule for rule in RL_MACHINE_RULES if getattr(rule, "__name__", "") == "_launcher"]
    told = [str(each) for each in run_rules(root, rules)]
    assert len(told) == (missing is not None)
    if missing is not None:
        assert told[0].startswith(
            "generator.agent_loop.command: must be a program on PATH or a file, which is looked for"
        )
        assert f"from {tmp_path}; got {missing}" in told[0]


# Services


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    servers: list[HTTPServer] = []

    def serve(answer: Callable[[Any], tuple[int, Any]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, value = answer(told)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/play"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


class Told:
    def __init__(self, told: Any) -> None:
        self.base_url, self.api_key = told["base_url"], told["api_key"]


def test_a_service_plays_and_reports(run: Run, serve: Any) -> None:
    def answer(told: Any) -> tuple[int, Any]:
        return 200, {"reward": float(ask(Told(told), "2 + 3?") == told["task"]["answer"])}

    assert run(scripted("5"), {"url": serve(answer)}).reward == 1.0


@pytest.mark.parametrize(
    ("status", "value", "message"),
    [(500, "down", "answered with status 500"), (200, [], "has no 'reward'"), (200, {"reward": None}, "no reward")],
)
def test_a_service_that_fails_fails_its_trajectory(run: Run, serve: Any, status: int, value: Any, message: str) -> None:
    def answer(told: Any) -> tuple[int, Any]:
        ask(Told(told), "2 + 3?")
        return status, value

    failure = run(scripted("5"), {"url": serve(answer)}).failure
    assert failure is not None
    assert message in failure.message


# The configuration


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({}, "needs one of run"),
        ({"run": f"{HERE}:graded", "url": "http://x"}, "needs one of run .* got 'run, url'"),
        ({"run": f"{HERE}:no_such"}, "must name an importable"),
        ({"run": f"{HERE}:HERE"}, "must name a function"),
        ({"run": f"{HERE}:graded", "time_limit_s": 0}, "seconds above 0"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": ["agent", "{taskfile}"]}, "a placeholder that there is not"),
        ({"url": "127.0.0.1:9000"}, "must be the address"),
    ],
)
def test_settings_that_cannot_work_are_told_before_anything_is_loaded(loop: dict[str, Any], message: str) -> None:
    root = settings({"_target_": "agent", **loop})
    (violation,) = run_rules(root, AGENT_RULES)
    assert re.search(message, str(violation))


def test_settings_that_work_are_not_refused() -> None:
    for loop in ({"run": f"{HERE}:graded"}, {"command": ["a", "{task_file}"], "time_limit_s": 5}, {"url": "http://x/"}):
        assert list(run_rules(settings({"_target_": "agent", **loop}), AGENT_RULES)) == []


def settings(agent_loop: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(
        generator=GeneratorConfig(agent_loop=agent_loop), environment=EnvironmentConfig(env_class="reported")
    )
