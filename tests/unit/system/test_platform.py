from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_train.system import (
    detect_platform,
    has_bfloat16_instructions,
    local_devices,
    multiplies_bfloat16,
    platform,
    resident_bytes,
)


def test_a_machine_without_a_device_file_is_a_cpu(tmp_path: Path) -> None:
    found = detect_platform({}, tmp_path)
    assert (found.name, found.reason) == ("cpu", "no CUDA device found (no /dev/nvidia0)")


@pytest.mark.parametrize("device", ["nvidia0", "nvidia3", "dxg"])
def test_a_device_file_makes_it_a_gpu(tmp_path: Path, device: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()

    found = detect_platform({}, tmp_path)

    assert (found.name, found.reason) == ("gpu", f"/dev/{device} exists")


@pytest.mark.parametrize(
    ("line", "does", "has_instructions"),
    [
        ("flags\t\t: fpu avx2 fma", False, False),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512vl", True, False),
        ("flags\t\t: fpu avx512bw avx512_bf16", True, True),
        ("Features\t: fp asimd bf16", True, True),
        ("Features\t: fp asimd", False, False),
        ("model name\t: unknown", True, True),
    ],
)
def test_flags_of_a_processor_tell_whether_it_multiplies_bfloat16(
    tmp_path: Path, line: str, does: bool, has_instructions: bool
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")

    assert multiplies_bfloat16(tmp_path) is does
    assert has_bfloat16_instructions(tmp_path) is has_instructions
    assert multiplies_bfloat16(tmp_path / "nothing")


@pytest.mark.parametrize(("visible", "name"), [("", "cpu"), ("-1", "cpu"), ("0", "gpu"), ("1,0", "gpu")])
def test_hidden_devices_do_not_count(tmp_path: Path, visible: str, name: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()

    assert detect_platform({"CUDA_VISIBLE_DEVICES": visible}, tmp_path).name == name


def test_the_reason_says_that_the_user_hid_the_devices(tmp_path: Path) -> None:
    reason = detect_platform({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path).reason
    assert reason == "CUDA_VISIBLE_DEVICES='-1' hides every CUDA device"


def test_a_driver_without_a_device_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()

    found = detect_platform({}, tmp_path)

    assert found.name == "cpu"
    assert "driver is loaded" in found.reason


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("3", 1),
        ("0,7,1", 1),
        ("0,-1,1", 1),
        ("0,1,", 2),
        ("GPU-8f,GPU-2a", 2),
        ("", 0),
        ("-1", 0),
    ],
)
def test_devices_are_counted_as_far_as_the_process_may_see_them(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()

    found = local_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path)

    assert found.num_gpus == count


def test_a_gpu_has_the_name_that_the_driver_gives_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ \"$1\" = --query-gpu=name ] && printf 'NVIDIA H200\\nNVIDIA L4\\n'\n")
    program.chmod(0o755)
    platform._nvidia_smi.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    try:
        assert platform.gpu_name() == "NVIDIA H200"
    finally:
        platform._nvidia_smi.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert platform.gpu_name() == ""
    platform._nvidia_smi.cache_clear()


def test_what_a_process_holds_grows_with_what_it_keeps_and_is_0_where_nothing_tells(tmp_path: Path) -> None:
    before = resident_bytes()
    kept = bytearray(b"x" * 64 * 2**20)
    assert before > 2**20
    assert resident_bytes() > before + 32 * 2**20
    assert len(kept) == 64 * 2**20
    assert resident_bytes(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("no numbers")
    assert resident_bytes(tmp_path) == 0


def test_free_memory_is_returned_where_the_process_grew_by_a_tenth_since_its_heap_was_compact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    held = iter([100, 105, 109, 112, 90, 98, 100, 70])
    monkeypatch.setattr(platform, "resident_bytes", lambda: next(held))
    monkeypatch.setattr(platform, "_HEAP", {})
    monkeypatch.setattr(platform.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trims.append))
    counts = []
    for _ in range(8):
        platform.return_free_memory()
        counts.append(len(trims))
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2], "at 112 over 100, and at 100 over the 90 that it took after that"
