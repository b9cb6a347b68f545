"""The benchmark of collation runs, and shows that waiting goes away."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "collation.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_collation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_collation", module)  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_step_waits_less_for_its_batch_when_it_is_made_ahead(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHARES", (0.5,))
    bench.main(["--steps", "4", "--step-ms", "40", "--rounds", "1"])
    waits = next(line for line in capsys.readouterr().out.splitlines() if "waits 50%" in line)
    off, on = (float(text) for text in re.findall(r"([\d.]+)%", waits)[1:3])
    assert off > 20
    assert on < off / 2
