"""The shell scripts on machines that are not right: in a folder with a space, with only a stand-in for Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "grep", "mkdir", "rm")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "a clone"
    shutil.copytree(REPOSITORY / "scripts", root / "scripts")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return folder


def add_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('sh')}\n{body}\n")
    path.chmod(0o755)


def run_script(script: Path, bin_dir: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(script), *arguments],
        env={"PATH": str(bin_dir), "HOME": str(bin_dir), **variables},
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_suitable_python_is_an_error_that_says_which_to_install(clone: Path, bin_dir: Path) -> None:
    add_program(bin_dir / "python3", "exit 127")

    result = run_script(clone / "scripts/test.sh", bin_dir)

    assert result.returncode == 1
    assert "Python 3.10, 3.11, 3.12 or 3.13 is needed" in result.stderr
    assert not (clone / ".venv").exists()


def test_a_python_without_the_venv_module_names_the_package(clone: Path, bin_dir: Path) -> None:
    add_program(bin_dir / "python3", 'case "$2" in *ensurepip*) exit 1 ;; *print*) echo 3.11 ;; esac')

    result = run_script(clone / "scripts/quickstart.sh", bin_dir)

    assert result.returncode == 1
    assert "apt install python3.11-venv" in result.stderr


def test_a_named_python_that_does_not_fit_is_refused(clone: Path, bin_dir: Path) -> None:
    result = run_script(clone / "scripts/check.sh", bin_dir, SKYRL_TRAIN_PYTHON="/nowhere/python3")

    assert result.returncode == 1
    assert "SKYRL_TRAIN_PYTHON=/nowhere/python3" in result.stderr


def test_a_second_installation_at_the_same_time_is_refused(clone: Path, bin_dir: Path) -> None:
    add_program(bin_dir / "python3", "echo /usr/bin/python3")
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".installing").write_text(f"{os.getpid()}\n")

    result = run_script(clone / "scripts/test.sh", bin_dir)

    assert result.returncode == 1
    assert f"process {os.getpid()} is installing" in result.stderr


@pytest.fixture
def installed_clone(clone: Path, bin_dir: Path) -> Path:
    """A clone whose .venv holds a stand-in that prints its arguments, one in brackets each; installing does nothing."""
    stand_in = """
case "$1 $2 $*" in
"-m venv "*) mkdir -p "$VENV/bin"; cat "$0" >"$VENV/bin/python"; chmod +x "$VENV/bin/python" ;;
"-m pip "*" install "*) echo installed >>"$VENV.log" ;;
"-m pytest "*"slow and"*) printf '[%s]' "$@"; exit "$SLOW_STATUS" ;;
"-m pytest "*|"-m skyrl_train.main "*) printf '[%s]' "$@"; exit "$STATUS" ;;
"-c "*print*) echo "$0" ;;
"--version "*) echo Python 3.11.7 ;;
esac
"""
    chmod = shutil.which("chmod")
    assert chmod is not None
    (bin_dir / "chmod").symlink_to(chmod)
    add_program(bin_dir / "python3", stand_in)
    return clone


def run_installed(
    clone: Path, bin_dir: Path, script: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    defaults = {"VENV": str(clone / ".venv"), "STATUS": "0", "SLOW_STATUS": "0"}
    return run_script(clone / "scripts" / script, bin_dir, *arguments, **{**defaults, **variables})


def test_the_quickstart_passes_overrides_on_unchanged(installed_clone: Path, bin_dir: Path) -> None:
    result = run_installed(installed_clone, bin_dir, "quickstart.sh", "data.path=/a folder", "seed=1")

    assert result.stdout == "[-m][skyrl_train.main][+experiment=gsm8k_multiturn][data.path=/a folder][seed=1]"


def test_the_quickstart_runs_another_recipe(installed_clone: Path, bin_dir: Path) -> None:
    result = run_installed(installed_clone, bin_dir, "quickstart.sh", "+experiment=lora", "seed=1")

    assert result.stdout == "[-m][skyrl_train.main][+experiment=lora][seed=1]"


def test_a_second_run_installs_nothing(installed_clone: Path, bin_dir: Path) -> None:
    run_installed(installed_clone, bin_dir, "test.sh")
    run_installed(installed_clone, bin_dir, "test.sh")
    run_installed(installed_clone, bin_dir, "quickstart.sh")

    assert (installed_clone / ".venv.log").read_text() == "installed\n"


def test_changed_requirements_are_installed(installed_clone: Path, bin_dir: Path) -> None:
    run_installed(installed_clone, bin_dir, "test.sh")
    with (installed_clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    run_installed(installed_clone, bin_dir, "test.sh")

    assert (installed_clone / ".venv.log").read_text() == "installed\ninstalled\n"


def test_an_interrupted_installation_starts_afresh(installed_clone: Path, bin_dir: Path) -> None:
    run_installed(installed_clone, bin_dir, "test.sh")
    (installed_clone / ".venv" / ".installing").write_text("999999999\n")
    (installed_clone / ".venv" / "half-written").touch()

    result = run_installed(installed_clone, bin_dir, "test.sh")

    assert "was interrupted" in result.stderr
    assert result.returncode == 0
    assert not (installed_clone / ".venv" / "half-written").exists()


def test_a_folder_that_moved_gets_a_new_environment(installed_clone: Path, bin_dir: Path) -> None:
    run_installed(installed_clone, bin_dir, "test.sh")
    moved = installed_clone.rename(installed_clone.with_name("moved here"))

    result = run_installed(moved, bin_dir, "test.sh")

    assert "starting .venv afresh" in result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("status", "slow_status", "expected"),
    [("0", "0", 0), ("0", "5", 0), ("5", "0", 5), ("1", "0", 1), ("0", "1", 1), ("1", "5", 1)],
)
def test_no_slow_test_is_fine_and_any_other_failure_counts(
    installed_clone: Path, bin_dir: Path, status: str, slow_status: str, expected: int
) -> None:
    result = run_installed(installed_clone, bin_dir, "test.sh", "--slow", STATUS=status, SLOW_STATUS=slow_status)

    assert result.returncode == expected


@pytest.mark.parametrize(("found", "workers"), [(1, 2), (2, 3), (7, 8), (8, 8), (64, 8)])
def test_the_slow_tests_take_the_same_arguments_and_one_process_more_than_cores(
    installed_clone: Path, bin_dir: Path, found: int, workers: int
) -> None:
    add_program(bin_dir / "nproc", f"echo {found}")

    result = run_installed(installed_clone, bin_dir, "test.sh", "-k", "a or b", "--slow")

    cores = f"[-n][{workers}][--dist][worksteal]"
    assert result.stdout == (
        f"[-m][pytest]{cores}[-k][a or b][-m][pytest][-m][slow and not gpu and not nightly and not cluster]{cores}"
        "[-k][a or b]"
    )


def test_an_unknown_check_is_refused(installed_clone: Path, bin_dir: Path) -> None:
    result = run_installed(installed_clone, bin_dir, "check.sh", "tpyes")

    assert result.returncode == 1
    assert "unknown check 'tpyes'" in result.stderr


@pytest.mark.parametrize(
    ("user", "said"),
    [("1000", "no Chromium: the tests of the viewer's page are skipped"), ("0", "installing Chromium")],
)
def test_chromium_is_installed_by_root_alone_and_its_tests_run_either_way(
    installed_clone: Path, bin_dir: Path, user: str, said: str
) -> None:
    add_program(bin_dir / "id", f"echo {user}")
    add_program(bin_dir / "timeout", 'shift; "$@"')
    add_program(bin_dir / "apt-get", f'echo "$@" >>"{installed_clone}/asked"; exit 100')

    result = run_installed(installed_clone, bin_dir, "test.sh", "--browser")

    assert said in result.stderr
    assert ("could not be installed" in result.stderr) == (user == "0")  # an archive that does not answer is no failure
    asked = installed_clone / "asked"
    assert (asked.read_text() if asked.exists() else "").count("update") == int(user == "0")
    assert result.stdout.endswith("[-m][pytest][-m][browser and not gpu and not nightly]")
    assert result.returncode == 0
