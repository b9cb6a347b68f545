"""What each process of a run is doing, as a process beside it finds out: one that hangs, is stopped, or never answers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.telemetry.logs import stacks

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes answer on Linux alone")
HANGS = """
import re, sys, time
from skyrl_train.telemetry.logs import stacks

def wait_for_what_never_comes():
    print("ready", flush=True)
    time.sleep(60)

def compute_for_ever():
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 40 + "b")  # which holds the interpreter all the while

stacks.answer("worker " + sys.argv[1])
locals()[sys.argv[1]]()
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(stacks.RUN_VARIABLE, "")
    stacks.begin("trainer")
    yield
    stacks._forget()


def started(*command: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def ended(*children: subprocess.Popen[str]) -> None:
    for child in children:
        child.kill()
        child.communicate(timeout=10)


def each_process(text: str) -> dict[int, str]:
    """By process, what is told of it."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            pid = int(line.partition(", pid ")[2].partition(":")[0])
        found[pid] = found.get(pid, "") + line + "\n"
    return found


@pytest.mark.usefixtures("run")
def test_processes_that_wait_compute_or_are_stopped_are_each_told() -> None:
    waits, computes, stopped = (
        started(sys.executable, "-c", HANGS, name)
        for name in ("wait_for_what_never_comes", "compute_for_ever", "wait_for_what_never_comes")
    )
    other = started("sh", "-c", "echo ready; exec sleep 60")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        told = each_process(stacks.of_run())
    finally:
        ended(waits, computes, stopped, other)

    assert told[waits.pid].startswith(f"worker wait_for_what_never_comes, pid {waits.pid}:\n")
    assert "in wait_for_what_never_comes" in told[waits.pid]
    assert "in compute_for_ever" in told[computes.pid], "though it holds the interpreter"
    assert told[stopped.pid].rstrip().endswith("is stopped by a signal (state T), as by SIGSTOP, and can say nothing")
    assert "sleep 60, pid" in told[other.pid]
    assert "is no process that answers" in told[other.pid]
    assert "trainer, pid" in told[os.getpid()]
    assert "test_stacks.py" in told[os.getpid()], "whoever asks tells, too"


@pytest.mark.usefixtures("run")
def test_the_processes_of_another_run_are_not_told() -> None:
    first = os.environ[stacks.RUN_VARIABLE]
    own = started(sys.executable, "-c", HANGS, "wait_for_what_never_comes")
    stacks._forget()
    other = subprocess.run(
        [sys.executable, "-c", "from skyrl_train.telemetry.logs import stacks; stacks.begin('x'); print(stacks.of_run())"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert [text.partition(",")[0] for text in each_process(other.stdout).values()] == ["x"]
        assert list(each_process(stacks.here(first))) == [own.pid], "this process answers no more"
    finally:
        ended(own)


@pytest.mark.usefixtures("run")
def test_a_forked_process_answers_for_itself() -> None:
    ready, forked = os.pipe(), os.fork()
    if forked == 0:
        stacks.answer("fork")
        os.write(ready[1], b"x")
        threading.Event().wait(30)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x"
        told = each_process(stacks.of_run())
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
    assert told[forked].startswith(f"fork, pid {forked}:")
    assert "test_a_forked_process_answers_for_itself" in told[forked]
    assert told[os.getpid()].startswith("trainer, pid")


@pytest.mark.usefixtures("run")
def test_where_a_process_is_names_the_innermost_line_that_is_of_no_library(tmp_path: Path) -> None:
    module = tmp_path / "users.py"
    module.write_text("import time\n\ndef wait():\n    print('ready', flush=True); time.sleep(60)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from skyrl_train.telemetry.logs import stacks; "
    code += "import users; "
    child = started(sys.executable, "-c", textwrap.dedent(code + "stacks.answer('w'); users.wait()"))
    try:
        assert stacks.innermost(child.pid, timeout_s=5.0) == f"{module}, line 4, in wait"
        os.kill(child.pid, signal.SIGSTOP)
        assert stacks.innermost(child.pid, timeout_s=0.2) == ""
    finally:
        ended(child)
    assert stacks.innermost(child.pid, timeout_s=0.2) == "", "it is gone"


@pytest.mark.usefixtures("run")
def test_a_text_makes_the_process_that_unpickles_it_answer() -> None:
    sent = pickle.dumps({"skyrl_train": stacks.Answering("vLLM")}).hex()
    code = f"import pickle, time; got = pickle.loads(bytes.fromhex({sent!r})); assert got == dict(skyrl_train='vLLM'); "
    child = started(sys.executable, "-c", code + "print('ready', flush=True); time.sleep(60)")
    try:
        assert each_process(stacks.of_run())[child.pid].startswith(f"vLLM, pid {child.pid}:\n")
    finally:
        ended(child)


@pytest.mark.usefixtures("run")
def test_nodes_that_cannot_be_asked_hide_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("the cluster is gone")

    monkeypatch.setattr(stacks, "elsewhere", [broken, lambda: "node 10.0.0.7:\n  policy worker"])
    told = stacks.of_run()
    assert "trainer, pid" in told
    assert told.endswith(
        "processes of other nodes cannot be asked: the cluster is gone\nnode 10.0.0.7:\n  policy worker"
    )


@pytest.mark.usefixtures("run")
def test_a_file_that_is_closed_while_files_are_listed_hides_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: ["999999", *listed(folder)])
    assert f"trainer, pid {os.getpid()}" in stacks.of_run()


def test_a_process_of_no_run_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stacks.RUN_VARIABLE, raising=False)
    told = stacks.here()
    assert told.startswith(f"this process, pid {os.getpid()}:\n")
    assert "test_stacks.py" in told


def test_a_process_that_may_open_few_files_runs_on_unasked() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
    code += "from skyrl_train.telemetry.logs import stacks; stacks.begin('x'); print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("went on\n", "")
