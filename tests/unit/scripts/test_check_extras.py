"""The check of extras, with pip itself and an index of empty wheels."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_extras", ROOT / "scripts" / "check_extras.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_extras"] = module
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        lines = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {each}" for each in needs),
        ]
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def pyproject(conflicts: list[list[dict[str, str]]]) -> dict[str, Any]:
    extras = {"cpu": ["enginelite"], "vllm": ["engine"], "old": ["oldtool"], "new": ["newtool"]}
    project = {"dependencies": ["corelib"], "optional-dependencies": extras}
    return {"project": project, "tool": {"uv": {"conflicts": conflicts}}}


@pytest.mark.nightly
@pytest.mark.slow
def test_pairs_that_exclude_each_other_must_be_stated_and_no_others(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1.0", "2.0"):
        wheel(tmp_path, "client", version)
    wheel(tmp_path, "corelib", "1.0")
    wheel(tmp_path, "enginelite", "1.0", "client")
    wheel(tmp_path, "engine", "1.0", "client>=2")
    wheel(tmp_path, "oldtool", "1.0", "client<2")
    wheel(tmp_path, "newtool", "1.0", "client>=2")
    resolver = script.Resolver(arguments=["--no-index", "--find-links", str(tmp_path), "--no-cache-dir"])

    apart = [{"extra": "old"}, {"extra": "new"}]
    stated = [[{"extra": "old"}, {"extra": "vllm"}], apart]
    assert script.check(script.Extras.of(pyproject(stated)), ["old", "new"], resolver) == []
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "cpu old moves {'client': '1.0'}" in lines
    assert "cpu new fits" in lines
    assert any(line.startswith("vllm old conflict: ") and "client<2" in line for line in lines)

    assert "cpu all at once fits" in lines

    alone, beside_cpu, unstated, beside_vllm = script.check(script.Extras.of(pyproject([])), ["old", "new"], resolver)
    assert alone.startswith("old, new at once: ")
    assert "client<2" in alone
    assert beside_cpu.startswith("cpu, old, new at once: ")
    assert unstated.startswith("old beside vllm: ")
    assert beside_vllm.startswith("vllm, old, new at once: ")
    (needless,) = script.check(script.Extras.of(pyproject([[{"extra": "new"}, {"extra": "cpu"}]])), ["new"], resolver)
    assert needless == "new beside cpu can be resolved: take the pair out of tool.uv conflicts"


def test_an_old_pip_is_refused_before_it_fetches_gigabytes(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")
    monkeypatch.setattr(script.metadata, "version", lambda name: "23.2.1")
    assert script.main([]) == 2
    assert "has pip 23.2 and needs 23.3 or later: pip install --upgrade pip" in capsys.readouterr().err
