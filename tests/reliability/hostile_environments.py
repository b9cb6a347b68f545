"""Environments that do what environments must not: one class, whose data row says which of a hundred things it does.

`BAD` maps a name to what its trajectory must say (a regular expression of its failure, or GOES_ON where nothing is
wrong with the trajectory itself) and to the function that does it, which is called with the environment's answer to a step.
"""

# mypy: disable-error-code="func-returns-value"
from __future__ import annotations

import asyncio
import atexit
import ctypes
import decimal
import fractions
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

HOSTILE = "tests.reliability.hostile_environments:Hostile"
GOES_ON = ""
"""Expected of what is odd, and no failure."""

Output = dict[str, Any]
Deed = Callable[[Output], Any]


class Hostile:
    """Does `extras["deed"]` in the method that the deed's name begins with, in `step` unless it names another."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.deed = extras["deed"]
        self._do("construction", None)

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return self._do("init", (prompt, {}))

    def step(self, action: str) -> Any:
        return self._do("step", good())

    def get_metrics(self) -> Any:
        return self._do("get_metrics", {"solved": 1.0})

    def close(self) -> None:
        self._do("close", None)

    def _do(self, method: str, answer: Any) -> Any:
        where = next(
            (each for each in ("construction", "init", "get_metrics", "close") if self.deed.startswith(each)), "step"
        )
        return BAD[self.deed][1](answer) if where == method and self.deed in BAD else answer


def good() -> Output:
    return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


BAD: dict[str, tuple[str, Deed]] = {}


def bad(name: str, expected: str) -> Callable[[Deed], Deed]:
    def add(deed: Deed) -> Deed:
        BAD[name] = (expected, deed)
        return deed

    return add


def answers(name: str, expected: str, **fields: Any) -> None:
    """A step whose answer has these fields; one that is `...` is missing."""
    BAD[name] = (expected, lambda answer: {key: v for key, v in {**answer, **fields}.items() if v is not ...})


def raises(name: str, expected: str, make: Callable[[], BaseException]) -> None:
    def deed(answer: Any) -> Any:
        raise make()

    BAD[name] = (expected, deed)


def ends(name: str, expected: str, do: Callable[[], Any]) -> None:
    """A step that does something and then answers as if nothing were."""

    def deed(answer: Any) -> Any:
        do()
        return answer

    BAD[name] = (expected, deed)


LATE = r"environment_timeout: Hostile.\w+ did not answer within"
MESSAGES = [{"role": "user", "content": "go on"}]

# Rewards
REWARDS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    3.5e38,
    -1e300,
    10**400,
    "1",
    None,
    [1.0],
    {},
    1j,
    b"1",
]
REWARDS += [object(), np.array([1.0, 2.0]), np.float64("nan"), decimal.Decimal("1e50"), fractions.Fraction(10**30), len]
for number, reward in enumerate(REWARDS):
    answers(f"reward {number}", r"invalid_reward: Hostile.step returned the reward", reward=reward)
answers("no reward", r"invalid_reward", reward=...)
answers("reward of numpy", GOES_ON, reward=np.float32(1.0))
answers("reward of a truth", GOES_ON, reward=True)
answers("reward with an index", GOES_ON, reward=decimal.Decimal(1))

# Whether it is done
for number, done in enumerate(
    ["False", "True", 1, 0, None, 0.0, [], {}, b"", object(), np.array([True, False]), 10**5000]
):
    answers(
        f"done {number}", r"environment_error: Hostile.step returned 'done' as .*; must be True or False", done=done
    )
answers("no done", r"environment_error: Hostile.step returned no 'done'", done=...)
answers("done of numpy", GOES_ON, done=np.bool_(True))

# What it says
for number, said in enumerate(
    ["text", 3, {"role": "user"}, ["text"], [{"content": "x"}], [{"role": 1, "content": "x"}], [None]]
):
    answers(f"observations {number}", r"invalid_observation: Hostile.step", observations=said)
for number, content in enumerate(
    [3, b"x", {"a": 1}, object(), "\ud800", "a\udfffb", [float("nan")], [b"x"], [{1: 2}], [object()]]
):
    answers(f"content {number}", r"invalid_observation", observations=[{"role": "user", "content": content}])
answers("a surrogate as a role", r"invalid_observation", observations=[{"role": "\ud800", "content": ""}])
answers(
    "a huge observation", r"more than 4,194,304 characters", observations=[{"role": "user", "content": "x" * (8 << 20)}]
)
answers(
    "a huge list of content",
    r"its answer cannot be sent|MemoryError|" + LATE,
    observations=[{"role": "user", "content": ["y" * 1000] * 80_000}],
)


@bad("content in itself", r"invalid_observation: .* nested more than 32 deep")
def _(answer: Output) -> Output:
    content: list[Any] = []
    content.append(content)
    return {**answer, "observations": [{"role": "user", "content": content}]}


@bad("a list without an end", r"invalid_observation: Hostile.step returned count; must be a list")
def _(answer: Output) -> Output:
    return {**answer, "observations": itertools.count()}


for number, output in enumerate([None, (1, 2), "done", 3, [], iter([]), object]):
    BAD[f"output {number}"] = (
        r"environment_error: Hostile.step returned \w+; must be a mapping",
        lambda _, output=output: output,
    )


class Odd(dict):  # type: ignore[type-arg]
    """A mapping that raises when it is looked at."""

    def __contains__(self, key: object) -> bool:
        raise KeyError("odd")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Endless:
    """Cannot be shown in any time."""

    def __repr__(self) -> str:
        while True:
            pass


BAD["a mapping that raises"] = (r"environment_error: KeyError: 'odd'", lambda _: Odd())
answers("a reward that cannot be shown", r"environment_timeout", reward=Endless())

# What init gives
for number, first in enumerate(
    [None, [], "text", ([],), ([], {}, 1), ("text", {}), ([], {}), ([{"role": "user"}], {}), (None, {})]
):
    BAD[f"init {number}"] = (r"environment_error|invalid_observation", lambda _, first=first: first)
BAD["init surrogate"] = (r"invalid_observation", lambda _: ([{"role": "user", "content": "\udc80"}], {}))

# Metrics: what is no number is left out
for number, metrics in enumerate(
    [None, [], "x", {"a": "b", 1: 2}, {"a": float("nan")}, {"\ud800": 1.0}, {"x" * 10**6: 1.0}]
):
    BAD[f"get_metrics {number}"] = (GOES_ON, lambda _, metrics=metrics: metrics)
BAD["get_metrics of many"] = (GOES_ON, lambda _: {str(n): n for n in range(10**5)})

# What it raises
raises("a key of the trainer", "KeyError: 'WANDB_API_KEY'", lambda: ValueError(os.environ["WANDB_API_KEY"]))
raises("raises", r"environment_error: ValueError: unknown city 'Oz'", lambda: ValueError("unknown city 'Oz'"))
raises("raises a StopIteration", r"environment_error: StopIteration: end", lambda: StopIteration("end"))
raises("raises a StopAsyncIteration", r"environment_error: StopAsyncIteration", StopAsyncIteration)
raises("raises GeneratorExit", r"environment_error: GeneratorExit", GeneratorExit)
raises("raises KeyboardInterrupt", r"environment_error: KeyboardInterrupt", KeyboardInterrupt)
raises("raises CancelledError", r"environment_error: CancelledError", asyncio.CancelledError)
raises("raises TimeoutError", r"environment_error: TimeoutError: database", lambda: TimeoutError("database"))
raises("raises what cannot be shown", r"environment_error: Unspeakable", Unspeakable)
raises("raises a surrogate", r"environment_error: ValueError: \?", lambda: ValueError("\ud800"))
raises("raises ten megabytes", r"environment_error: ValueError: x+", lambda: ValueError("x" * 10**7))
raises("raises a group", r"environment_error: BrokenPipeError", BrokenPipeError)
for method in ("construction", "init", "get_metrics"):
    raises(f"{method} raises", r"environment_error: ValueError: no", lambda: ValueError("no"))
    ends(
        f"{method} exits",
        r"environment_error: Hostile.\w+: its worker process exited with status 3",
        lambda: os._exit(3),
    )
    ends(f"{method} hangs", LATE, lambda: time.sleep(600))
raises("close raises", GOES_ON, lambda: ValueError("no"))
ends("close exits", GOES_ON, lambda: os._exit(3))
ends("close hangs", GOES_ON, lambda: time.sleep(600))


@bad("endless recursion", r"environment_error: RecursionError")
def _recurse(answer: Any) -> Any:
    return _recurse(answer)


# What never returns
ends("a loop", LATE, lambda: all(True for _ in iter(int, 1)))
ends("a sleep", LATE, lambda: time.sleep(600))
ends("a catastrophic regular expression", LATE, lambda: re.match(r"(a+)+$", "a" * 40 + "b"))
ends("a power", LATE, lambda: 7 ** (7**12))
ends("a lock", LATE, lambda: [lock.acquire() for lock in [threading.Lock()] for _ in range(2)])
ends("a join", LATE, lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).join)
BAD["a join"] = (LATE, lambda _: _join())
ends("a silent server", LATE, lambda: _silent_server())
ends("a child that is waited for", LATE, lambda: subprocess.run(["sleep", "600"], check=True))
ends("it stops itself", LATE, lambda: os.kill(os.getpid(), signal.SIGSTOP))
ends("it ignores signals", LATE, lambda: [[signal.signal(n, signal.SIG_IGN) for n in (15, 2, 1)], time.sleep(600)])
ends("a loop without the interpreter", LATE, lambda: ctypes.CDLL(None).sleep(600))
ends("a loop that keeps the interpreter's lock", LATE, lambda: ctypes.PyDLL(None).sleep(600))
ends("an event loop", LATE, lambda: asyncio.run(asyncio.sleep(600)))
ends("it reads standard input", GOES_ON, lambda: sys.stdin.read())


def _join() -> None:
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    thread.join()


def _silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


# What takes the process down
GONE = r"environment_error: Hostile.step: its worker process "
ends("os._exit", GONE + "exited with status 7", lambda: os._exit(7))
ends("os._exit with 0", GONE + "exited with status 0", lambda: os._exit(0))
raises("sys.exit", r"environment_error: SystemExit: 3", lambda: SystemExit(3))
ends("os.abort", GONE + "was ended by SIGABRT", os.abort)
ends("a segmentation fault", GONE + "was ended by SIGSEGV", lambda: ctypes.string_at(0))
for name in ("SIGKILL", "SIGTERM", "SIGFPE", "SIGILL", "SIGBUS", "SIGUSR1", "SIGHUP", "SIGQUIT"):
    ends(f"{name} to itself", GONE + f"was ended by {name}", lambda n=name: _signal_and_wait(getattr(signal, n)))
ends("SIGKILL to its group", GONE + "was ended by SIGKILL", lambda: os.killpg(0, signal.SIGKILL))
ends(
    "signal.alarm", GONE + "was ended by SIGALRM", lambda: [signal.setitimer(signal.ITIMER_REAL, 0.05), time.sleep(600)]
)
ends(
    "a virtual timer",
    GONE + "was ended by SIGVTALRM",
    lambda: [signal.setitimer(signal.ITIMER_VIRTUAL, 0.05), list(iter(int, 1))],
)
ends("its own limit of CPU time", GONE + "was ended by SIG(XCPU|KILL)|" + LATE, lambda: _use_up_cpu_time())
ends(
    "the end of its supervisor",
    GONE + "was ended with its supervisor",
    lambda: [os.kill(os.getppid(), 9), time.sleep(600)],
)
ends("exec", GONE + "exited with status 0", lambda: os.execv("/bin/true", ["true"]))
ends("all files closed", GONE + "(exited with status 1|closed its connection)", lambda: os.closerange(0, 4096))
ends("garbage to every file", GONE, lambda: [_write(fd, b"\xff" * 64) for fd in range(3, 400)])
ends("an answer by itself", GONE, lambda: [_write(fd, b"\0\0\0\x02{}") for fd in range(3, 400)])
ends("a huge length to every file", GONE, lambda: [_write(fd, b"\x7f\xff\xff\xff") for fd in range(3, 400)])
ends(
    "a pickle to every file",
    GONE,
    lambda: [_write(fd, b"\0\0\0\x40" + pickle.dumps(Hostile)[:64].ljust(64)) for fd in range(3, 400)],
)


def _signal_and_wait(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def _use_up_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


def _write(descriptor: int, data: bytes) -> None:
    try:
        os.write(descriptor, data)
    except OSError:
        return


# Memory
MEMORY = r"environment_error: (MemoryError|Hostile.step: its worker process)|" + LATE
ends("ten gigabytes", MEMORY, lambda: bytearray(10 << 30))
ends(
    "ten gigabytes of numpy",
    r"environment_error: (_ArrayMemoryError|MemoryError|Hostile.step)",
    lambda: np.ones(10 << 27),
)
ends("a list that grows", MEMORY, lambda: _grow())
ends("a text that doubles", MEMORY, lambda: _double())
ends("json that is too much", MEMORY, lambda: json.dumps(["x" * 1000] * 600_000))


def _grow() -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 24))


def _double() -> None:
    text = "x" * 1024
    while True:
        text += text


# What is left behind, or changed for others: the trajectory itself goes on, and so does the next one
ends("standard output closed", GOES_ON, lambda: [sys.stdout.close(), sys.stderr.close(), os.close(1), os.close(2)])
ends("megabytes printed", GOES_ON, lambda: [print("x" * 1000) for _ in range(3000)])
ends("a fork", GOES_ON, os.fork)
ends("a child left behind", GOES_ON, lambda: subprocess.Popen(["sleep", "600"]))
ends("a daemon left behind", GOES_ON, lambda: _daemon())
ends("a thread left behind", GOES_ON, lambda: threading.Thread(target=time.sleep, args=(600,)).start())
ends("a timer left behind", GOES_ON, lambda: signal.setitimer(signal.ITIMER_REAL, 0.2))
ends("a pool of processes", GOES_ON, lambda: multiprocessing.get_context("fork").Pool(2))
ends("its parent's death ignored", GOES_ON, lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))
ends("a new session", GOES_ON, lambda: _quietly(os.setsid))
ends("collection switched off", GOES_ON, gc.disable)
ends("a low limit of recursion", GOES_ON, lambda: sys.setrecursionlimit(sys.getrecursionlimit() // 2))
ends("another folder", GOES_ON, lambda: os.chdir("/"))
ends("an empty environment", GOES_ON, lambda: os.environ.clear())
ends("no modules", GOES_ON, lambda: sys.modules.clear())
ends("json replaced", r".*", lambda: setattr(json, "dumps", lambda *_, **__: "{"))
ends("a handler of its end", GOES_ON, lambda: atexit.register(time.sleep, 600))
ends("a trace", GOES_ON, lambda: sys.settrace(lambda *_: None))
ends("files without end", r"environment_error: OSError|", lambda: [open("/dev/null") for _ in range(5000)])  # noqa: SIM115


def _quietly(function: Callable[[], Any]) -> None:
    try:
        function()
    except OSError:
        return


def _daemon() -> None:
    """A process in a session of its own, whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def names() -> Iterator[str]:
    return iter(BAD)
