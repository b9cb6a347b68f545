"""The benchmark of rollouts at rest runs, and meets what is aimed at on disk even with few tokens."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "rollout_store.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_rollouts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_rollouts", module)  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_what_it_measures_of_files_keeps_to_the_targets(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "VOCABULARY", 1000)
    monkeypatch.setitem(bench.TARGETS, "speed", 1e6)  # a target that is missed is said, which makes the table wider
    few = ["--prompts", "2", "--samples", "4", "--tokens-per-sequence", "600", "--repeats", "1"]
    bench.main([*few, "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    found = dict(re.findall(r"(disk: [^\u2502]*?) +\u2502 +([\d.]+) \u2502", said))
    assert 3 < float(found["disk: ids, mask, version, engine's log-probability"]) <= 8
    assert all(3 < float(found[f"disk: {name}"]) <= 4 for name in ("policy_logprobs", "reference_logprobs"))
    assert float(found["disk: policy_logprobs, bfloat16"]) < 2
    assert float(found["disk: JSON lines, with advantages alone"]) > 30
    assert list(tmp_path.iterdir()) == []
