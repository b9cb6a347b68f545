"""The self-test: what becomes of cases that fail in every way, what is skipped and why, and what the report says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.selftest import learners
from skyrl_train.selftest.__main__ import main
from skyrl_train.selftest.cases import CASES, Case, Context, chosen_cases
from skyrl_train.selftest.fixtures import gradient_of, make_learner, make_reference, require_gradient, save_model
from skyrl_train.selftest.machine import Machine, unsupported_versions
from skyrl_train.selftest.processes import CaseResult, SharedProcess, run_body, run_case
from tests.support.machines import CPU, gpus
from tests.support.process_trees import command_line, descendants, is_running

BODIES = "tests.support.selftest_bodies"


def run(body: str, *, deadline_s: float = 60.0, ranks: int = 1) -> CaseResult:
    return run_body("a case", f"{BODIES}:{body}", {}, deadline_s=deadline_s, devices=["cpu"] * ranks)


def context(folder: Path) -> Context:
    return Context(device="cpu", rank=0, num_ranks=1, folder=folder)


def test_a_case_reports_its_figure_from_rank_0() -> None:
    result = run("figure", ranks=2)
    assert (result.outcome, result.detail) == ("pass", "rank 0 of 2 on cpu")


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        ("wrong", "fail", "AssertionError: 2 is not 3"),
        ("skips", "skip", "no compiler here"),
        ("lacks_a_package", "skip", "package_that_nobody_has not installed"),
        ("aborts", "fail", "the process was ended by SIGABRT and left no answer"),
    ],
)
def test_each_way_to_end_is_a_row_with_its_reason(body: str, outcome: str, detail: str) -> None:
    result = run(body)
    assert (result.outcome, result.detail) == (outcome, detail)
    assert bool(result.traceback) == (body in ("wrong", "lacks_a_package"))
    assert ("Fatal Python error: Aborted" in result.log_tail) == (body == "aborts")


def test_a_case_that_hangs_is_ended_at_its_deadline() -> None:
    started = time.monotonic()
    result = run("hangs_with_a_child", deadline_s=3.0)
    assert (result.outcome, result.detail) == ("fail", "still running after 3 s, and killed")
    assert time.monotonic() - started < 60


def test_a_shared_process_that_is_not_begun_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedProcess()
    assert len(os.listdir("/proc/self/fd")) == before
    shared.close()
    assert not shared.log.exists()


@pytest.mark.slow
def test_cases_share_a_process_until_one_of_them_does_not_pass() -> None:
    shared = SharedProcess()
    try:

        def share(body: str, deadline_s: float = 60.0) -> CaseResult:
            name, devices = f"{BODIES}:{body}", ["cpu"]
            return run_body("a case", name, {}, deadline_s=deadline_s, devices=devices, shared=shared)

        first, second = share("process_id"), share("process_id")
        assert first.outcome == second.outcome == "pass"
        assert first.detail == second.detail
        seen = {first.detail}
        for body, reason in (
            ("wrong", "AssertionError: 2 is not 3"),
            ("aborts", "the process was ended by SIGABRT and left no answer"),
            ("hangs_with_a_child", "still running after 3 s, and killed"),
        ):
            failed = share(body, deadline_s=3.0 if body.startswith("hangs") else 60.0)
            assert (failed.outcome, failed.detail) == ("fail", reason)
            assert first.detail not in failed.log_tail
            after = share("process_id")
            assert after.outcome == "pass"
            assert after.detail not in seen
            seen.add(after.detail)
        skipped = share("skips")
        assert (skipped.outcome, skipped.detail) == ("skip", "no compiler here")
        assert share("process_id").detail in seen
    finally:
        shared.close()
    assert not shared.log.exists()
    assert not Path(f"/proc/{after.detail}").exists()


def test_of_several_ranks_the_one_that_failed_first_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.selftest.processes._OTHERS_S", 0.5)
    result = run("rank_1_is_wrong", ranks=2)
    assert (result.outcome, result.detail) == ("fail", "AssertionError: rank 1 has the reason")


@pytest.mark.parametrize(
    ("case", "machine", "reason"),
    [
        (Case(name="x", body="", packages=("no_such_package",)), CPU, "no_such_package not installed"),
        (Case(name="x", body="", cuda_only=True), CPU, "needs a CUDA device"),
        (Case(name="x", body="", cuda_only=True), gpus(1), ""),
        (Case(name="x", body="", min_devices=2), gpus(1), "needs 2 CUDA devices, found 1"),
        (Case(name="x", body="", min_devices=2), CPU, ""),
    ],
)
def test_what_cannot_be_run_is_skipped_with_its_reason(case: Case, machine: Machine, reason: str) -> None:
    assert case.reason_to_skip(machine) == reason


def test_a_folder_with_a_packages_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert Case(name="x", body="", packages=("some_package",)).reason_to_skip(CPU) == "some_package not installed"


def test_ranks_are_one_for_each_device_and_two_without_any() -> None:
    case = Case(name="x", body="", processes="each_device")
    assert [case.num_processes(machine) for machine in (CPU, gpus(1), gpus(4), gpus(16))] == [2, 1, 4, 8]


@pytest.mark.slow
def test_on_one_gpu_cases_of_a_rank_for_each_device_share_a_process() -> None:
    case = Case(name="x", body=f"{BODIES}:process_id", processes="each_device", shares_process=True)
    shared = SharedProcess()
    try:
        found = [run_case(case, machine, shared) for machine in (gpus(1), gpus(1), gpus(2), CPU)]
    finally:
        shared.close()
    assert [result.outcome for result in found] == ["pass"] * 4
    assert found[0].detail == found[1].detail
    assert len({result.detail for result in found}) == 3
    own = [case for case in CASES if not case.shares_process and case.min_devices < 2]
    assert len(own) <= 8, "each takes seconds to import torch and to begin CUDA"


def test_names_choose_cases_and_groups_of_them() -> None:
    assert [case.name for case in chosen_cases(["sft", "kernels/padded"])] == [
        "kernels/padded/float32",
        "kernels/padded/bfloat16",
        "sft",
    ]
    assert chosen_cases([]) == list(CASES)
    with pytest.raises(ValueError, match="--only kernel: no such case"):
        chosen_cases(["kernel"])


def test_versions_outside_the_supported_range_are_named() -> None:
    found = list(unsupported_versions({"torch": "2.10.0+cu130", "transformers": "5.19.0", "numpy": "2.3.5"}))
    assert len(found) == 1
    assert found[0].startswith("torch 2.10.0+cu130 is installed, this release supports torch")


def test_attention_that_ignores_a_window_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = learners.segment_attention

    def ignores_windows(*tensors: Any, **terms: Any) -> Any:
        return right(*tensors, **{**terms, "sliding_window": None})

    assert "8 kinds" in learners.attention_terms(context(tmp_path), dtype="float32")
    monkeypatch.setattr(learners, "segment_attention", ignores_windows)
    with pytest.raises(AssertionError, match="packed rows, window 24, cap None"):
        learners.attention_terms(context(tmp_path), dtype="float32")


@pytest.mark.slow
def test_a_gradient_in_half_precision_is_not_taken_for_one_in_float32(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    reference = make_reference(folder, lengths=(44, 50))
    learner = make_learner(folder, "cpu", dtype="bfloat16")
    learner.forward_backward(reference.step)
    found = gradient_of(learner)
    assert require_gradient(found, reference, "bfloat16") > 1e-3
    with pytest.raises(AssertionError, match=r"the gradient is .* off"):
        require_gradient(found, reference, "float32")


def test_the_command_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    status = main(["--device", "cpu", "--only", "ipc/without_importer", "--only", "attention/recompilation",
                   "--json", str(report)])  # fmt: skip
    said = capsys.readouterr().out
    content = json.loads(report.read_text())
    assert status == 0
    assert "skip  attention/recompilation" in said
    assert "1 passed, 0 failed, 1 skipped" in said
    assert [(case["name"], case["outcome"]) for case in content["cases"]] == [
        ("attention/recompilation", "skip"),
        ("ipc/without_importer", "pass"),
    ]
    # PyPI's own torch names its CUDA in `__version__` alone.
    assert content["machine"]["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert content["supported_versions"] is True


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_status_2_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_neither_the_parent_nor_a_worker_before_its_case_imports_torch() -> None:
    """A torch that cannot be imported is a row of the report, and a case that needs none is quick."""
    loaded = "import sys; import skyrl_train.selftest.__main__; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == "False"


def test_a_report_that_cannot_be_written_is_refused_before_the_first_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--only", "ipc", "--json", str(tmp_path)])
    assert ended.value.code == 2
    assert "Is a directory" in capsys.readouterr().err


def test_an_unknown_case_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nothing"])
    assert ended.value.code == 2
    assert "no such case" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_the_running_case_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` or a scheduler sends it: what were left would hold the GPU."""
    case = Case(name="hangs", body=f"{BODIES}:hangs_with_a_child", deadline_s=30.0)
    monkeypatch.setattr("skyrl_train.selftest.__main__.chosen_cases", lambda *_: [case])
    hanging: list[int] = []

    def end_once_it_hangs() -> None:
        ends = time.monotonic() + 25
        while not hanging and time.monotonic() < ends:
            time.sleep(0.1)
            hanging.extend(pid for pid in descendants(os.getpid()) if "time.sleep(600)" in command_line(pid))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # where nothing answers, the test goes on
    ender = threading.Thread(target=end_once_it_hangs)
    try:
        ender.start()
        assert main(["--device", "cpu"]) == 130
    finally:
        ender.join()
        signal.signal(signal.SIGTERM, before)
    ends = time.monotonic() + 10
    while any(map(is_running, hanging)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert len(hanging) == 1
    assert not is_running(hanging[0])


@pytest.mark.nightly
def test_every_case_passes_on_a_cpu_but_for_those_that_need_a_device(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status = main(["--device", "cpu", "--json", str(report)])
    outcomes = {case["name"]: (case["outcome"], case["detail"]) for case in json.loads(report.read_text())["cases"]}
    skipped = {name: detail for name, (outcome, detail) in outcomes.items() if outcome == "skip"}
    assert skipped == {
        "attention/recompilation": "needs a CUDA device",
        "engine/vllm_tensor_parallel": "needs a CUDA device",
    }
    assert status == 0, {name: detail for name, (outcome, detail) in outcomes.items() if outcome == "fail"}


PRETENDED = os.environ.get("SKYRL_TRAIN_PRETENDED_PYTHON", "")
"""A Python whose torch has CUDA and sees a device that computes on the CPU, where somebody has made one."""


@pytest.mark.slow
@pytest.mark.skipif(not PRETENDED, reason="SKYRL_TRAIN_PRETENDED_PYTHON names no Python with a pretended device")
@pytest.mark.parametrize("name", ["kernels", "attention/windows_and_caps", "attention/mask_memory", "strategy"])
def test_the_learners_cases_pass_on_a_pretended_device(name: str) -> None:
    command = [PRETENDED, "-m", "skyrl_train.selftest", "--device", "cuda", "--only", name]
    subprocess.run(command, check=True, timeout=900)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_passes_on_the_devices_that_there_are(name: str) -> None:
    assert main(["--device", "cuda", "--only", name]) == 0
