"""Dockerfiles are read as an engine for images reads them, and replayed piece by piece in a scratch folder."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "replay_dockerfile.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay_dockerfile", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replay_dockerfile"] = module  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def test_continued_lines_and_comments_are_one_instruction(script: ModuleType) -> None:
    text = '# a comment\nFROM base:1.2.3\n\nrun one \\\n    # inside\n    && two\nCMD ["x"]\n'
    assert [(i.name, i.text, i.line) for i in script.parse(text)] == [
        ("FROM", "base:1.2.3", 2),
        ("RUN", "one && two", 4),
        ("CMD", '["x"]', 7),
    ]


@pytest.mark.parametrize("text", ["FROM base\nnothing\n", "FROM base\nRUN one \\\n"])
def test_what_is_no_instruction_is_refused_with_its_line(script: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        script.parse(text)


def test_a_run_line_is_cut_where_commands_join_and_not_inside_quotes(script: ModuleType) -> None:
    assert script.pieces("pip install -e '.[cpu]' && sh -c 'a && b' && rm x") == [
        "pip install -e '.[cpu]'",
        "sh -c 'a && b'",
        "rm x",
    ]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("apt-get update", True),
        ("rm -rf /var/lib/apt/lists/*", True),
        ("useradd --create-home x", True),
        ("rm -rf build", False),
        ("python3 -m venv /app/.venv", False),
    ],
)
def test_what_only_root_can_do_is_told_apart(script: ModuleType, piece: str, expected: bool) -> None:
    assert script.needs_root(piece) is expected


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text("outputs\n")
    (folder / "kept.txt").write_text("kept\n")
    (folder / "outputs").write_text("a run\n")
    return folder


def test_steps_run_below_the_scratch_folder_with_the_images_environment(
    script: ModuleType, context: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    replay = script.Replay(scratch, python=sys.executable, context=context, resolve_only=False)
    instructions = script.parse(
        "FROM base:1.2.3\n"
        "RUN apt-get update && mkdir -p /app /outputs\n"
        "USER somebody\n"
        "WORKDIR /app\n"
        "ENV PATH=/app/tools:$PATH GREETING=hello\n"
        "COPY --chown=a:a . /app\n"
        "RUN cat kept.txt && test ! -e outputs && echo $GREETING $HOME $PATH >said\n"
        'ENTRYPOINT ["sh"]\nCMD ["-c", "test -s /app/said"]\n'
    )
    assert replay.run(instructions)
    assert replay.run_entry([])
    assert (scratch / "outputs").is_dir()
    greeting, home, path = (scratch / "app" / "said").read_text().split()
    assert (greeting, home) == ("hello", str(scratch / "home"))
    assert path.startswith(f"{scratch}/app/tools:")
    not_run = [step.text for step in replay.steps if step.outcome.startswith("not run")]
    assert not_run == ["FROM base:1.2.3", "apt-get update", "USER somebody"]


def test_files_are_copied_to_their_names_and_from_other_stages(
    script: ModuleType, context: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    replay = script.Replay(scratch, python=sys.executable, context=context, resolve_only=False)
    assert replay.run(
        script.parse(
            "FROM base:1.2.3 AS one\nRUN mkdir -p /outputs\nCOPY --chown=a:a kept.txt /app/requirements/other.txt\n"
            "FROM one AS two\nRUN cp /app/requirements/other.txt /outputs/made\n"
            "FROM one\nCOPY --from=two /outputs/made /app/made\n"
        )
    )
    assert (scratch / "app" / "made").read_text() == "kept\n"


def test_where_nothing_is_installed_only_packages_are_resolved(
    script: ModuleType, context: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    replay = script.Replay(scratch, python=sys.executable, context=context, resolve_only=True)
    text = "RUN mkdir -p /app && pip install --no-build-isolation -e /app && python -m tested\nCOPY --from=a /b /c\n"
    assert replay.run(script.parse(text))
    assert [step.outcome for step in replay.steps] == ["ok", *["not run: nothing was installed"] * 3]


def test_a_step_that_fails_ends_the_replay(script: ModuleType, context: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    replay = script.Replay(scratch, python=sys.executable, context=context, resolve_only=False)
    assert not replay.run(script.parse("RUN true && false && echo never\nRUN echo never\n"))
    assert [(step.text, step.outcome) for step in replay.steps] == [("true", "ok"), ("false", "failed")]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_projects_images_are_understood(script: ModuleType, name: str) -> None:
    instructions = script.parse((ROOT / "docker" / name).read_text(encoding="utf-8"))
    runs = [piece for i in instructions if i.name == "RUN" for piece in script.pieces(i.text)]
    assert any("pip install" in piece for piece in runs)
    skipped = [piece.split()[0] for piece in runs if script.needs_root(piece)]
    assert set(skipped) == {"apt-get", "rm", "useradd", "chown"}
