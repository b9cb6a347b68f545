"""A host's processes: how they end is told, whatever is asked of it; what it leaves under attack:
`tests/reliability/test_process_hosts.py`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyrl_train
from skyrl_train.system.processes import ProcessHost, StartedProcess, manner
from tests.support.process_trees import is_running

Start = Callable[..., StartedProcess]


@pytest.fixture
def host() -> Iterator[ProcessHost]:
    host = ProcessHost()
    yield host
    host.close()


@pytest.fixture
def start(host: ProcessHost, tmp_path: Path) -> Start:
    def start(*words: str, **message: object) -> StartedProcess:
        place = {"folder": str(tmp_path), "log": str(tmp_path / "log"), **message}
        return host.start({"words": words, **place})

    return start


def end_of(started: StartedProcess, within_s: float = 20.0) -> int | str | None:
    ends = time.monotonic() + within_s
    while started.poll() is None and time.monotonic() < ends:
        time.sleep(0.01)
    return started.ended


def test_each_end_is_told(start: Start, tmp_path: Path) -> None:
    assert end_of(start("sh", "-c", "echo said; exit 3")) == 3
    assert (tmp_path / "log").read_text() == "said\n"
    assert end_of(start("sh", "-c", "kill -HUP $$")) == -signal.SIGHUP
    assert str(end_of(start("/no/such/program"))).startswith("FileNotFoundError")
    assert (manner(3), manner(-9), manner(-63)) == (
        "exited with status 3",
        "was ended by SIGKILL",
        "was ended by signal 63",
    )


def test_a_message_that_no_buffer_holds_arrives_whole(start: Start) -> None:
    variables = {f"VARIABLE_{number}": "x" * 100_000 for number in range(10)}
    counted = start(
        "sh", "-c", "exit $(env | grep -c ^VARIABLE_)", environment={**variables, "PATH": os.environ["PATH"]}
    )
    assert end_of(counted) == 10


def test_what_is_asked_to_end_has_its_time_for_it(host: ProcessHost, start: Start, tmp_path: Path) -> None:
    started = start("sh", "-c", "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done")

    async def close() -> None:
        while not (tmp_path / "log").read_text():
            await asyncio.sleep(0.01)
        host.quit(10.0)
        assert await host.until(lambda: host.lost, 20.0)

    assert asyncio.run(asyncio.wait_for(host.until(lambda: started.process, 20.0), 30))
    asyncio.run(close())
    assert (tmp_path / "log").read_text().endswith("bye\n")
    assert (started.ended, host.close()) == (5, 0)


def test_the_end_of_a_supervisor_is_that_of_its_processes(host: ProcessHost, start: Start) -> None:
    started = start(sys.executable, "-S", "-c", "import os, time; os.kill(os.getppid(), 9); time.sleep(60)")
    assert end_of(started) == "was ended with its supervisor, which was ended by SIGKILL"
    ends = time.monotonic() + 10
    while is_running(started.process) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not is_running(started.process)
    assert end_of(start("true")) == "was ended by SIGKILL"


def test_processes_are_started_and_ended_in_one_place() -> None:
    package = Path(skyrl_train.__file__).parent
    control = re.compile(r"killpg|Popen|os\.setsid|os\.fork|start_new_session|posix_spawn")
    found = {file.relative_to(package).parts[:2] for file in package.rglob("*.py") if control.search(file.read_text())}
    assert found == {("system", "processes")}
