import os
import subprocess
import sys

import pytest

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system.files import write_atomically, write_json
from skyrl_train.telemetry.run_folder import RunFolder


def folder_with_a_run(root):
    folder = RunFolder(root)
    folder.create()
    folder.metrics_file.write_text('{"step": 1}\n')
    folder.config_file.write_text("seed: 1\n")
    for step in (2, 10):
        (folder.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    return folder


def test_a_folder_with_a_configuration_alone_holds_no_run(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create()
    folder.config_file.write_text("seed: 1\n")
    folder.metrics_file.touch()
    folder.checkpoints.mkdir()
    assert not folder.holds_a_run()
    assert folder.set_aside() is None


def test_a_journal_is_a_run_which_another_in_the_folder_does_not_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.journal.mkdir()
    (folder.journal / "journal.jsonl").write_text('{"prompts": "p"}\n')
    assert folder.holds_a_run()
    assert folder.set_aside() == tmp_path / "previous-1"
    assert not folder.journal.exists()


def test_answers_of_a_model_that_took_no_step_are_results_of_a_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_file.touch()
    folder.samples.mkdir()
    (folder.samples / "step_000000.jsonl").write_text("{}\n")
    assert folder.set_aside() == tmp_path / "previous-1"
    assert (tmp_path / "previous-1" / "samples" / "step_000000.jsonl").is_file()


def test_runs_are_set_aside_one_after_the_other_and_foreign_files_stay(tmp_path):
    for number in (1, 2):
        folder = folder_with_a_run(tmp_path)
        (tmp_path / "notes.txt").touch()
        assert folder.set_aside() == tmp_path / f"previous-{number}"
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "previous-1", "previous-2"}
    assert {path.name for path in (tmp_path / "previous-2").iterdir()} == {
        "metrics.jsonl",
        "config.yaml",
        "checkpoints",
    }


def test_what_is_left_of_a_run_that_begins_again_still_tells_which_run_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    folder.journal.mkdir()
    folder.checkpoints.mkdir()
    for path in (folder.config_file, folder.plan_file, folder.metrics_file):
        path.write_text("{}")
    folder.discard()
    assert {path.name for path in tmp_path.iterdir()} == {"journal", "config.yaml", "plan.json"}


def test_later_checkpoints_are_set_aside(tmp_path):
    folder = folder_with_a_run(tmp_path)
    assert folder.set_aside_checkpoints_after(10) is None
    assert folder.set_aside_checkpoints_after(2) == tmp_path / "previous-1"
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000002"]
    assert (tmp_path / "previous-1" / "checkpoints" / "step_000010").is_dir()


def modes(root):
    return {path.name: oct(path.stat().st_mode & 0o777) for path in (root, *root.rglob("*"))}


def test_a_new_folder_and_all_that_is_made_in_it_later_is_the_owners_alone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(private=True)
    folder.checkpoints.mkdir()
    folder.metrics_file.touch()
    subprocess.run(["sh", "-c", f"umask 022; mkdir {folder.export}; touch {folder.export}/weights"], check=True)
    assert modes(folder.root) == {
        "run": "0o700",
        "checkpoints": "0o700",
        "metrics.jsonl": "0o600",
        "export": "0o700",
        "weights": "0o600",
    }


def test_a_folder_that_holds_files_already_stays_as_open_as_it_is(tmp_path):
    (tmp_path / "notes.txt").touch(0o644)
    tmp_path.chmod(0o755)
    RunFolder(tmp_path).create(private=True)
    assert modes(tmp_path) == {tmp_path.name: "0o755", "notes.txt": "0o644"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SkyrlTrainError, match=r"output_dir=.*file/run cannot be made"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_folder_is_held_against_other_processes_until_they_die(tmp_path):
    program = (
        "import pathlib, sys, time\n"
        "from skyrl_train.telemetry.run_folder import RunFolder\n"
        f"with RunFolder(pathlib.Path({str(tmp_path)!r})).locked():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        for known in (str(process.pid), "unknown"):
            with pytest.raises(SkyrlTrainError, match=f"process {known}"), RunFolder(tmp_path).locked():
                pass
            (tmp_path / ".lock").unlink()  # whose removal lets nobody in
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_is_gone_cannot_be_locked(tmp_path):
    with pytest.raises(SkyrlTrainError, match="cannot be locked"), RunFolder(tmp_path / "gone").locked():
        pass


def test_a_write_that_breaks_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"b": 1, "a": [True, None]})
    before = path.read_text()
    assert before == '{\n  "a": [\n    true,\n    null\n  ],\n  "b": 1\n}\n'

    def broken(descriptor):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk gone"):
        write_atomically(path, b"new")
    assert path.read_text() == before
