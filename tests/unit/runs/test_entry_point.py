"""The command line of a process: the stand-in below is `main.py` without the training."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STANDIN = """
import logging
import sys

from skyrl_train.runs.cli import start
from skyrl_train.config.schema import Config
from skyrl_train.runs.cli.composition import load_node


def run(node):
    config = load_node(node, Config)
    logging.getLogger("standin").info("for the file")
    logging.getLogger("standin").warning("for the terminal")
    print("RUN", config.seed, config.output_dir, "torch" in sys.modules)


def look(node):
    print("LOOK", load_node(node, Config).output_dir)


start(run, config_name="config", look=look)
"""


@pytest.fixture
def started(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs the stand-in in an empty folder."""
    (tmp_path / "standin.py").write_text(STANDIN)

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "standin.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)

    return start


@pytest.mark.slow
def test_a_run_writes_into_its_own_folder_and_keeps_the_terminal_quiet(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started("+experiment=gsm8k_multiturn")

    (folder,) = (tmp_path / "outputs" / "gsm8k_multiturn").iterdir()
    assert done.stdout == f"RUN 0 {folder} False\n"
    assert done.stderr == "WARNING standin: for the terminal\n"
    log = (folder / "run.log").read_text()
    assert "INFO standin: for the file" in log
    assert f"INFO stdout: RUN 0 {folder} False" in log
    assert log.count("for the terminal") == 1
    assert (folder / ".hydra" / "overrides.yaml").read_text() == "- +experiment=gsm8k_multiturn\n"


@pytest.mark.slow
@pytest.mark.parametrize(("access", "log", "own"), [("owner", 0o600, 0o700), ("umask", 0o644, 0o755)])
def test_nobody_else_reads_a_new_run_folder_unless_a_setting_says_so(
    access: str,
    log: int,
    own: int,
    started,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    os.umask(0o022)
    assert started("hydra.run.dir=run", f"output_access={access}").returncode == 0
    of = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))}
    assert (of["run"], of[".hydra"], of["run.log"], of["overrides.yaml"]) == (own, own, log, log)


@pytest.mark.slow
def test_a_look_takes_the_place_of_the_run_and_leaves_nothing_behind(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started("--look", "output_dir=chosen", "hydra.run.dir=chosen", "seed=1")

    assert (done.returncode, done.stderr) == (0, "")
    word, folder = done.stdout.split()
    assert word == "LOOK"
    assert "skyrl_train_look_" in folder
    assert not Path(folder).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["standin.py"]


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["hydra.run.dir=chosen", "output_dir=chosen"])
def test_both_names_of_the_folder_move_everything(argument: str, started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started(argument)

    assert done.returncode == 0
    assert (tmp_path / done.stdout.split()[2]).resolve() == tmp_path / "chosen"
    assert (tmp_path / "chosen" / ".hydra").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chosen", "standin.py"]


@pytest.mark.slow
def test_a_sweep_gives_each_run_a_folder(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started("-m", "seed=3,4")

    (sweep,) = (tmp_path / "outputs" / "skyrl_train").iterdir()
    assert sweep.name.startswith("sweep_")
    runs = [line for line in done.stdout.splitlines() if line.startswith("RUN")]
    assert runs == [f"RUN 3 {sweep / '0'} False", f"RUN 4 {sweep / '1'} False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        "hydra/job_logging=default",
        "hydra/job_logging=disabled",
        "+hydra.job_logging.loggers.standin={handlers: [file], propagate: false}",
        "hydra.output_subdir=x",
        "hydra.callbacks=null",
    ],
)
def test_hydra_cannot_be_had_to_write_secrets(typed: str, started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "standin.py"
    file.write_text(STANDIN.replace("for the terminal", "api_key=tangerine-77"))
    done = started(typed, "generator=http", "generator.http.url=http://me:tangerine-77@127.0.0.1:9")

    assert done.returncode == (2 if typed.startswith(("hydra.output", "hydra.callbacks")) else 0), done.stderr
    said = [
        done.stdout,
        done.stderr,
        *(path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path != file),
    ]
    assert [text for text in said if "tangerine-77" in text] == []
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("swept", [False, True])
def test_no_secret_of_the_command_line_reaches_the_disk_or_the_terminal(swept: bool, started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    secrets = ["tangerine-7", "pa55-word", "hf_" + "a1" * 15]
    done = started(
        "environment.env_class={_target_: text2sql, db_path: 'host=h password=pa55-word'}",
        "generator=http",
        f"generator.http.url=http://me:tangerine-7@127.0.0.1:9/{secrets[2]}",
        *(["seed=3,4", "-m"] if swept else []),
    )

    assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "standin.py"]
    assert {"config.yaml", "hydra.yaml", "overrides.yaml"} <= {path.name for path in written}
    assert swept == ("multirun.yaml" in {path.name for path in written})
    said = [done.stdout, done.stderr, *(path.read_text() for path in written)]
    assert [text for text in said for secret in secrets if secret in text] == []
    assert "http://<redacted>@127.0.0.1:9/<redacted>\n" in (next(tmp_path.rglob(".hydra")) / "config.yaml").read_text()


@pytest.mark.slow
def test_problems_end_with_status_two_without_traceback_or_folder(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started("trainer.train_batch_sise=4", "trainer.train_batch_size=abc", "generator.sampling.temperature=-1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "3 problems in the configuration:"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_help_shows_examples_groups_and_common_settings(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started("--help")

    assert done.returncode == 0
    assert "+experiment=gsm8k_multiturn" in done.stdout
    assert "platform: cpu, gpu" in done.stdout
    assert "trainer.train_batch_size" in done.stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_the_job_can_be_shown_resolved(started) -> None:  # type: ignore[no-untyped-def]
    done = started("+experiment=gsm8k_multiturn", "seed=9", "--cfg", "job", "--resolve", "-p", "trainer.policy")

    assert done.returncode == 0
    assert "lr: 5.0e-05" in done.stdout
    assert started("--cfg", "hydra", "--resolve", "-p", "hydra.run").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stands_there", [True, False])
def test_a_console_command_finds_modules_where_the_user_stands(started, tmp_path: Path, stands_there: bool) -> None:  # type: ignore[no-untyped-def]
    """Python itself looks in the command's own folder alone."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "my_code.py").write_text("def score(completion, answer):\n    return 0.0\n")
    (tmp_path / "standin.py").write_text(
        f"import os\nos.chdir({str(tmp_path / ('task' if stands_there else '.'))!r})\n{STANDIN}"
    )
    done = started("+experiment=gsm8k_multiturn", "environment.reward=my_code:score")
    assert done.returncode == (0 if stands_there else 2), done.stderr
    assert stands_there or "No module named 'my_code'" in done.stderr


@pytest.mark.parametrize("script", ["skyrl-train", "skyrl-sft", "skyrl-plan", "skyrl-generate"])
def test_a_console_script_is_a_function_that_is_there(script: str) -> None:
    (target,) = re.findall(rf'^{script} = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.slow
def test_a_command_without_arguments_says_which_experiments_there_are(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = started()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Nothing was named to train.")
    assert "+experiment=gsm8k_multiturn" in done.stderr
    assert "=sft_" not in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_the_version_is_that_of_the_package(started) -> None:  # type: ignore[no-untyped-def]
    done = started("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"skyrl_train \d+\.\d+\.\d+ \(Hydra [\d.]+, Python [\d.]+\)\n", done.stdout)
