"""Every shell block of README and docs: each command exists and takes its arguments; what is marked runs."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from skyrl_train.runs.cli.command_line import preflight
from tests.support import warm_python
from tests.support.page_commands import PAGES, Command, commands_of
from tests.support.source_calls import REPOSITORY

STRANGERS = {"pip", "uv", "docker", "lm_eval", "inspect"}
"""Programs that are not this project's; what `pip` is told to install is tests/unit/test_packaging.py's."""
ROOTS = {
    **dict.fromkeys((f"skyrl_train.{name}" for name in ("main", "main_generate", "plan", "main_serve")), "config"),
    "skyrl_train.main_sft": "sft",
}
"""Programs that take settings, and the root of their configuration."""
SMALL = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "data.max_validation_prompts=4"]
SETTINGS = {
    "skyrl_train.main": [*SMALL, "trainer.total_steps=2"],
    "skyrl_train.main_generate": ["data.max_validation_prompts=4"],
    "skyrl_train.main_sft": ["trainer.num_steps=2", "trainer.batch_size=4", "data.max_validation_rows=8"],
    "skyrl_train.plan": ["plan.rates=none"],
    "skyrl_train.main_serve": ["--port=0"],
}
"""What makes a command small; it stands behind those of the page."""
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
SERVERS = {"skyrl_train.view.__main__", "skyrl_train.main_serve"}
"""Programs that go on until they are stopped."""
TIMEOUT_S = 540


@functools.cache
def scripts() -> dict[str, str]:
    """Modules of the console commands."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")
    parsed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    named = {name: target.partition(":")[0] for name, target in parsed["project"]["scripts"].items()}
    return {**named, "skyrl-plan": "skyrl_train.plan"}


def module_of(command: Command) -> str:
    """The module that a command runs; its program where that is no module."""
    name = scripts().get(command.program, command.program)
    return f"{name}.__main__" if name in ("skyrl_train.view", "skyrl_train.selftest") else name


def wrong_with(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    module, arguments = module_of(command), command.arguments
    if (
        command.program in STRANGERS
        or "python -m venv" in " ".join(command.words)
        or command.words[0] == "adapters/bin/pip"
    ):
        return ""
    if "=" in command.program:  # settings that are shown alone
        module, arguments = "skyrl_train.main", [*command.words]
    if {"--from", "--find"} & {*arguments}:  # which are answered by themselves: tests/unit/runs/test_migrate.py
        return ""
    script = command.words[1] if command.words[0] == "python" and command.words[1] != "-m" else command.words[0]
    if script.endswith((".sh", ".py")):
        path = REPOSITORY / script
        return "" if path.is_file() else f"{path} is not there"
    if module in ROOTS:
        serving = ("--name", "--also", "--folder", "--keys", "--port", "--host")
        plain = [word for index, word in enumerate(arguments) if not {word, *arguments[index - 1 : index]} & {*serving}]
        try:
            preflight([*plain, *([] if plain == ["--help"] else ["--cfg", "job"])], config_name=ROOTS[module])
        except SystemExit:
            return capsys.readouterr().err
        return ""
    if command.variables == ("PYTHONPATH=examples",):
        monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    known = spec is not None or module.partition(".")[0] in ("vllm", "tinker_cookbook")
    if not known:
        return f"there is no module {module}"
    if module.partition(".")[0] == "skyrl_train" and spec is not None and spec.origin is not None:
        source = Path(spec.origin).read_text(encoding="utf-8")
        missing = [word for word in arguments if word.startswith("--") and f'"{word}"' not in source]
        return f"no flag {', '.join(missing)}" if missing else ""
    return ""


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_each_command_of_a_page_exists_and_takes_its_arguments(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = {str(command): wrong_with(command, monkeypatch, capsys) for command in commands_of(page)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_there_are_many_and_most_are_run() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    ours = [command for command in commands if module_of(command).startswith("skyrl_train")]
    assert len(commands) > 80
    assert len(ours) > 60
    assert sum(command.runs for command in ours) >= 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's folder: the module and the rows that pages speak of."""
    code = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n# my_code\.py\n(.*?)^```", code, re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "my_code.py").write_text(found[1])
    rows = [{"question": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(1, 17)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


def run(command: Command, folder: Path) -> None:
    """Run one command in `folder`, small; of a run that it names it gets the last one there."""
    module = module_of(command)
    words = ["-m", module.removesuffix(".__main__"), *arguments_of(command, folder)]
    words += SETTINGS.get(module, []) if "--help" not in words else []
    words += ["trainer.total_steps=3"] if "trainer.resume_mode=fork" in words else []  # more than the run has taken
    path = os.pathsep.join([str(REPOSITORY), *(f"{folder}/{each.partition('=')[2]}" for each in command.variables)])
    environment = {"PYTHONPATH": path, "BROWSER": "true"}
    if module in SERVERS and "--export" not in words:
        serve(words, folder, environment)
        return
    done = warm_python.run(*words, folder=folder, environment=environment, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"


def arguments_of(command: Command, folder: Path) -> list[str]:
    """The page's arguments, with a run of this folder where the page writes a name of the reader's."""
    runs = sorted(folder.glob("outputs/*/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    run = str(runs[-1].parent) if runs else "no run yet"
    names = {
        "outputs/.../export": f"{run}/export",
        "outputs/my_run": run,
        "run_a": run,
        "run_b": run,
        "outputs/RUN": run,
    }
    names |= {"OUTPUT_DIR": run, "RUN_OR_CHECKPOINT": run}
    words = []
    for word in command.arguments:
        key, equals, value = word.rpartition("=")
        words.append(f"{key}{equals}{names[value]}" if value in names else word)
    return words


def serve(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start what serves, wait for its address, and stop it as Ctrl-C does."""
    log = folder / "served.log"
    with log.open("w") as file:
        process = warm_python.start(words, output=file.fileno(), environment=environment, folder=folder)
    try:
        for _ in range(240):
            if ADDRESS.search(log.read_text()) or process.poll() is not None:
                break
            with_timeout(process, 0.5)
        assert ADDRESS.search(log.read_text()), log.read_text()[-3000:]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130, -2), log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait(10)


def with_timeout(process: warm_python.Started, seconds: float) -> None:
    """Wait so long, or until the process ends."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def run_page(page: Path, folder: Path) -> None:
    commands = [command for command in commands_of(page) if command.runs]
    if needs := [
        command
        for command in commands
        if {"outputs/my_run", "OUTPUT_DIR", "RUN_OR_CHECKPOINT"} & {*" ".join(command.words).replace("=", " ").split()}
    ]:
        first = Command(
            page="",
            line=0,
            variables=(),
            runs=True,
            words=("python", "-m", "skyrl_train.main", "+experiment=gsm8k_multiturn", "trainer.capsules=2"),
        )
        if needs[0] is commands[0]:
            run(first, folder)
    for command in commands:
        run(command, folder)


@pytest.mark.slow
def test_the_commands_of_the_readme_run(folder: Path) -> None:
    run_page(PAGES[0], folder)


RUNNABLE = [page for page in PAGES[1:] if any(command.runs for command in commands_of(page))]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=[page.name for page in RUNNABLE])
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    run_page(page, folder)
