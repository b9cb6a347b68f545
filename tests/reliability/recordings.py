"""The file operations of one training run, in order, as the kernel saw them.

A recording is one run of the real command under `strace`: killed once before its first checkpoint and once between two
checkpoints, each time started again, until it ends by itself. Every call that changes a file or brings one to the disk
becomes an `Operation`; replayed on an empty folder they give the run's folder byte for byte, or the recording is refused.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from skyrl_train.trainers import RunEvent

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
KILLED_AT_STEPS = (1, 3)
"""The first is before the first checkpoint, the second between two; at the moment when the step's record is on disk."""
NUM_STEPS = 5
KILL_AT = "SKYRL_TRAIN_TESTKILL_AT"
_CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,lseek,truncate,ftruncate,fallocate,sendfile,"
    "copy_file_range,link,linkat,symlink,symlinkat,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,"
    "fsync,fdatasync"
)

Kind = Literal["rl", "ppo", "sft"]
_CALLBACK = "trainer.callbacks=[tests.reliability.recordings:at_event]"
_RL = (
    "skyrl_train.main",
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.max_train_prompts=16",
    "data.max_validation_prompts=2",
    "generator.n_samples_per_prompt=2",
    "generator.sampling.max_generate_length=6",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    f"trainer.total_steps={NUM_STEPS}",
    "trainer.ckpt_interval=2",
    "trainer.eval_interval=2",
    "trainer.algorithm.entropy_coef=0.1",
    _CALLBACK,
)
KINDS: Mapping[Kind, Sequence[str]] = {
    "rl": _RL,
    "ppo": (
        *_RL,
        "algorithm=ppo",
        "trainer.algorithm.kl_loss_coef=0.1",
        "trainer.algorithm.ref_update_interval=2",
    ),
    "sft": (
        "skyrl_train.main_sft",
        "+experiment=sft_gsm8k",
        "sft_platform=cpu",
        "data.max_train_rows=24",
        "data.max_validation_rows=4",
        "trainer.batch_size=4",
        f"trainer.num_steps={NUM_STEPS}",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=2",
        "trainer.eval_samples=1",
        "trainer.eval_sampling.max_generate_length=4",
        "trainer.keep_best=true",
        _CALLBACK,
    ),
}
"""The module and the overrides of each kind of run. The entropy bonus moves the weights whatever the rewards are."""

stops_after_a_step = False
"""Set in a process that resumes a run: SIGTERM is sent to itself after its first step, which then saves and ends."""


def at_event(event: RunEvent) -> None:
    """The callback of every run here: kills the process, or asks for a stop, where that was asked for."""
    if event.kind != "step":
        return
    if os.environ.get(KILL_AT) == str(event.step):
        os.kill(os.getpid(), signal.SIGKILL)
    if stops_after_a_step:
        signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One change of a file or folder, or one `sync` of either. Paths are relative to the run's folder."""

    kind: Literal["create", "mkdir", "write", "truncate", "rename", "remove", "sync"]
    path: str
    target: str = ""
    """Of a rename: the new path."""
    data: bytes = b""
    offset: int = 0
    """Of a write; of a truncation, the length that remains."""


def prepare_to_fork() -> None:
    """Settle, before the first product, what a process needs whose children are forks of it: one thread, and that MKL keeps
    no list of buffers by thread, whose lock a child may find taken."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MKL_DISABLE_FAST_MM"] = "1"


def build_model(folder: Path) -> Path:
    """A random Qwen2 of a few thousand parameters with the bundled tokenizer: checkpoints of some 50 kB."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    bundled = REPOSITORY / "skyrl_train" / "data" / "assets" / "tiny_qwen2"
    shutil.copytree(bundled, folder, ignore=shutil.ignore_patterns("*.safetensors", "recipe.json"))
    config = Qwen2Config.from_pretrained(bundled)
    config.update({"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "layer_types": None})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4})
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**config.to_diff_dict())).save_pretrained(folder)
    return folder


def overrides(kind: Kind, model: Path) -> list[str]:
    """The command line of a run of this kind without its folder."""
    return [*KINDS[kind][1:], f"model.path={model}"]


def record(kind: Kind, model: Path, scratch: Path) -> list[Operation]:
    """Runs the command in `scratch` and returns what it did to its folder. Raises RuntimeError where a part of the run ends
    otherwise than expected. To be called in a warm process, of which the runs are forks: `strace` of the imports would
    take longer than all the rest."""
    root = scratch / f"{kind}_recorded"
    reader = _Reader(root)
    operations: list[Operation] = []
    for number, kill_at in enumerate((*KILLED_AT_STEPS, None)):
        log = scratch / f"{kind}_{number}.strace"
        _trace(kind, model, root, log, kill_at)
        operations += reader.read(log)
        log.unlink()
    return operations


def _trace(kind: Kind, model: Path, root: Path, log: Path, kill_at: int | None) -> None:
    strace = shutil.which("strace")
    if strace is None:
        raise RuntimeError("strace is not installed; on Debian or Ubuntu: apt install strace")
    said = root.with_name(f"{root.name}.log")
    _let_threads_end()
    pid = os.fork()
    if pid == 0:
        _as_command(kind, [f"hydra.run.dir={root}", *overrides(kind, model)], said, kill_at)
    os.waitpid(pid, os.WUNTRACED)
    options = ["-f", "-y", "-qq", "-xx", "-s", "100000000", "-e", f"trace={_CALLS}", "-o", str(log)]
    tracer = subprocess.Popen([strace, *options, "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"strace cannot attach: {tracer.communicate(timeout=60)[1].decode()}")
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        status = wait_for(pid, deadline)
        tracer.wait(timeout=60)
    finally:
        tracer.kill()
        tracer.communicate(timeout=60)
    expected = 0 if kill_at is None else -signal.SIGKILL
    if status != expected:
        raise RuntimeError(f"{kind}: exit status {status}, not {expected}\n{said.read_text()[-3000:]}")


def _let_threads_end() -> None:
    """Wait until this process has had as many threads for a second. One that ends holds locks of the C libraries for a
    moment, which a fork would copy as they are, for the child to wait for ever."""
    num_threads, since = 0, time.monotonic()
    while time.monotonic() < since + 1.0:
        if num_threads != (num_threads := len(os.listdir("/proc/self/task"))):
            since = time.monotonic()
        time.sleep(0.02)


def wait_for(pid: int, deadline: float) -> int | None:
    """The exit status of a child, negative for a signal; None where it had to be killed at the deadline."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _as_command(kind: Kind, arguments: list[str], said: Path, kill_at: int | None) -> NoReturn:
    """In a forked child: waits for SIGCONT, then runs the entry point as the command does."""
    status = 1
    try:
        os.setsid()
        log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ[KILL_AT] = str(kill_at)
        os.kill(os.getpid(), signal.SIGSTOP)
        sys.argv = [KINDS[kind][0], *arguments]
        importlib.import_module(KINDS[kind][0]).main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?)")
_UNFINISHED = re.compile(r"(\d+) +.*(?= <unfinished \.\.\.>$)")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_ARGUMENT = re.compile(
    r'"(?P<text>(?:\\x[0-9a-f]{2})*)"|(?P<number>AT_FDCWD|\d+)<(?P<path>(?:\\x[0-9a-f]{2})*)>(?P<gone>\(deleted\))?'
    r"|(?P<word>[^,\s][^,]*)"
)


@dataclass(frozen=True)
class _Descriptor:
    """A file descriptor, or the working folder, and the path that it stood for."""

    number: str
    path: str
    is_deleted: bool


_Argument = bytes | str | _Descriptor


class _Reader:
    """Reads one log of strace (paths and data in hexadecimal)."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._offsets: dict[_Descriptor, int] = {}
        """Where the next write goes; -1 is the end of the file."""

    def read(self, log: Path) -> Iterator[Operation]:
        """The operations below the root, in the order in which the calls returned."""
        begun: dict[str, str] = {}
        with log.open(encoding="ascii") as lines:
            for line in map(str.rstrip, lines):
                if unfinished := _UNFINISHED.match(line):
                    begun[unfinished[1]] = unfinished[0]
                    continue
                if resumed := _RESUMED.match(line):
                    line = begun.pop(resumed[1]) + resumed[2]
                call = _CALL.match(line)
                if call and call[4] != "?" and int(call[4]) >= 0:
                    yield from self._call(call[2], list(_arguments(call[3])), int(call[4]))

    def _call(self, name: str, words: list[_Argument], result: int) -> Iterator[Operation]:
        if name in ("write", "pwrite64", "lseek", "ftruncate", "fsync", "fdatasync"):
            yield from self._with_descriptor(name, words, result)
            return
        paths = [self._inside(path) for path in _paths(words)]
        if all(path is None for path in paths):
            return
        if name in ("open", "openat", "creat") and paths[0] is not None:
            yield from self._open(paths[0], words, result)
        elif name in ("rename", "renameat", "renameat2") and paths[0] is not None and paths[1] is not None:
            yield Operation(kind="rename", path=paths[0], target=paths[1])
        elif name in ("unlink", "unlinkat", "rmdir") and paths[0] is not None:
            yield Operation(kind="remove", path=paths[0])
        elif name in ("mkdir", "mkdirat") and paths[0] is not None:
            yield Operation(kind="mkdir", path=paths[0])
        else:
            raise RuntimeError(f"{name} of {paths} is a way to change files that recordings do not know")

    def _open(self, path: str, words: list[_Argument], number: int) -> Iterator[Operation]:
        flags = next((word for word in words if isinstance(word, str) and word.startswith("O_")), "O_CREAT|O_TRUNC")
        if "O_RDONLY" in flags:
            return
        self._offsets[self._descriptor(number, path)] = -1 if "O_APPEND" in flags else 0
        if "O_CREAT" in flags:
            yield Operation(kind="create", path=path)
        if "O_TRUNC" in flags:
            yield Operation(kind="truncate", path=path)

    def _with_descriptor(self, name: str, words: list[_Argument], result: int) -> Iterator[Operation]:
        descriptor = words[0]
        if not isinstance(descriptor, _Descriptor) or descriptor.is_deleted:
            return
        path = self._inside(descriptor.path)
        if path is None:
            return
        if name == "lseek":
            if self._offsets.get(descriptor) != -1:
                self._offsets[descriptor] = result
        elif name in ("fsync", "fdatasync"):
            yield Operation(kind="sync", path=path)
        elif name == "ftruncate":
            yield Operation(kind="truncate", path=path, offset=int(str(words[1])))
        else:
            # A file that was renamed while it is open is known by its new name: it continues where its end is.
            offset = self._offsets.get(descriptor, -1) if name == "write" else int(str(words[3]))
            if name == "write" and offset >= 0:
                self._offsets[descriptor] = offset + result
            data = words[1]
            assert isinstance(data, bytes), "strace prints what is written as a text"
            yield Operation(kind="write", path=path, data=data[:result], offset=offset)

    def _descriptor(self, number: int, path: str) -> _Descriptor:
        return _Descriptor(str(number), os.path.join(self._root, path), is_deleted=False)

    def _inside(self, path: str) -> str | None:
        """`path` relative to the root, "" for the root itself, None for what lies elsewhere."""
        if path == self._root:
            return ""
        return path[len(self._root) + 1 :] if path.startswith(f"{self._root}/") else None


def _arguments(text: str) -> Iterator[_Argument]:
    for match in _ARGUMENT.finditer(text):
        if match["text"] is not None:
            yield _bytes(match["text"])
        elif match["number"] is not None:
            yield _Descriptor(match["number"], _bytes(match["path"]).decode(), is_deleted=match["gone"] is not None)
        else:
            yield match["word"]


def _bytes(hexadecimal: str) -> bytes:
    return bytes.fromhex(hexadecimal.replace("\\x", ""))


def _paths(words: Sequence[_Argument]) -> Iterator[str]:
    """The paths that a call names, each joined with the folder before it, if there is one."""
    folder = str(REPOSITORY)
    for word in words:
        if isinstance(word, _Descriptor):
            folder = word.path
        elif isinstance(word, bytes):
            yield os.path.normpath(os.path.join(folder, word.decode()))
