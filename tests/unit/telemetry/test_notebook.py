"""The output of a notebook's cell, without a kernel: what is handed to IPython, and what is drawn."""

from __future__ import annotations

import io
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyrl_train.telemetry.logs import RunConsole, in_notebook
from skyrl_train.telemetry.logs.notebook import MOST_POINTS, CellOutput, curve


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str], str]]:
    """What IPython's two functions are called with, in a process that says that it is a kernel."""
    calls: list[tuple[str, dict[str, str], str]] = []

    def note(kind: str) -> Any:
        def called(bundle: dict[str, str], *, raw: bool, display_id: str) -> None:
            assert raw
            calls.append((kind, bundle, display_id))

        return called

    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display, display.update_display = note("new"), note("again")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return calls


def test_steps_rewrite_one_output(
    shown: list[tuple[str, dict[str, str], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    console = RunConsole()
    for step in range(1, 401):
        console.step({"reward/mean": step / 400, "timing/step": 0.1}, step=step, total_steps=400)
    assert [kind for kind, _, _ in shown] == ["new", *["again"] * 399]
    assert len({display_id for _, _, display_id in shown}) == 1
    assert shown[-1][1]["text/plain"].startswith("step 400/400  reward 1.000")
    assert "reward/mean from 0.0025 at step 1 to 1 at step 400" in shown[-1][1]["text/html"]
    assert capsys.readouterr().out == ""


def test_a_second_run_has_an_output_of_its_own(shown: list[tuple[str, dict[str, str], str]]) -> None:
    for _ in range(2):
        RunConsole().step({"train/loss": 1.0}, step=1, total_steps=1)
    assert [kind for kind, _, _ in shown] == ["new", "new"]
    assert shown[0][2] != shown[1][2]


def test_a_file_and_a_quiet_console_are_as_anywhere(shown: list[tuple[str, dict[str, str], str]]) -> None:
    output = io.StringIO()
    RunConsole(file=output).step({"reward/mean": 0.5}, step=1, total_steps=1)
    RunConsole(step_lines=False).step({"reward/mean": 0.5}, step=1, total_steps=1)
    assert output.getvalue().startswith("step 1/1  reward 0.500")
    assert shown == []


@pytest.mark.parametrize("module", [None, ModuleType("IPython")])
def test_without_a_kernel_nothing_is_asked(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if module is None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", module)
    assert not in_notebook()


def test_what_is_no_number_moves_the_line_alone(shown: list[tuple[str, dict[str, str], str]]) -> None:
    output = CellOutput()
    for step, value in enumerate([0.5, math.nan, math.inf, None, 0.7]):
        output.show("<b>line</b>", step=step, name="<reward>", value=value)
    html = shown[-1][1]["text/html"]
    assert "&lt;b&gt;line&lt;/b&gt;" in html
    assert "&lt;reward&gt; from 0.5 at step 0 to 0.7 at step 4" in html
    assert "nan" not in html
    assert html.count(",") == 2


def test_a_long_curve_keeps_its_ends() -> None:
    drawn = curve([(step, float(step)) for step in range(10_001)], "x")
    points = drawn.partition('points="')[2].partition('"')[0].split()
    assert points[0] == "0.0,90.0"
    assert points[-1] == "420.0,0.0"
    assert len(points) <= MOST_POINTS + 1
    assert curve([(1, 0.5)], "x") == ""
    assert "NaN" not in curve([(1, 0.5), (2, 0.5)], "x")
