"""Commands in sandboxes: what launchers are told, what is in the environment, limits, warm starts, and that none is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import AGENT_RULES, launcher_of
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.config.rules import run_rules
from skyrl_train.rollout.agents import sandbox
from skyrl_train.rollout.agents.launchers import NAME_PREFIX
from skyrl_train.runs.cli import RL_MACHINE_RULES
from skyrl_train.system.processes import start_time
from skyrl_train.system.sandbox import programs
from skyrl_train.types import FailureKind, RolloutBatch
from tests.support.agent_cases import letter_by_letter, rolling, scripted
from tests.support.fakes import FakeEngine
from tests.support.process_trees import Family, is_running

STUB = Path(__file__).parents[3] / "support" / "stub_docker.py"
AGENT = """
import json, os, sys, urllib.request
task = json.load(open(sys.argv[1]))
body = json.dumps({"messages": task["prompt"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
"""
REPORT = "json.dump(1.0, open(sys.argv[2], 'w'))\n"
Roll = Callable[..., RolloutBatch]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sandboxes have their folders; none is left there."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(sandbox, "GRACE_S", 0.2)
    yield place
    assert list(place.iterdir()) == []


@pytest.fixture
def roll(folder: Path) -> Iterator[Roll]:
    with rolling() as roll:
        yield roll
    assert sandbox._POOLS == {}


class Docker:
    """The stub, as a program that stands on the PATH."""

    def __init__(self, state: Path) -> None:
        self.state = state
        state.mkdir()
        program = state / "bin" / "docker"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STUB} {state} "$@"\n')
        program.chmod(0o755)

    def calls(self, name: str = "") -> list[list[str]]:
        path = self.state / "calls.jsonl"
        told = [json.loads(line)["words"] for line in path.read_text().splitlines()] if path.exists() else []
        return [words for words in told if name in ("", words[0])]

    def containers(self) -> list[str]:
        return [path.name for path in (self.state / "containers").iterdir()]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = Docker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{made.state / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return made


def agent(tmp_path: Path, then: str = REPORT, **launcher: Any) -> dict[str, Any]:
    (tmp_path / "agent.py").write_text(AGENT + then)
    command = [sys.executable, "-S", str(tmp_path / "agent.py"), "{task_file}", "{report_file}"]
    return {"command": command, **({"launcher": launcher} if launcher else {})}


def in_docker(**changes: Any) -> dict[str, Any]:
    return {"_target_": "docker", "image": "agents:1", **changes}


def eventually(is_so: Callable[[], object], within_s: float = 15.0) -> bool:
    ends = time.monotonic() + within_s
    while not is_so() and time.monotonic() < ends:
        time.sleep(0.02)
    return bool(is_so())


# Docker


def test_a_command_plays_in_a_container_that_is_removed(roll: Roll, docker: Docker, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    then = f"json.dump(dict(os.environ), open({str(seen)!r}, 'w'))\n" + REPORT
    os.environ["SECRET_OF_THE_TRAINER"] = "s3cret"
    try:
        loop = agent(tmp_path, then, **in_docker(memory_gb=2, cpus=1.5, pids=64, options=["--tmpfs", "/tmp"]))
        (trajectory,) = roll(scripted("5"), loop).trajectories
    finally:
        del os.environ["SECRET_OF_THE_TRAINER"]
    assert trajectory.failure is None
    assert trajectory.reward == 1.0
    assert eventually(lambda: docker.calls("rm") and not docker.containers())
    (start,), (enter,) = docker.calls("run"), docker.calls("exec")
    told = " ".join(start)
    assert "--memory 2000000000b --memory-swap 2000000000b --cpus 1.5 --pids-limit 64" in told
    assert "--network host" in told
    assert "--cap-drop ALL" in told
    assert start[-6:] == ["--tmpfs", "/tmp", "--entrypoint", "sleep", "agents:1", "infinity"]
    name = start[start.index("--name") + 1]
    assert name.startswith(f"{NAME_PREFIX}")
    assert enter[enter.index(name) + 1 :][:2] == [sys.executable, "-S"]
    inside = json.loads(seen.read_text())
    assert "SECRET_OF_THE_TRAINER" not in inside
    key = inside["OPENAI_API_KEY"]
    assert inside["ANTHROPIC_API_KEY"] == key
    assert inside["HOME"] == str(Path(inside["AGENT_TASK_FILE"]).parent)
    assert not any(key in word for words in docker.calls() for word in words), "other users can read a command's words"


def test_a_command_that_hangs_ends_with_its_container(roll: Roll, docker: Docker, tmp_path: Path) -> None:
    then = f"open({str(tmp_path / 'mark')!r}, 'w').write(str(os.getpid()))\nimport time; time.sleep(60)\n"
    (trajectory,) = roll(scripted("5"), {**agent(tmp_path, then, **in_docker()), "time_limit_s": 1.0}).trajectories
    assert trajectory.failure is not None
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT_TIMEOUT
    process = int((tmp_path / "mark").read_text())
    assert eventually(lambda: not is_running(process) and not docker.containers())


def test_a_container_that_cannot_be_started_fails_its_trajectory(roll: Roll, docker: Docker, tmp_path: Path) -> None:
    (docker.state / "down").touch()
    failure = roll(scripted("5"), agent(tmp_path, **in_docker(warm=2))).trajectories[0].failure
    assert failure is not None
    assert "a sandbox could not be started (exit status 1)" in failure.message
    assert "Is the docker daemon running?" in failure.message
    assert eventually(lambda: len(docker.calls("run")) == 3 == len(docker.calls("rm"))), "it is tried again for ever"


@pytest.mark.slow
def test_at_most_so_many_containers_are_there_and_some_ahead_of_use(roll: Roll, docker: Docker, tmp_path: Path) -> None:
    most, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.01):
            most[0] = max(most[0], len(docker.containers()) if (docker.state / "containers").exists() else 0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        engine = FakeEngine(lambda _: letter_by_letter("5"))
        batch = roll(engine, agent(tmp_path, **in_docker(most=3, warm=2)), n=5)
        assert [each.failure for each in batch.trajectories] == [None] * 5
        assert eventually(lambda: len(docker.containers()) == 2), "none is ahead of its use"
    finally:
        stop.set()
        looking.join(10)
    assert most[0] <= 3
    used = [words[words.index("--workdir") + 1] for words in docker.calls("exec")]
    assert len(set(used)) == 5, "a sandbox was used twice"


def test_what_ended_runs_left_is_removed_and_what_runs_stays(roll: Roll, docker: Docker, tmp_path: Path) -> None:
    boot, namespace = sandbox._machine()
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    own, parent = os.getpid(), os.getppid()
    containers = docker.state / "containers"
    containers.mkdir()
    left = f"{NAME_PREFIX}{boot}-{namespace}-{ended.pid}-1-7"
    reused = f"{NAME_PREFIX}{boot}-{namespace}-{parent}-1-8"  # another process had this number
    live = f"{NAME_PREFIX}{boot}-{namespace}-{parent}-{start_time(parent)}-9"
    elsewhere = f"{NAME_PREFIX}0123456789ab-{namespace}-{own}-1-1"
    for name in (left, reused, live, elsewhere, "database"):
        (containers / name).touch()
    assert roll(scripted("5"), agent(tmp_path, **in_docker())).trajectories[0].failure is None
    assert eventually(lambda: len(docker.containers()) == 3)
    assert sorted(docker.containers()) == sorted([live, elsewhere, "database"])


def test_a_container_that_is_left_at_the_end_is_told(
    folder: Path, docker: Docker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = docker.state / "bin" / "docker"
    program.write_text(program.read_text().replace("exec ", '[ "$1" != rm ] || exit 1\nexec '))
    with rolling() as roll:
        assert roll(scripted("5"), agent(tmp_path, **in_docker())).trajectories[0].failure is None
    (name,) = docker.containers()
    assert f"sandboxes are left: {name}. Remove them by hand: docker rm --force NAME" in caplog.text


# Any launcher


def test_words_of_ones_own_are_a_launcher(roll: Roll, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shell = ["sh", "-c", f'echo "$@" >> {log}', "sh"]
    launcher = {
        "start": [*shell, "start", "{name}"],
        "enter": ["env", "PLACE={name}", "URL={base_url}", "LIMIT={time_limit_s}"],
        "cleanup": [*shell, "cleanup", "{name}", "{folder}"],
        "host_inside": "localhost",
    }
    then = "assert 'URL' in os.environ and os.environ['URL'] == os.environ['OPENAI_BASE_URL'], os.environ\n"
    then += "assert os.environ['URL'].startswith('http://localhost:')\nassert os.environ['LIMIT'] == '600'\n" + REPORT
    (trajectory,) = roll(scripted("5"), agent(tmp_path, then, **launcher)).trajectories
    assert trajectory.failure is None
    assert eventually(lambda: "cleanup" in log.read_text())
    name = log.read_text().split()[1]
    assert log.read_text().split() == ["start", name, "cleanup", name, str(Path(tempfile.gettempdir(), name, "folder"))]


@pytest.mark.parametrize(
    "then",
    [
        "os.symlink('/etc/hostname', sys.argv[2])\n",
        "os.mkfifo(sys.argv[2])\n",
        "os.mkdir(sys.argv[2])\n",
    ],
)
def test_a_report_that_is_no_file_is_neither_followed_nor_waited_for(roll: Roll, tmp_path: Path, then: str) -> None:
    failure = roll(scripted("5"), agent(tmp_path, then)).trajectories[0].failure
    assert failure is not None
    assert failure.kind is FailureKind.INVALID_REWARD
    assert Path("/etc/hostname").read_text().strip() not in failure.message


# Processes

HIDING = """
import subprocess, time
mark = {mark!r}
subprocess.Popen([sys.executable, "-S", "-c", '''
import os, signal, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("''' + mark + '''", "a").write(str(os.getpid()) + chr(10))
time.sleep(120)
'''])
open(mark, "a").write(str(os.getpid()) + chr(10))
"""


def marked(mark: Path) -> list[int]:
    return [int(line) for line in mark.read_text().split()] if mark.exists() else []


def test_what_a_command_leaves_behind_ends_with_it_however_it_hid(roll: Roll, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    then = HIDING.format(mark=str(mark))
    then += f"while len(open({str(mark)!r}).read().split()) < 2: time.sleep(0.01)\n" + REPORT
    assert roll(scripted("5"), agent(tmp_path, then)).trajectories[0].failure is None
    assert len(marked(mark)) == 2
    assert eventually(lambda: not any(map(is_running, marked(mark))))


def test_a_command_whose_supervisor_is_killed_ends_and_is_cleaned_up(
    roll: Roll, docker: Docker, tmp_path: Path
) -> None:
    then = "import signal, subprocess, time\n"
    then += "docker = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])\n"
    then += "os.kill(docker, signal.SIGKILL)\ntime.sleep(60)\n"
    failure = roll(scripted("5"), agent(tmp_path, then, **in_docker())).trajectories[0].failure
    assert failure is not None
    assert "the command was ended with its supervisor, which was ended by SIGKILL" in failure.message
    assert eventually(lambda: not docker.containers())


RUN = """
import sys, time
from tests.support.agent_cases import letter_by_letter, rolling
from tests.support.fakes import FakeEngine
import tempfile, json
tempfile.tempdir = sys.argv[1]
with rolling() as roll:
    roll(FakeEngine(lambda _: letter_by_letter("5")), json.loads(sys.argv[2]), n=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_trainer_that_is_killed(
    folder: Path, docker: Docker, tmp_path: Path, number: signal.Signals
) -> None:
    mark = tmp_path / "mark"
    loop = agent(tmp_path, HIDING.format(mark=str(mark)) + "time.sleep(120)\n", **in_docker(warm=1))
    root = STUB.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), json.dumps(loop)], env=environment, start_new_session=True, cwd=root
    )
    try:
        family = Family(trainer.pid)
        assert eventually(lambda: len(marked(mark)) == 4 and len(docker.containers()) == 3, 60)
        trainer.send_signal(number)
        trainer.wait(20)
        assert family.left(within_s=10) == []
        assert not any(map(is_running, marked(mark)))
        assert docker.containers() == []
    finally:
        trainer.kill()


# The configuration


def violations(launcher: Any, **loop: Any) -> list[str]:
    agent_loop = {"_target_": "agent", "command": ["a", "{task_file}"], "launcher": launcher, **loop}
    generator = GeneratorConfig(agent_loop=agent_loop, backend=loop.pop("backend", "vllm"))
    root = SimpleNamespace(generator=generator, environment=EnvironmentConfig(env_class="reported"))
    return [str(each) for each in run_rules(root, AGENT_RULES)]


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("dokcer", "must be one of docker, podman, bubblewrap, template.*Did you mean 'docker'"),
        ("docker", "launcher.image: must be given to docker"),
        (5, "must name a launcher, or be one with its words"),
        (in_docker(memory=2), "launcher.memory: is no argument"),
        (in_docker(memory_gb=0), "launcher.memory_gb: must be a number above 0"),
        (in_docker(most=0), "launcher.most: must be a number from 1"),
        (in_docker(most=2, warm=3), "launcher.warm: cannot be above most=2"),
        (in_docker(network="bridge"), "launcher.network: cannot be reached .* host: ADDRESS"),
        ({"_target_": "podman"}, "needs one of image and rootfs"),
        ({"_target_": "bubblewrap", "warm": 1}, "launcher.warm: is for launchers that start a sandbox"),
        ({"cleanup": ["rm", "{name}"]}, "needs start, enter, or both"),
        ({"start": ["a", "{name}"]}, "launcher.cleanup: must say how sandboxes are removed"),
        ({"start": ["a", "{base_url}"], "cleanup": ["b", "{name}"]}, "Put it into enter"),
        ({"start": ["a"], "cleanup": ["b", "{name}"]}, "launcher.start: must name the sandbox"),
        ({"enter": "docker exec"}, "launcher.enter: must be a list of words"),
        ({"enter": ["a"], "host_inside": "http://x"}, "launcher.host_inside: must be a name or an address"),
        ({"_target_": "os:getcwd"}, "must give a skyrl_train.rollout.agents.launchers.Launcher"),
    ],
)
def test_launchers_that_cannot_work_are_told_before_anything_is_loaded(launcher: Any, message: str) -> None:
    found = violations(launcher)
    assert re.search(message, "\n".join(found)), found


def test_a_launcher_is_for_commands_and_its_bound_for_engines_that_do_not_wait() -> None:
    assert "is for command" in violations("bubblewrap", command=[], url="http://x/")[0]
    assert "waits until every program" in violations(in_docker(most=4), backend="hf")[0]


def test_launchers_that_can_work_are_not_refused() -> None:
    for launcher in (
        in_docker(most=8, warm=8, memory_gb=1.5),
        in_docker(network="agents", host_inside="172.18.0.1"),
        {"_target_": "podman", "rootfs": "/srv/root", "program": ["podman", "--runtime", "runc"]},
        "bubblewrap",
        {"enter": ["nice", "--adjustment=10"]},
        {"start": ["a", "{folder}"], "cleanup": ["b", "{name}"], "remaining": ["c", "{{.Names}}"], "most": 3},
    ):
        assert violations(launcher) == []
    assert violations(in_docker(network="bridge"), host="172.17.0.1") == []


def test_words_of_a_launcher_may_be_lists_as_settings_have_them() -> None:
    assert launcher_of({"enter": ["nice"]}) == launcher_of({"_target_": "template", "enter": ("nice",)})
    assert hash(launcher_of({"enter": ["nice"]})) == hash(launcher_of({"enter": ["nice"]}))


def test_a_launcher_that_does_not_work_here_is_told_before_anything_is_loaded(docker: Docker) -> None:
    def told(launcher: Any) -> list[str]:
        generator = GeneratorConfig(agent_loop={"_target_": "agent", "command": ["a"], "launcher": launcher})
        rules = [rule for rule in RL_MACHINE_RULES if getattr(rule, "__name__", "") == "_launcher"]
        return [str(each) for each in run_rules(SimpleNamespace(generator=generator), rules)]

    assert told(in_docker()) == []
    assert told({"enter": ["nice"]}) == []
    assert "No such image: other:2" in told(in_docker(image="other:2"))[0]
    assert "FileNotFoundError" in told(in_docker(program=["no-such-docker"]))[0]
    (docker.state / "down").touch()
    (down,) = told(in_docker())
    assert "Is the docker daemon running?" in down
    assert "got 'docker(image=agents:1)'" in down


# Launchers that are installed here


@pytest.mark.skipif(not programs(), reason="bubblewrap is not installed here")
def test_bubblewrap_hides_this_machines_files_and_processes(roll: Roll, tmp_path: Path) -> None:
    launcher = launcher_of("bubblewrap")
    if subprocess.run(launcher.check, capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("bubblewrap may not make namespaces here")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    then = (
        f"assert not os.path.exists({str(secret)!r})\nassert len([n for n in os.listdir('/proc') if n.isdigit()]) < 9\n"
    )
    then += "assert set(os.environ) & {'SSH_AUTH_SOCK', 'PYTEST_CURRENT_TEST'} == set(), os.environ\n"
    loop = agent(tmp_path, then + REPORT, _target_="bubblewrap", read=[str(tmp_path / "code")])
    (tmp_path / "code").mkdir()
    (tmp_path / "agent.py").rename(tmp_path / "code" / "agent.py")
    loop["command"] = ["python3", "-S", str(tmp_path / "code" / "agent.py"), "{task_file}", "{report_file}"]
    (trajectory,) = roll(scripted("5"), loop).trajectories
    assert trajectory.failure is None
    assert trajectory.reward == 1.0


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A launcher of podman's with a store of its own, whose containers have this machine's programs."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed here")
    root = tmp_path / "root"
    for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    store = tempfile.mkdtemp(dir="/tmp")  # podman wants short names
    program = ["podman", "--storage-driver", "vfs", "--root", f"{store}/store", "--runroot", f"{store}/runs"]
    program += ["--cgroup-manager", "cgroupfs", "--events-backend", "file"]
    program += ["--runtime", "runc"] if shutil.which("runc") else []
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=512:512", "--volume", "/usr:/usr:ro"]
    tried = [*program, "run", "--rm", "--network", "host", *limits, "--rootfs", str(root), "true"]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"podman cannot run a container here: {done.stderr.strip()[-200:]}")
    options = [*limits, "--volume", f"{tmp_path}:{tmp_path}"]
    yield {"_target_": "podman", "rootfs": str(root), "program": program, "options": options}
    subprocess.run([*program, "rm", "--all", "--force"], capture_output=True, timeout=60, check=False)
    shutil.rmtree(store, ignore_errors=True)


@pytest.mark.slow
def test_podman_runs_a_command_within_limits_and_nothing_is_left(
    roll: Roll, tmp_path: Path, podman: dict[str, Any]
) -> None:
    seen = tmp_path / "seen"
    then = f"json.dump([os.getpid(), os.environ['HOME'], os.getcwd()], open({str(seen)!r}, 'w'))\n"
    then += "import subprocess\nsubprocess.Popen(['sleep', '100'])\n"
    then += "try:\n    left = [subprocess.Popen(['sleep', '9']) for _ in range(40)]\n"
    then += "except BlockingIOError:\n    pass\nelse:\n    sys.exit('there is no limit of processes')\n"
    loop = agent(tmp_path, then + REPORT, **podman, pids=20, warm=1)
    loop["command"] = ["/usr/bin/python3", "-S", *loop["command"][2:]]
    batch = roll(FakeEngine(lambda _: letter_by_letter("5")), loop, n=2)
    assert [each.failure for each in batch.trajectories] == [None, None]
    process, home, folder = json.loads(seen.read_text())
    assert process < 20, "it sees this machine's processes"
    assert home == folder
    listed = [*podman["program"], "ps", "--all", "--format", "{{.Names}}"]

    def names() -> list[str]:
        return subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    assert eventually(lambda: len(names()) == 1), "one is ahead of its use, which ends with the run"
