"""Nothing waits for ever: every call that may block has a deadline, or a reason here why it needs none.

The rules read the source. They know the waits of Ray, futures, queues, locks, threads, processes, sockets, HTTP clients,
collectives and the disk by the names of their calls; a name of our own that means the same is followed to where it waits.
"""

from __future__ import annotations

import re

import pytest

from tests.support.source_calls import Call, Exceptions, Rule, calls_in, calls_of, offences

_WAITING_MODULES = ("ray", "asyncio", "connection", "concurrent.futures", "futures", "")
_LOCK = re.compile(r"(lock|mutex|semaphore|condition|_in_order)$", re.IGNORECASE)


def _bare(call: Call, *names: str) -> bool:
    """A method of one of these names that is given neither a position nor a timeout."""
    owner = call.receiver.rpartition(".")[2]
    is_method = owner[:1].islower() or owner[:1] == "_" or owner.endswith((")", "]"))
    is_method = is_method and not call.is_entry and call.name in names
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
    bounded = call.name in ("Queue", "LifoQueue", "JoinableQueue") and bool(
        call.num_arguments or call.has_keyword("maxsize")
    )
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
    return not call.is_entry and (((clients or meetings) and not call.has_keyword("timeout")) or sockets)


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
_PENDING = "a Pending of `endpoints.py`: the call was begun with a deadline, at which `wait` raises"
_IS_DONE = "of a future that is done: the wait for it, with its deadline, is the line before"
_IDLE = "a daemon thread waits for work; nobody waits for the thread without a limit"
_READABLE = "`select`, or the event loop, has said that there is something to read"
_OPEN = "on a daemon thread that holds a connection open until it is closed; each call over it has a deadline"
_BRIEF = "held for assignments, or for calls that have deadlines of their own"
EXCEPTIONS: Exceptions = {
    ("skyrl_train/serve/scheduler.py", "self._wake.wait"): "the scheduler is cancelled when the server closes",
    ("skyrl_train/serve/ledger.py", "promise.done.wait"): "inside of `asyncio.wait_for`",
    ("skyrl_train/serve/service.py", "self.ledger.accept"): "takes a request, and is no socket's",
    ("skyrl_train/serve/models.py", "taking.exception"): "called when the task is done",
    ("skyrl_train/serve/scheduler.py", "turns.exception"): "called when the task is done",
    ("skyrl_train/runs/cli/resolvers.py", "_is_deriving.get"): "a variable of the context",
    ("skyrl_train/runs/cli/resolvers.py", "_found.get"): "a variable of the context",
    ("skyrl_train/weight_sync/stream.py", "self._backend.recv"): "begins it; what waits has the group's deadline",
    ("skyrl_train/weight_sync/stream.py", "wait"): "begun with the deadline of the group",
    ("skyrl_train/cluster/endpoints.py", "other.wait"): _PENDING,
    ("skyrl_train/cluster/endpoints.py", "self.begin_asking(method, phase, *args, **kwargs).wait"): _PENDING,
    (
        "skyrl_train/cluster/endpoints.py",
        "self._in_order",
    ): "held while calls are submitted, which does not wait for them",
    ("skyrl_train/cluster/engine_group.py", "asking.result"): _IS_DONE,
    ("skyrl_train/cluster/engine_group.py", "starting.wait"): _PENDING,
    ("skyrl_train/cluster/served_models.py", "pending.wait"): _PENDING,
    ("skyrl_train/cluster/group_rollouts.py", "asyncio.as_completed"): "parts, whose engines must give signs of life",
    ("skyrl_train/cluster/group_rollouts.py", "task.exception"): _IS_DONE,
    ("skyrl_train/cluster/group_rollouts.py", "task.result"): _IS_DONE,
    (
        "skyrl_train/cluster/learners.py",
        "ranks.begin_each(method, phase, [share for share in shares for _ in range(each)]).wait",
    ): _PENDING,
    (
        "skyrl_train/cluster/learners.py",
        "workers.begin_each(LearnerWorker.start, 'start', places).wait",
    ): _PENDING,
    ("skyrl_train/cluster/session.py", "self._calls.get"): _IDLE,
    ("skyrl_train/cluster/stored.py", "self._starting.wait"): _PENDING,
    ("skyrl_train/cluster/stored.py", "each.wait"): _PENDING,
    ("skyrl_train/data/sft/loader.py", "future.exception"): _IS_DONE,
    ("skyrl_train/data/sft/loader.py", "future.result"): _IS_DONE,
    ("skyrl_train/data/sft/loader.py", "self.shutdown"): "joins its thread with `timeout_s`",
    (
        "skyrl_train/data/sft/loader.py",
        "self._worker.shutdown",
    ): "an AsyncBatchCollator, which joins its thread with `timeout_s`",
    ("skyrl_train/distributed/process_group.py", "torch_c10d.FileStore"): "`set_timeout` follows before anything waits",
    ("skyrl_train/endpoints.py", "other.wait"): _PENDING,
    ("skyrl_train/endpoints.py", "self.begin(method, phase, *args, **kwargs).wait"): _PENDING,
    (
        "skyrl_train/endpoints.py",
        "socket.socket",
    ): "bound for a moment to find a free port: neither listens nor connects",
    (
        "skyrl_train/inference/hf.py",
        "self._weights_lock",
    ): "taken for an update, of which `call_timeout_s` is the deadline",
    (
        "skyrl_train/rollout/agents/session.py",
        "self._in_order",
    ): "held while a prompt becomes tokens; the end of its trajectory cancels whoever waits",
    ("skyrl_train/inference/hf.py", "self._turn_lock"): "held while the other lock is waited for, as that is",
    (
        "skyrl_train/inference/hf.py",
        "self._weights_lock.acquire",
    ): "for an update, of which `call_timeout_s` is the deadline, to be over",
    ("skyrl_train/inference/http.py", "httpx.AsyncClient"): "`common` has the timeouts",
    ("skyrl_train/inference/http.py", "httpx.Client"): "`common` has the timeouts",
    ("skyrl_train/inference/local_engine.py", "other.wait"): _PENDING,
    ("skyrl_train/inference/local_engine.py", "pending.result"): _IS_DONE,
    ("skyrl_train/inference/local_engine.py", "self._future.result"): _IS_DONE,
    (
        "skyrl_train/inference/local_engine.py",
        "self._on_thread(name, phase, lambda: asyncio.run(getattr(self.engine, name)(*args, **kwargs))).wait",
    ): _PENDING,
    ("skyrl_train/inference/local_engine.py", "self.wait"): _PENDING,
    (
        "skyrl_train/inference/request_gate.py",
        "self._opened.wait",
    ): "for the end of a weight sync, whose calls have deadlines",
    (
        "skyrl_train/inference/vllm/engine.py",
        "future.result",
    ): "on a thread that `local_engine.py`, or Ray's caller, watches",
    ("skyrl_train/inference/vllm/engine.py", "self._commands.get"): _IDLE,
    (
        "skyrl_train/inference/vllm/processes.py",
        "connection.wait",
    ): "a daemon thread waits for deaths, for as long as the run",
    ("skyrl_train/inference/vllm/worker.py", "self.shutdown"): "vLLM's own method of a worker, which waits for nobody",
    ("skyrl_train/rollout/agents/endpoint.py", "self.port.exception"): _IS_DONE,
    ("skyrl_train/rollout/agents/loop.py", "httpx.AsyncClient"): "`client_arguments` has the timeouts",
    ("skyrl_train/rollout/agents/http_server.py", "self._released.wait"): "awaited, within `wait_for`",
    ("skyrl_train/rollout/agents/sandbox.py", "process.communicate"): "awaited, within `wait_for`",
    ("skyrl_train/rollout/agents/session.py", "task.exception"): _IS_DONE,
    ("skyrl_train/rollout/agents/session.py", "self.changed.wait"): "awaited, within `wait_for`",
    ("skyrl_train/rollout/hosts/local.py", "self._connection.recv"): _READABLE,
    ("skyrl_train/rollout/hosts/hosted.py", "task.result"): _IS_DONE,
    ("skyrl_train/rollout/hosts/threads.py", "calls.get"): _IDLE,
    (
        "skyrl_train/rollout/hosts/worker.py",
        "connection.recv",
    ): "in a worker, of the trainer, whose end closes the connection",
    (
        "skyrl_train/rollout/hosts/worker.py",
        "self._lock",
    ): "held while an answer is sent; the trainer reads it, or ends the worker at the deadline of a call",
    ("skyrl_train/rollout/hosts/worker.py", "socket.socket"): "one end of a pair that was made elsewhere",
    ("skyrl_train/system/processes/host.py", "self._connection.recv"): "a socket that does not block",
    ("skyrl_train/system/processes/host.py", "self._connection.shutdown"): "of a socket, which waits for nobody",
    ("skyrl_train/system/processes/supervisor.py", "socket.socket"): "one end of a pair that was made elsewhere",
    ("skyrl_train/system/sandbox/child.py", "socket.socket"): "one end of a pair that was made elsewhere",
    (
        "skyrl_train/system/sandbox/child.py",
        "self._link.recv",
    ): "the sandbox is ended from outside at the call's deadline",
    ("skyrl_train/rollout/generator.py", "asyncio.as_completed"): "trajectories, of which every await has a deadline",
    ("skyrl_train/rollout/generator.py", "task.result"): _IS_DONE,
    ("skyrl_train/rollout/loop_thread.py", "future.result"): _IS_DONE,
    ("skyrl_train/rollout/rewards/judge.py", "httpx.AsyncClient"): "`client_arguments` has the timeouts",
    ("skyrl_train/rollout/rewards/judge.py", "self._lock"): "held for one statement, for which SQLite has a timeout",
    ("skyrl_train/rollout/rewards/judge.py", "task.exception"): _IS_DONE,
    ("skyrl_train/rollout/rewards/model.py", "httpx.AsyncClient"): "`client_arguments` has the timeouts",
    (
        "skyrl_train/rollout/stream/stream.py",
        "self._changed.wait",
    ): "for groups in flight, of which every await has a deadline",
    ("skyrl_train/rollout/tools/mcp.py", "_LOCK"): "held while a server starts, for which it has a deadline",
    ("skyrl_train/rollout/tools/mcp.py", "asyncio.Event().wait"): _OPEN,
    ("skyrl_train/runs/construction/on_ray.py", "wait"): "the start of a learner, with `start_timeout_s`",
    ("skyrl_train/system/files/files.py", "os.fsync"): "on a thread, with DISK_TIMEOUT_S: what everything else calls",
    ("skyrl_train/telemetry/activity.py", "self._lock"): _BRIEF,
    ("skyrl_train/telemetry/logs/console.py", "self._lock"): _BRIEF,
    ("skyrl_train/telemetry/logs/run_log.py", "self._lock"): _BRIEF,
    ("skyrl_train/system/threads.py", "self._calls.get"): _IDLE,
    ("skyrl_train/trainers/checkpoints/folder.py", "os.fsync"): "on a thread of `map_in_time`, with DISK_TIMEOUT_S",
    ("skyrl_train/weight_sync/device_sharing.py", "self._lock"): _BRIEF,
    ("skyrl_train/weight_sync/transports.py", "pending.wait"): _PENDING,
    ("skyrl_train/weight_sync/transports.py", "written.wait"): _PENDING,
    ("skyrl_train/weights.py", "current.wait"): _PENDING,
    ("skyrl_train/weights.py", "pending.wait"): _PENDING,
}


@pytest.mark.slow
def test_every_call_that_may_block_has_a_deadline() -> None:
    assert offences(calls_in("skyrl_train"), RULES, EXCEPTIONS) == []


@pytest.mark.parametrize(
    ("rule", "against", "within"),
    [
        (of_ray, "ray.get(refs)", "ray.get(refs, timeout=5)"),
        (of_ray, "ray.wait(refs, num_returns=2)", "ray.wait(refs, timeout=0)"),
        (of_futures, "self._future.result()", "future.result(timeout_s)"),
        (of_futures, "tasks[0].exception()", "logger.exception('x')"),
        (of_futures, "concurrent.futures.wait([future])", "wait([future], timeout=1)"),
        (of_threads, "self._thread.join()", "', '.join(names)"),
        (of_threads, "process.wait()", "process.wait(20)"),
        (of_threads, "event.wait()", "event.wait(timeout=1)"),
        (of_threads, "with ThreadPoolExecutor(4) as pool: pass", "pool = ThreadPoolExecutor(4)"),
        (of_threads, "pool.shutdown()", "pool.shutdown(wait=False)"),
        (of_locks, "lock.acquire()", "lock.acquire(timeout=1)"),
        (of_locks, "with self._lock: pass", "with folder.locked(): pass"),
        (of_queues, "self._jobs.get()", "jobs.get(timeout=1)"),
        (of_queues, "multiprocessing.Queue(8)", "queue.Queue()"),
        (of_subprocesses, "subprocess.run(words, check=True)", "subprocess.run(words, timeout=5)"),
        (of_subprocesses, "process.communicate()", "process.communicate(timeout=5)"),
        (of_subprocesses, "os.waitpid(pid, 0)", "os.waitpid(pid, os.WNOHANG)"),
        (of_networks, "urllib.request.urlopen(url)", "urlopen(url, timeout=2)"),
        (of_networks, "httpx.get(url)", "httpx.get(url, timeout=2)"),
        (of_networks, "connection.recv()", "socket.create_connection(place, timeout=2)"),
        (of_networks, "dist.init_process_group('gloo')", "dist.init_process_group('gloo', timeout=limit)"),
        (of_disks, "os.fsync(file.fileno())", "bring_to_disk(file.fileno(), path)"),
        (of_disks, "fcntl.flock(file, fcntl.LOCK_EX)", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
    ],
)
def test_the_rules_tell_calls_with_a_deadline_from_those_without(rule: Rule, against: str, within: str) -> None:
    assert any(map(rule, calls_of(against, "x.py")))
    assert not any(map(rule, calls_of(within, "x.py")))
