"""One Ray session for one run: started or joined within a deadline, and gone when the run is."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray._private.authentication.authentication_token_setup as authentication
import ray._private.ray_constants as constants
import ray._private.worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.images import SentImages
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import DeadlineError, SkyrlTrainError
from skyrl_train.system import LARGE_PAGES
from skyrl_train.telemetry.logs import is_secret_name, stacks

T = TypeVar("T")

_STOP_TIMEOUT_S = 30.0
_RAYS_OWN = "r"
"""Folder within the session's, which nobody else may enter: Ray opens its own to everybody. Paths of sockets are short."""
_REMOVE_ATTEMPTS = 10
_POLL_S = 0.2
_LOOK_EVERY_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
"""How long a node may take to accept a connection."""
_BATCH_BYTES = 1 << 30
"""Room in the object store for batches of small runs, and for whatever else passes between actors."""
_NEEDED = ("raylet", "gcs_server")
_SHARED_MEMORY = Path("/dev/shm")
_TOO_SLOW = "timed out during startup"
"""What Ray says when a process of its own did not answer in time."""
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


_STACKS_S = 10.0
"""How long other nodes may take to say what processes of the run are doing there."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_FORWARDED = (
    *("NCCL_", "GLOO_", "HF_", "VLLM_", "WANDB_", "PYTORCH_", "TORCH_", "RAY_", "LD_LIBRARY_PATH", stacks.RUN_VARIABLE),
    *_PROXIES,
    *(name.lower() for name in _PROXIES),
)
"""Beginnings of the variables of the command's environment that its actors get on any node."""
_OF_ONE_NODE = (
    "VLLM_HOST_IP",
    *("RAY_ADDRESS", "RAY_AUTH", "RAY_CLIENT", "RAY_JOB", "RAY_NODE", "RAY_RAYLET", "RAY_TMPDIR", "RAY_WORKER"),
)
"""Beginnings of what is right for this node or process alone."""


def forwarded_environment(*, secret: bool) -> dict[str, str]:
    """Variables that reach all actors: those whose names are secrets and addresses of proxies that hold a password, or
    the others. Ray writes an actor's `runtime_env` to its logs, so that secrets travel as arguments of its constructor."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED)
        and not name.startswith(_OF_ONE_NODE)
        and (is_secret_name(name) or (name.upper() in _PROXIES and "@" in value)) == secret
    }


def _take_back_sigterm() -> None:
    """Ray's library puts a handler of its own below Python's, which aborts the process after three seconds: too soon for
    actors to be ended. Python's comes first again."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and callable(handler):
        signal.signal(signal.SIGTERM, handler)


class RaySession:
    """Ray for as long as this object is open.

    Without `placement.ray_address` a session of this machine alone is started: listeners on loopback, no dashboard, its
    files in a folder of its own that goes with it. With an address the cluster there is joined and left as it is.
    """

    def __init__(
        self,
        placement: PlacementConfig,
        *,
        num_cpus: int,
        name: str,
        largest_bucket_bytes: int = 0,
        batch_bytes: int = 0,
    ) -> None:
        """`num_cpus` counts actors, not cores: on a laptop there may be more of the former. The object store of a session
        of this machine has room for weights in buckets of up to so many bytes, and for a step's rollouts and rows.

        Raises DeadlineError where Ray does not come up within `placement.start_timeout_s`, SkyrlTrainError where it
        says why, or where this process is already connected.
        """
        if ray.is_initialized():
            raise SkyrlTrainError("this process is already connected to Ray; call ray.shutdown() before starting a run")
        self.is_local = not placement.ray_address
        self.images = SentImages()
        self.folder: Path | None = None
        """Folder of a session of this machine."""
        # Of its own, as the names of actors are unique in it: those of the session before may be dying yet.
        options: dict[str, Any] = {
            "namespace": f"{name}-{uuid.uuid4().hex[:8]}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        self._variables: dict[str, str | None] = {}
        """Variables of this process before the session, where it has its own."""
        if self.is_local:
            _stay_on_loopback()
            self.folder = Path(tempfile.mkdtemp(prefix="skyrl-ray-"))
            self._variables = _use_token(self.folder)
            options |= {
                "num_cpus": num_cpus,
                "include_dashboard": False,
                "object_store_memory": object_store_bytes(largest_bucket_bytes, batch_bytes),
                "_temp_dir": str(self.folder / _RAYS_OWN),
                "_node_ip_address": "127.0.0.1",
                # Ray would remember the last 100,000 calls, for a dashboard that is not there: 60 kB a step of a small run.
                "_system_config": {"task_events_report_interval_ms": 0},
            }
        else:
            options["address"] = placement.ray_address
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._is_starting = True
        """Whether Ray may still be starting on its thread: until that ended one way or the other."""
        try:
            self._start(options, placement)
        except BaseException as error:
            self.close()
            if isinstance(error, SkyrlTrainError) or not isinstance(error, Exception):
                raise
            raise SkyrlTrainError(f"Ray did not start: {type(error).__name__}: {error}") from error
        context = ray.get_runtime_context()
        self.job_id = str(context.get_job_id())
        self.node_id = str(context.get_node_id())
        stacks.elsewhere.append(self._stacks_elsewhere)

    def _start(self, options: dict[str, Any], placement: PlacementConfig) -> None:
        """Ray gives its own processes half a minute, which is little on a busy machine: a session of this machine is
        tried again while there is time."""
        deadline = time.monotonic() + placement.start_timeout_s
        while True:
            self._thread = _Resident("ray-session")
            try:
                self._thread.run(
                    lambda: ray.init(**options),
                    what=f"Ray ({placement.ray_address or 'a session of this machine'})",
                    timeout_s=max(_POLL_S, deadline - time.monotonic()),
                    remedy="Is the cluster up? See placement.ray_address and placement.start_timeout_s",
                )
                self._is_starting = False
                _take_back_sigterm()
                return
            except Exception as error:
                self._is_starting = False
                if not self.is_local or _TOO_SLOW not in str(error) or time.monotonic() > deadline:
                    raise
                self._is_starting = True
                logging.getLogger(__name__).warning("Ray did not start within its own half a minute: once more")
                self._thread.end()  # and with it what it started

    @property
    def log_folder(self) -> Path | None:
        """Where the workers of this node write, if that is on this machine."""
        if self.folder is not None:
            return self.folder / _RAYS_OWN / "session_latest" / "logs"
        return None

    @staticmethod
    def runtime_env(num_threads: int, **variables: str) -> dict[str, Any]:
        """Environment of an actor: where to import from, and few threads before anything imports torch."""
        path = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]))
        threads = str(num_threads)
        executable = shlex.quote(sys.executable)
        return {
            # Ray starts such a worker through a shell and does not quote: a path with a space would never start.
            **({"py_executable": executable} if executable != sys.executable else {}),
            "env_vars": {
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                # idle threads leave cores to other ranks
                **({"OMP_WAIT_POLICY": "PASSIVE"} if num_threads > 1 else {}),
                "TOKENIZERS_PARALLELISM": "false",
                **LARGE_PAGES,
                **forwarded_environment(secret=False),
                **variables,
            },
        }

    def _stacks_elsewhere(self) -> str:
        """Return what processes of the run are doing on other machines, as a task on each node says."""
        run = os.environ.get(stacks.RUN_VARIABLE, "")
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != self.node_id]
        asked = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            options = {"num_cpus": 0, "runtime_env": self.runtime_env(1), "scheduling_strategy": there}
            asked[ray.remote(max_retries=0)(_stacks_there).options(**options).remote(run)] = node
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_S) if asked else ([], [])
        told, machines = [], {stacks.machine()}
        for ref, node in asked.items():
            name = f"node {node['NodeManagerAddress']}"
            try:
                machine, text = ray.get(ref, timeout=_STACKS_S) if ref in ready else (name, "gives no answer")
            except ray.exceptions.RayError as error:
                machine, text = name, f"gives no answer: {type(error).__name__}"
            if machine not in machines and text:
                told.append(f"{name}:\n{text}")
            machines.add(machine)
        return "\n".join(told)

    def close(self) -> None:
        """End the actors and, of a session of this machine, every process of it. Idempotent and bounded."""
        if self._stacks_elsewhere in stacks.elsewhere:
            stacks.elsewhere.remove(self._stacks_elsewhere)
        if ray.is_initialized() or self._is_starting:
            # Behind a start that a signal cut short: Ray would end the process by a status of its own in the middle of it.
            self._is_starting = False
            try:
                self._thread.run(ray.shutdown, what="ray.shutdown", timeout_s=_STOP_TIMEOUT_S)
            except DeadlineError:
                # The processes of a local session end with this one: the kernel ties them to it.
                logging.getLogger(__name__).warning("Ray did not stop within %g s", _STOP_TIMEOUT_S)
        self._thread.end()
        if self.folder is not None:
            _remove(self.folder)
            self.folder = None
            _authenticate(self._variables)


def ended_process() -> str:
    """Name the process of Ray's own, started by the session of this process, without which no actor answers or starts any
    more, if one has ended; empty where all run, and on a cluster that was joined."""
    node = ray_worker._global_node
    ended = [name for name, _ in node.dead_processes()] if node is not None else []
    return next((name for name in ended if name in _NEEDED), "")


def object_store_bytes(largest_bucket_bytes: int, batch_bytes: int = 0, *, free_bytes: int | None = None) -> int:
    """Room for two buckets of weights, the one that engines load and the next that ranks gather, beside the batches.

    `free_bytes`: of shared memory, which the store does not exceed: with more than is there Ray would lay it on a disk, or
    not start; what does not fit in the store goes to the disk by itself.
    """
    if free_bytes is None:
        free_bytes = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    wanted = 2 * largest_bucket_bytes + max(_BATCH_BYTES, batch_bytes)
    return max(_BATCH_BYTES, min(wanted, free_bytes))


def _stacks_there(run: str) -> tuple[str, str]:
    return stacks.machine(), stacks.here(run)


@functools.cache
def gpus_of_cluster(address: str, timeout_s: float) -> tuple[int, ...]:
    """GPUs of each node of the cluster at `address` that has any. Connects, looks and leaves; once for each process.

    Raises what joining raises.
    """
    session = RaySession(PlacementConfig(ray_address=address, start_timeout_s=timeout_s), num_cpus=0, name="count")
    try:
        counts = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    finally:
        session.close()
    return tuple(count for count in counts if count)


def wait_for_room(
    placement: PlacementConfig, has_room: Callable[[Sequence[Mapping[str, float]]], bool]
) -> list[Mapping[str, float]]:
    """Return the resources of each node of the cluster at `placement.ray_address` that answers, once `has_room` says that
    they do, or `placement.wait_for_nodes_s` have passed. Connects, looks and leaves.

    Raises what joining raises.
    """
    deadline = time.monotonic() + placement.wait_for_nodes_s
    session = RaySession(placement, num_cpus=0, name="look")
    try:
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and _answers(node)]
            if has_room(nodes) or time.monotonic() > deadline:
                return nodes
            time.sleep(_LOOK_EVERY_S)
    finally:
        session.close()


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node that Ray takes for alive, as it does for a while after its end, listens."""
    with contextlib.suppress(OSError):
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        with socket.create_connection(address, timeout=_ANSWER_TIMEOUT_S):
            return True
    return False


def _remove(folder: Path) -> None:
    """A process that is about to end may write into the folder once more, so removal is tried a few times."""
    for _ in range(_REMOVE_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_POLL_S)


def _stay_on_loopback() -> None:
    """Makes Ray use 127.0.0.1 here and in the processes it starts; it would replace it by an address of the network."""
    os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    constants.ENABLE_RAY_CLUSTER = False


def _use_token(folder: Path) -> dict[str, str | None]:
    """Have the session demand a token that nobody else has, whatever the environment says of Ray's; return what it said.

    The token lies in a file of the session's folder, and only its path is in the environment of its processes.
    """
    path = folder / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return _authenticate({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None})


def _authenticate(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set these variables, None removing one, and have Ray's library read them again; return what they were."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    authentication.Config.initialize("")
    authentication.AuthenticationTokenLoader.instance().reset_cache()
    return before


class _Resident:
    """A thread on which functions run under a deadline, and that stays until `end`.

    Not the main thread, so that Ray leaves this process's signal handlers alone and a start that hangs is given up. It
    must stay: the kernel ends the processes of a local session with the thread that started them.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, function: Callable[[], T], *, what: str, timeout_s: float, remedy: str = "") -> T:
        """The function's result, or its exception. Raises DeadlineError."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            raise DeadlineError(what, timeout_s, remedy) from None

    def end(self) -> None:
        """Tell the thread to end after the call that it is at."""
        self._calls.put(None)

    def _work(self) -> None:
        # What Ray starts inherits it: a terminal that closes tells all processes, and the trainer still has to save.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
        while (call := self._calls.get()) is not None:
            call()
