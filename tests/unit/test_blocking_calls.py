"""Nothing waits for ever: every call that may block has a deadline, or a reason here why it needs none.

The rules read the source. They know the waits of Ray, futures, queues, locks, threads, processes, sockets, HTTP clients,
collectives and the disk by the names of their calls; a name of our own that means the same is followed to where it waits.
"""

from __future__ import annotations

import re

import pytest

from tests.source_calls import Call, Exceptions, Rule, calls_in, calls_of, offences

_WAITING_MODULES = ("ray", "asyncio", "connection", "concurrent.futures", "futures", "")
_LOCK = re.compile(r"lock|mutex|semaphore|condition|_in_order", re.IGNORECASE)


def _bare(call: Call, *names: str) -> bool:
    """A method of one of these names that is given neither a position nor a timeout."""
    is_method = bool(call.receiver) and not call.is_entry and call.name in names
    return is_method and call.num_arguments == 0 and not call.has_keyword("timeout", "timeout_s")


def of_ray(call: Call) -> bool:
    """`ray.get`, `ray.wait`."""
    return call.target in ("ray.get", "ray.wait") and not call.has_keyword("timeout")


def of_futures(call: Call) -> bool:
    """`future.result()`, `future.exception()`, and `wait` of several."""
    several = call.name in ("wait", "as_completed") and call.receiver in _WAITING_MODULES
    return _bare(call, "result", "exception") or (several and not call.has_keyword("timeout") and not call.is_entry)


def of_threads(call: Call) -> bool:
    """Joins of threads and processes, waits for events, and executors, which join their threads."""
    pool = re.search(r"(Thread|Process)PoolExecutor$|Pool$", call.target) and call.is_entry
    shutdown = call.name == "shutdown" and call.keyword("wait") != "False" and not call.has_keyword("timeout")
    return _bare(call, "join", "wait") or bool(pool) or (shutdown and bool(call.receiver))


def of_locks(call: Call) -> bool:
    """`lock.acquire()` and `with lock`."""
    return _bare(call, "acquire") or (call.is_entry and not call.num_arguments and bool(_LOCK.search(call.name)))


def of_queues(call: Call) -> bool:
    """`queue.get()`, and queues with a bound, whose `put` may block."""
    bounded = call.name in ("Queue", "LifoQueue", "JoinableQueue") and bool(call.num_arguments or call.has_keyword("maxsize"))
    return _bare(call, "get") or bounded


def of_subprocesses(call: Call) -> bool:
    """`subprocess.run` and its kin, `communicate`, and `os.waitpid` without WNOHANG."""
    runs = call.receiver == "subprocess" and call.name in ("run", "call", "check_call", "check_output")
    waits = call.target in ("os.wait", "os.waitpid", "os.wait4") and "WNOHANG" not in call.text
    return ((runs or call.name == "communicate") and not call.has_keyword("timeout")) or waits


def of_networks(call: Call) -> bool:
    """Sockets, HTTP clients, pipes between processes, and groups of processes that meet."""
    clients = call.receiver in ("requests", "httpx") and call.name[:1].isalpha() and call.name.lower() in _HTTP
    meetings = call.name in ("init_process_group", "new_group", "TCPStore", "FileStore", "create_connection", "urlopen")
    sockets = call.target == "socket.socket" or call.name in ("recv", "recv_bytes", "recvfrom", "accept", "sock_recv")
    return ((clients or meetings) and not call.has_keyword("timeout")) or sockets


_HTTP = ("get", "post", "put", "delete", "head", "request", "stream", "client", "asyncclient")


def of_disks(call: Call) -> bool:
    """`fsync` on the thread that asks for it: a disk that is gone never answers. Locks on files that are waited for."""
    locks = call.target == "fcntl.flock" and "LOCK_NB" not in call.text and "LOCK_UN" not in call.text
    return call.target in ("os.fsync", "os.fdatasync", "os.sync") or locks


RULES: tuple[Rule, ...] = (
    of_ray,
    of_futures,
    of_threads,
    of_locks,
    of_queues,
    of_subprocesses,
    of_networks,
    of_disks,
)
EXCEPTIONS: Exceptions = {}


def test_every_call_that_may_block_has_a_deadline() -> None:
    assert offences(calls_in("skyrl_train"), RULES, EXCEPTIONS) == []
