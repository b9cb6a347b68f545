"""Environments in worker processes: what shares a worker, what is lost with it, and the same rollouts as on threads."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import ConfigError, SkyrlTrainError
from skyrl_train.rollout.boundary import EnvironmentFailed, EnvironmentSession
from skyrl_train.rollout.envs.environments import uses_processes
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.hosts import local as env_local
from skyrl_train.rollout.hosts.local import LocalWorkers, violations_in_process
from skyrl_train.rollout.hosts.processes import ProcessEnvironments
from skyrl_train.rollout.hosts.threads import ThreadEnvironments
from skyrl_train.rollout.hosts.worker import _load
from skyrl_train.rollout.journal import Journal
from skyrl_train.system.processes import Frames, frame
from skyrl_train.telemetry import Activity
from skyrl_train.telemetry.logs import learn_secrets
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams
from tests.support.environment_cases import ASYNCHRONOUS, COUNTING, SCRIPTED
from tests.support.fake_environments import done_with, go_on_with
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer
from tests.support.process_trees import descendants, is_running

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
MESSAGES = [{"role": "user", "content": "2+2?"}]


def environments(num_workers: int = 1, *, timeout_s: float = 10.0, spec: Any = COUNTING) -> ProcessEnvironments:
    host = LocalWorkers((spec,), worker_memory_gb=1.0)
    return ProcessEnvironments(host, num_workers=num_workers, timeout_s=timeout_s)


async def started(among: ProcessEnvironments, **extras: Any) -> EnvironmentSession:
    session = EnvironmentSession(among, COUNTING, extras, "Counting")
    await session.start(MESSAGES)
    return session


def test_an_environment_whose_worker_was_ended_by_another_goes_on_where_it_was() -> None:
    async def two() -> tuple[list[str], str, dict[str, float]]:
        among = environments()
        fatal, steady = await started(among, fatal="b"), await started(among)
        said = [(await steady.step("x")).observations[0]["content"]]
        before = (await steady.metrics())["process"]
        with pytest.raises(EnvironmentFailed) as caught:
            await fatal.step("b")
        said += [(await steady.step("y")).observations[0]["content"]]
        metrics = await steady.metrics()
        assert metrics["process"] != before
        await steady.close()
        await fatal.close()
        await among.aclose()
        return said, caught.value.message, metrics

    said, reason, metrics = asyncio.run(two())
    assert (said, metrics["steps"]) == (["1", "2"], 2.0)
    assert reason == "Counting.step: its worker process exited with status 9"


@pytest.mark.skipif(sys.platform != "linux", reason="processes answer on Linux alone")
def test_a_step_that_hangs_says_where() -> None:
    async def one() -> str:
        among = environments(timeout_s=0.5)
        hanging = await started(among, slow_s=60.0)
        with pytest.raises(EnvironmentFailed) as caught:
            await hanging.step("x")
        await among.aclose()
        return caught.value.message

    said, place = asyncio.run(one()).split("; it was at ")
    assert said == "Counting.step did not answer within 0.5 s"
    assert re.fullmatch(r".*/tests/support/environment_cases\.py, line \d+, in step", place)


def test_what_a_state_says_of_its_process_does_not_keep_an_environment_from_being_made_again(tmp_path: Path) -> None:
    async def two() -> list[str]:
        place = "tests.support.fakes_resumable:WithPlace"
        host = LocalWorkers((COUNTING, place), worker_memory_gb=1.0)
        among, journal = ProcessEnvironments(host, num_workers=1, timeout_s=10.0), Journal(tmp_path / "j", prompts="p")
        fatal = await started(among, fatal="b")
        steady = EnvironmentSession(
            among,
            place,
            {},
            "WithPlace",
            journal=journal,
            trajectory="stream-0-000000-0000",
        )
        await steady.start(MESSAGES)
        said = [(await steady.step("x")).observations[0]["content"]]
        with pytest.raises(EnvironmentFailed):
            await fatal.step("b")
        said += [(await steady.step("y")).observations[0]["content"]]
        await steady.close()
        await fatal.close()
        await among.aclose()
        journal.close()
        return said

    assert asyncio.run(two()) == ["7 + 1", "7 + 2"]


def asynchronous(among: ProcessEnvironments, **extras: Any) -> EnvironmentSession:
    return EnvironmentSession(among, ASYNCHRONOUS, extras, "Asynchronous")


def test_asynchronous_environments_of_one_worker_are_in_their_steps_together() -> None:
    async def play() -> list[str]:
        among = environments(1, spec=ASYNCHRONOUS)
        sessions = [asynchronous(among, sleep_s=0.5) for _ in range(40)]
        await asyncio.gather(*(each.start(MESSAGES) for each in sessions))
        results = await asyncio.gather(*(each.step("x") for each in sessions))
        assert {(each.reward, each.done) for each in results} == {(1.25, False)}
        assert (await sessions[0].step("stop")).truncated
        assert await sessions[0].metrics() == {"correct": 2.0, "brief": 0.5}
        for each in sessions:
            await each.close()
        await among.aclose()
        return [each.observations[0]["content"] for each in results]

    said = asyncio.run(play())
    assert len({each.partition(" in ")[2] for each in said}) == 1
    assert max(int(each.partition(" in ")[0]) for each in said) == 40


def test_a_hanging_or_broken_step_costs_an_asynchronous_environments_neighbours_nothing(tmp_path: Path) -> None:
    async def play() -> tuple[list[str], str]:
        among = environments(1, timeout_s=1.0, spec=ASYNCHRONOUS)
        hanging = asynchronous(among, closed=str(tmp_path / "closed"))
        broken, steady = asynchronous(among), asynchronous(among)
        await asyncio.gather(hanging.start(MESSAGES), broken.start(MESSAGES), steady.start(MESSAGES))
        before = (await steady.step("x")).observations[0]["content"]
        caught = await asyncio.gather(hanging.step("hang"), broken.step("break"), return_exceptions=True)
        assert before.partition(" in ")[2] == (await steady.step("x")).observations[0]["content"].partition(" in ")[2]
        await among.aclose()
        return [str(each).partition(" at ")[0] for each in caught], (tmp_path / "closed").read_text()

    reasons, closed = asyncio.run(play())
    assert reasons == ["Asynchronous.step did not answer within 1 s", "KeyError: 'broken'"]
    assert closed == "closed\n"


@pytest.mark.parametrize(("spec", "most"), [(COUNTING, 6), (ASYNCHRONOUS, os.cpu_count() or 1)])
def test_there_are_as_many_workers_as_environments_that_block_and_of_others_as_cores(spec: str, most: int) -> None:
    async def play() -> int:
        host = LocalWorkers((spec,), worker_memory_gb=1.0)
        among = ProcessEnvironments(host, num_workers=None, timeout_s=10.0)
        sessions = [EnvironmentSession(among, spec, {}, "Environment") for _ in range(6)]
        before = descendants(os.getpid())
        await asyncio.gather(*(each.start(MESSAGES) for each in sessions))
        workers = len(descendants(os.getpid())) - len(before) - 1  # the supervisor
        await among.aclose()
        return workers

    assert asyncio.run(play()) == min(6, most)


@pytest.mark.slow
def test_workers_import_what_they_need_under_another_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    site = other / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    numpy = Path(importlib.util.find_spec("numpy").origin).parent  # type: ignore[union-attr, arg-type]
    for name in (numpy, *numpy.parent.glob("numpy.libs")):
        (site / name.name).symlink_to(name)
    (site / "only_there.py").write_text(
        "from tests.support.environment_cases import Counting\n\n\nclass There(Counting):\n    pass\n"
    )

    async def play() -> dict[str, float]:
        workers = LocalWorkers(("only_there:There",), worker_memory_gb=1.0, python=str(other / "bin/python"))
        among = ProcessEnvironments(workers, num_workers=1, timeout_s=10.0)
        session = EnvironmentSession(among, "only_there:There", {}, "There")
        await session.start(MESSAGES)
        await session.step("x")
        metrics = await session.metrics()
        await among.aclose()
        return metrics

    assert asyncio.run(play())["steps"] == 1.0
    assert violations_in_process(["only_there:There"], str(other / "bin/python")) == []
    (violation,) = violations_in_process(["only_there:There"])
    assert "No module named 'only_there'" in str(violation)


def test_a_worker_loads_neither_the_schema_nor_what_reads_and_checks_it() -> None:
    code = "import sys, skyrl_train.rollout.hosts.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unneeded = {f"skyrl_train.config.{name}" for name in ("schema", "sft", "docs", "door", "rules", "derived")}
    assert unneeded & {*done.stdout.split()} == set()


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    (violation,) = violations_in_process([COUNTING], "/no/such/bin/python")
    assert str(violation).startswith(
        "environment.python: must be an interpreter that can be run; got '/no/such/bin/python'"
    )


def test_one_that_answers_otherwise_when_it_is_made_again_fails() -> None:
    async def two() -> str:
        among = environments()
        fatal, steady = await started(among, fatal="b"), await started(among, random=True)
        await steady.step("x")
        with pytest.raises(EnvironmentFailed):
            await fatal.step("b")
        with pytest.raises(EnvironmentFailed) as caught:
            await steady.step("y")
        await among.aclose()
        return caught.value.message

    assert asyncio.run(two()) == (
        "another environment ended the worker that Counting shared with it; made again, it answered otherwise at step"
    )


def test_there_are_at_most_as_many_workers_as_asked_for_and_waiting_is_no_part_of_the_deadline() -> None:
    async def many() -> set[float]:
        among = environments(2, timeout_s=2.0)
        sessions = await asyncio.gather(*(started(among, slow_s=0.6) for _ in range(10)))
        await asyncio.gather(*(session.step("x") for session in sessions))
        processes = {(await session.metrics())["process"] for session in sessions}
        await among.aclose()
        return processes

    assert len(asyncio.run(many())) == 2


def test_nothing_is_left_of_the_processes_after_the_end() -> None:
    before = set(descendants(os.getpid()))

    async def one() -> set[int]:
        among = environments()
        await started(among)
        during = set(descendants(os.getpid())) - before
        await among.aclose()
        return during

    during = asyncio.run(one())
    assert len(during) == 2  # the supervisor and one worker
    assert not any(map(is_running, during))


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"environment.env_class.start: must be plain data.*isolation=thread"):
        environments(spec={"_target_": COUNTING, "start": object()})


def test_arguments_reach_the_worker() -> None:
    async def one() -> str:
        spec = {"_target_": COUNTING, "start": 41}
        among = environments(spec=spec)
        session = EnvironmentSession(among, spec, {}, "Counting")
        await session.start(MESSAGES)
        result = await session.step("x")
        await among.aclose()
        return str(result.observations[0]["content"])

    assert asyncio.run(one()) == "42"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import os; os._exit(4)", "ended its process, which exited with status 4"),
        ("import ctypes; ctypes.string_at(0)", "ended its process, which was ended by SIGSEGV"),
        ("raise ValueError('no')", "ValueError: no"),
        ("class Env: pass", "is no argument of harmful:Env"),
    ],
)
def test_a_module_that_harms_who_imports_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, told: str
) -> None:
    (tmp_path / "harmful.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    (first, *_) = violations_in_process(["harmful:Env"])
    assert "environment.env_class" in first.field
    assert told in str(first)
    assert "harmful" not in sys.modules


def test_workers_of_a_module_that_leaves_a_thread_behind_import_it_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(source + f"from {COUNTING.partition(':')[0]} import Counting\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def one() -> float:
        among = environments(spec="threaded:Counting")
        session = EnvironmentSession(among, "threaded:Counting", {}, "Counting")
        await session.start(MESSAGES)
        result = await session.step("x")
        await among.aclose()
        return result.reward

    assert asyncio.run(one()) == 0.0


def test_a_supervisor_that_is_gone_is_replaced_also_where_workers_import_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded_again.py").write_text(source + f"from {COUNTING.partition(':')[0]} import Counting\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def three() -> list[str]:
        host = LocalWorkers(("threaded_again:Counting",), worker_memory_gb=1.0)
        among, said = ProcessEnvironments(host, num_workers=1, timeout_s=10.0), []
        for is_heard in (True, False, True):
            session = EnvironmentSession(among, "threaded_again:Counting", {}, "Counting")
            await session.start(MESSAGES)
            said.append((await session.step("x")).observations[0]["content"])
            supervisor: Any = host._host
            os.kill(supervisor._process.pid, signal.SIGKILL)
            while is_heard and host._host is not None:
                await asyncio.sleep(0.01)
            supervisor._process.wait(10)
            supervisor.hear()  # as whoever sends it something does
        await among.aclose()
        return said

    assert asyncio.run(asyncio.wait_for(three(), 60)) == ["1", "1", "1"]


def test_a_process_in_which_a_thread_runs_is_not_to_be_forked() -> None:
    over = threading.Event()
    beside = threading.Thread(target=over.wait, args=(60.0,))
    beside.start()
    try:
        known = _load({"specs": [], "tools": [], "rewards": {}, "registry": False})
    finally:
        over.set()
        beside.join()
    assert not known["forkable"]


def test_the_bundled_environment_runs_on_threads_and_others_in_processes() -> None:
    assert not uses_processes(EnvironmentConfig())
    assert uses_processes(EnvironmentConfig(env_class="gsm8k"))
    assert uses_processes(EnvironmentConfig(env_class=COUNTING))
    assert uses_processes(EnvironmentConfig(env_class=None))
    assert not uses_processes(EnvironmentConfig(env_class=COUNTING, isolation="thread"))
    assert uses_processes(EnvironmentConfig(isolation="process"))


def rollouts(prompts: list[Prompt], **environment: Any) -> RolloutBatch:
    config = EnvironmentConfig(**{"env_class": SCRIPTED, "max_failed_fraction": 1.0, **environment})
    generator = RolloutGenerator(FakeEngine(lambda _: ANSWER), TOKENIZER, GeneratorConfig(max_turns=3), config, 0)
    try:
        return generator.generate(
            prompts, n_samples_per_prompt=2, sampling=SamplingParams(), global_step=1, purpose="train"
        )
    finally:
        generator.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", [{"env_class": SCRIPTED}, {"env_class": "word_problems"}, {"env_class": "gsm8k_multi_turn"}]
)
def test_rollouts_are_the_same_on_threads_and_in_processes(others: dict[str, Any]) -> None:
    steps = [go_on_with("Try again", 0.25), done_with(1)]
    prompts = make_prompts(3, steps=steps, reward_spec={"ground_truth": "4", "method": "rule"})
    prompts += [replace(make_prompts(1, steps=[done_with("x")], reward_spec={"ground_truth": "5"})[0], uid="bad")]
    on_threads = rollouts(prompts, isolation="thread", **others)
    assert rollouts(prompts, isolation="process", num_workers=2, **others) == on_threads
    assert any(trajectory.reward for trajectory in on_threads.trajectories if not trajectory.failed)


def test_too_many_failures_end_the_run_with_their_reasons() -> None:
    prompts = make_prompts(2, steps=[done_with("x")])
    with pytest.raises(SkyrlTrainError, match=r"4 of 4|[123] of 4 trajectories failed"):
        rollouts(prompts, max_failed_fraction=0.0)


@pytest.mark.slow
def test_a_process_that_is_asked_to_end_does_so_while_an_environment_holds_the_interpreter() -> None:
    """A catastrophic regular expression in a worker; SIGTERM raises in the main thread, which waits for the rollout."""
    code = """
import signal, sys, time
from tests.unit.rollout.test_env_processes import rollouts, make_prompts
from tests.reliability.hostile_environments import HOSTILE
def end(*_): raise SystemExit(7)
signal.signal(signal.SIGTERM, end)
print("begins", flush=True)
rollouts(make_prompts(2, deed="a catastrophic regular expression"), env_class=HOSTILE, step_timeout_s=60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        deadline = time.monotonic() + 60
        while len(descendants(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 7
        while any(map(is_running, family)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_running, family))
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]
        process.wait(timeout=20)


@pytest.mark.parametrize(
    "data", [b"\xff" * 8, b"\0\0\0\x01x", b"\0\0\0\x03NaN", b"\0\0\x10\0" + b"[" * 4096, b"\0\0\0\x02\xff\xff"]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        list(Frames().feed(data))


def test_messages_arrive_whole_however_they_are_cut() -> None:
    messages: list[Any] = [{"a": [1, 2.5, None, True, "\ud800 ü"]}, "x" * 1000, 3]
    data = b"".join(map(frame, messages))
    frames = Frames()
    assert [m for at in range(len(data)) for m in frames.feed(data[at : at + 1])] == messages
    with pytest.raises(ValueError, match="at most"):
        frame("x" * (64 << 20))


def test_what_environments_print_is_logged_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printing.py").write_text(
        "import os\n"
        "class Printing:\n"
        "    def __init__(self, env_config, extras): os.write(2, b'made: the trainer knows hunter22-of-it, ')\n"
        "    def init(self, prompt): return prompt, {}\n"
        "    def step(self, action):\n"
        "        print('password=of-another step', action)\n"
        "        os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("skyrl_train.telemetry.logs.redaction._learned", [])
    learn_secrets("hunter22-of-it", "api_key")
    log = tmp_path / "environments.log"
    log.write_bytes(b"of the run before\n" * 20)
    monkeypatch.setattr(env_local, "_MAX_LOG_BYTES", 300)

    async def play() -> None:
        workers = LocalWorkers(("printing:Printing",), worker_memory_gb=1.0, log=log)
        among = ProcessEnvironments(workers, num_workers=1, timeout_s=10.0)
        session = EnvironmentSession(among, "printing:Printing", {}, "Printing")
        await session.start(MESSAGES)
        with pytest.raises(EnvironmentFailed):
            await session.step("x")
        await among.aclose()

    asyncio.run(play())
    assert log.read_text() == "made: the trainer knows <redacted>, password=<redacted> step x\n"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_waits_for_environments_are_counted_answered_or_not(isolation: str) -> None:
    async def play(activity: Activity) -> ProcessEnvironments | ThreadEnvironments:
        host = LocalWorkers((COUNTING,), worker_memory_gb=1.0)
        among: ProcessEnvironments | ThreadEnvironments
        if isolation == "thread":
            among = ThreadEnvironments(num_workers=1, timeout_s=0.6, around=activity.environment)
        else:
            among = ProcessEnvironments(host, num_workers=1, timeout_s=0.6, around=activity.environment)
            await among._host.ready()
        quick, slow = (EnvironmentSession(among, COUNTING, {"slow_s": s}, "Counting") for s in (0.3, 1.5))
        await quick.start(MESSAGES)
        await quick.step("x")
        await slow.start(MESSAGES)
        with pytest.raises(EnvironmentFailed):
            await slow.step("x")
        await among.aclose()
        return among

    activity = Activity()
    assert asyncio.run(play(activity)).num_given_up == 1
    assert 0.85 < activity.take().metrics["timing/wait/environments"] < 10.0
