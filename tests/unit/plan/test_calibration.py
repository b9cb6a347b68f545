"""What a CPU does in a second is measured once, by the code that runs train with."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from skyrl_train.config.models import PlatformConfig
from skyrl_train.plan import machine as plan_machine, measured_cpu
from skyrl_train.plan.forms.scale import MachineRates
from skyrl_train.plan.machine import machine_rates, stated_rates

ONE, TWO = (PlatformConfig(name="cpu", device="cpu", num_threads=count) for count in (1, 2))
FOUND = replace(stated_rates("cpu"), source="measured on this machine on 2026-01-01")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def machine(busy: float) -> Callable[..., MachineRates]:
    """A machine whose calls took `busy` times as long as they would have on quiet cores."""

    def measure(clock: measured_cpu._Clock, _dtype: object) -> MachineRates:
        clock.wall_s, clock.counted_s = busy, 1.0
        return FOUND

    return measure


@pytest.mark.slow
def test_every_rate_is_measured_and_the_next_plan_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_cpu, "_WIDE", 192)
    monkeypatch.setattr(measured_cpu, "_VOCABULARY", {128: 64, 192: 256})
    told: list[str] = []
    found = machine_rates(ONE, "float32", announce=told.append)
    numbers = {name: value for name, value in asdict(found).items() if isinstance(value, float)}
    assert min(*numbers.values(), *found.trained_flops) > 0
    assert found.widths == (128, 192)
    assert "measured on this machine on 2" in found.source
    assert len(told) == 1
    assert "plan.rates=none" in told[0]
    assert machine_rates(ONE, "float32") == found
    assert "reckoned" in machine_rates(TWO, "float32").source, "of other threads nothing is known"
    assert "reckoned" in machine_rates(ONE, "bfloat16").source, "nor of another type"


def test_what_several_threads_took_on_busy_cores_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_cpu, "_measure", machine(busy=3.0))
    found = machine_rates(TWO, "float32", announce=str)
    assert "others used its cores" in found.source
    assert "reckoned" in machine_rates(TWO, "float32").source
    assert machine_rates(ONE, "float32", announce=str) == FOUND, "one thread's processor time says the same"


def test_a_file_that_was_cut_off_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_cpu, "_measure", machine(busy=1.0))
    machine_rates(ONE, "float32", announce=str)
    file = plan_machine._file(1, "float32")
    file.write_text(file.read_text(encoding="utf-8")[:50], encoding="utf-8")
    assert "reckoned" in machine_rates(ONE, "float32").source
    file.write_text('{"source": "of another version"}', encoding="utf-8")
    assert machine_rates(ONE, "float32", announce=str) == FOUND


def test_a_gpu_is_not_measured() -> None:
    rates = machine_rates(PlatformConfig(name="gpu", device="cuda:0"), "bfloat16", announce=pytest.fail)
    assert "reckoned" in rates.source


@pytest.mark.slow
def test_a_plan_says_what_a_step_takes_and_from_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured_cpu, "_measure", machine(busy=1.0))

    def plan(*more: str) -> object:
        monkeypatch.setattr(sys, "argv", ["plan", "+experiment=gsm8k_multiturn", "platform=cpu", *more])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("skyrl_train.plan", run_name="__main__")
        return ended.value.code

    assert plan() == 0
    printed = capsys.readouterr()
    assert "rates      measured on this machine on 2026-01-01; without environments" in printed.out
    assert "update" in printed.out.partition("a step")[2].partition("\n")[0]
    assert "note: how fast this machine computes is measured" in printed.err
    assert plan() == 0
    assert "is measured" not in capsys.readouterr().err
    assert plan("plan.rates=none") == 0
    assert "time       not predicted (plan.rates=none" in capsys.readouterr().out
