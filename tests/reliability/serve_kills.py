"""kill -9 of a server of Tinker's API while clients train and sample, and what must be so of their answers in the end: they
are those of clients whose server was left alone, byte for byte: losses and log-probabilities of every pass, sampled tokens,
and the log-probabilities of the final weights.

Servers are killed by turns at an operation, so that a verb is under way (behind a line of the journal that is on disk and
whose answer nobody has, or between two files of an adapter), and at a random moment. The same command starts each again.
Clients are processes of their own, one a tenant; they go on by sending what was not answered once more, as the SDK does.

    python -m tests.reliability.serve_kills --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import httpx

from skyrl_train.system.files import log_lines
from skyrl_train.system.processes import end_with_parent
from tests.reliability.file_operations import FileOperations
from tests.support.serve_cases import BASE, Caller, datum

_DEADLINE_S = 3600.0
_START_TIMEOUT_S = 120.0
_OPERATIONS = 60
"""Of a server's life, at most: its start has about ten."""
_LIFE_S = 1.5
_SETTINGS = ("deterministic=true",)
KEYS = {"tml-key-of-ann": "ann", "tml-key-of-bob": "bob"}


class Patient:
    """What `Caller` speaks through: sends a request again until it is answered, whoever answers it."""

    def __init__(self, port: int) -> None:
        self._port, self._client = port, httpx.Client(timeout=60)
        self.num_retries = 0

    def post(self, route: str, **kwargs: Any) -> httpx.Response:
        """The answer to a POST; one that says try again (408) is no answer."""
        ends = time.monotonic() + _DEADLINE_S
        while time.monotonic() < ends:
            with contextlib.suppress(httpx.TransportError):
                found = self._client.post(f"http://127.0.0.1:{self._port}{route}", **kwargs)
                if found.status_code not in (408, 503):
                    return found
            self.num_retries += 1
            time.sleep(0.02)
        raise TimeoutError(route)


def played(port: int, key: str, stop: Callable[[int], bool]) -> list[Any]:
    """Train and sample as one tenant until told to stop, by the number of steps; return all that was answered."""
    caller = Caller(Patient(port), key)
    session, told = caller.session(), []
    model = caller.model(session)
    sampler, step = "", 0
    while not stop(step):
        first = 1 + 3 * step
        row = [1 + (step + index) % 50 for index in range(6)]
        promises = [
            caller.train(model, first, [datum(row), datum(row[::-1])]),
            caller.step(model, first + 1, learning_rate=1e-2),
        ]
        told += [caller.outcome(each) for each in promises]
        if step % 3 == 0:
            sampler = caller.snapshot(model, first + 2, step)
        else:
            told.append(caller.logprobs(model, first + 2))
        answer = caller.outcome(caller.sample(sampler, step, num_samples=2))
        told.append(answer["sequences"])
        step += 1
    return [step, told, caller.logprobs(model, 1 + 3 * step)]


@dataclass
class Found:
    """What came of the kills."""

    kills: int = 0
    inside: int = 0
    """Kills while a verb that was accepted had no outcome on the disk."""
    steps: list[int] = field(default_factory=list)
    """Of each client."""
    num_retries: int = 0
    differing: list[str] = field(default_factory=list)


def run(folder: Path, *, kills: int, seed: int = 0) -> Found:
    """Kill servers so often, let the clients end, and compare with clients of a server that was left alone."""
    found, chosen = Found(), random.Random(seed)
    port, stopped = _free_port(), folder / "stop"
    clients = {key: _client(folder / f"disturbed-{name}", port, key, stopped) for key, name in KEYS.items()}
    log = folder / "disturbed.log"
    while found.kills < kills:
        announced = _announced(log)
        at_operation = chosen.randint(8, _OPERATIONS) if found.kills % 2 == 0 else None
        server = _server(folder / "disturbed", port, at_operation)
        if at_operation is None:
            _wait_for(lambda before=announced: _announced(log) > before, server, log)
            time.sleep(chosen.random() * _LIFE_S)
            os.killpg(server, signal.SIGKILL)
        if _waited(server, _START_TIMEOUT_S) != -signal.SIGKILL:
            raise RuntimeError(log.read_text()[-2000:])
        found.kills += 1
        found.inside += _has_open_verb(folder / "disturbed" / "journal.jsonl")
    stopped.touch()
    server = _server(folder / "disturbed", port, None)
    disturbed = {key: _answers(pid, folder / f"disturbed-{KEYS[key]}") for key, pid in clients.items()}
    _end(server)
    found.steps = [answers[0] for answers in disturbed.values()]
    for key, answers in disturbed.items():
        port = _free_port()
        server = _server(folder / f"alone-{KEYS[key]}", port, None)
        pid = _client(folder / f"alone-{KEYS[key]}-told", port, key, None, steps=answers[0])
        expected = _answers(pid, folder / f"alone-{KEYS[key]}-told")
        _end(server)
        if answers != expected:
            parts = zip(answers[1], expected[1], strict=False)
            place = next((number for number, (one, other) in enumerate(parts) if one != other), "the last")
            found.differing.append(f"{KEYS[key]}: answer {place} of {len(expected[1])}")
    return found


def _server(folder: Path, port: int, killed_at: int | None) -> int:
    """Start `skyrl-serve` in a process of its own."""
    keys = folder.parent / "keys"
    if not keys.exists():
        keys.write_text("".join(f"{key} {tenant}\n" for key, tenant in KEYS.items()))
        keys.chmod(0o600)
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    with _as_child(folder.parent / f"{folder.name}.log"):
        operations = FileOperations(folder, killed_at)
        from skyrl_train.main_serve import main

        append_log: Any = import_module("skyrl_train.system.files.append_log")
        to_disk = append_log.bring_to_disk

        def counted(descriptor: int, path: Path) -> None:
            operations.add()
            to_disk(descriptor, path)
            operations.add()

        append_log.bring_to_disk = counted
        words = ["--folder", str(folder), "--port", str(port), "--name", BASE, "--keys", str(keys), *_SETTINGS]
        main(words)
    os._exit(1)


def _client(told: Path, port: int, key: str, stopped: Path | None, *, steps: int = 0) -> int:
    """Start a client, which writes what it was told."""
    pid = os.fork()
    if pid:
        return pid
    with _as_child(told.with_suffix(".log")):
        answers = played(port, key, lambda step: step >= steps if stopped is None else stopped.exists())
        told.with_suffix(".json").write_text(json.dumps(answers))
        os._exit(0)
    os._exit(1)


@contextlib.contextmanager
def _as_child(log: Path) -> Iterator[None]:
    """Within it, this is a process of its own group that prints to a file; it must not come back."""
    try:
        end_with_parent(signal.SIGKILL)
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target in (1, 2):
            os.dup2(descriptor, target)
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        yield
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.stderr.flush()


def _announced(log: Path) -> int:
    """How often a server has said that it can be asked."""
    return log.read_text().count("export TINKER_BASE_URL") if log.exists() else 0


def _wait_for(happened: Callable[[], bool], server: int, log: Path) -> None:
    """Raises RuntimeError where the server ends before it happens."""
    ends = time.monotonic() + _START_TIMEOUT_S
    while not happened():
        if os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.monotonic() > ends:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.01)


def _answers(pid: int, told: Path) -> list[Any]:
    if _waited(pid, _DEADLINE_S):
        raise RuntimeError(told.with_suffix(".log").read_text()[-2000:])
    answers: list[Any] = json.loads(told.with_suffix(".json").read_text())
    return answers


def _end(pid: int) -> None:
    os.killpg(pid, signal.SIGTERM)
    _waited(pid, _START_TIMEOUT_S)


def _waited(pid: int, timeout_s: float) -> int:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end within {timeout_s:g} s")


def _has_open_verb(journal: Path) -> bool:
    """Whether what a server left has a request without an outcome."""
    accepted: set[str] = set()
    for _, line in log_lines(journal):
        accepted |= {line["accept"]} if "accept" in line else set()
        accepted -= {line.get("outcome", "")}
    return bool(accepted)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def import_server() -> None:
    """Import what servers need, for children to share."""
    import peft  # noqa: F401
    import torch
    import uvicorn  # noqa: F401

    import skyrl_train.serve
    from skyrl_train import main_serve, runs  # noqa: F401

    torch.set_num_threads(1)
    skyrl_train.serve.schema()
    face: Any = skyrl_train.serve
    for name in face.__all__:
        getattr(face, name)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Print how it went; the exit status is 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    import_server()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), kills=arguments.kills, seed=arguments.seed)
    print(
        f"{found.kills} kills, {found.inside} inside a verb, {sum(found.steps)} steps of {len(found.steps)} clients, "
        f"{time.monotonic() - began:.0f} s: {found.differing or 'all answers as undisturbed'}"
    )
    sys.exit(bool(found.differing))


if __name__ == "__main__":
    main()
