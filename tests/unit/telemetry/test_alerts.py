from __future__ import annotations

import io
import math
import time
from typing import Any

import pytest

from skyrl_train.config import AlertsConfig
from skyrl_train.errors import ActorLostError, NonFiniteError, StopRequested
from skyrl_train.telemetry import alerts as alerts_module
from skyrl_train.telemetry.alerts import Alert, Alerts
from skyrl_train.telemetry.logs.console import RunConsole

SENT: list[Alert] = []


def keep(alert: Alert) -> None:
    SENT.append(alert)


def break_down(alert: Alert) -> None:
    raise ConnectionError("no route")


def hang(alert: Alert) -> None:
    time.sleep(20)


def watch(examine: Any = None, **settings: Any) -> tuple[Alerts, io.StringIO, list[tuple[int, str, str]]]:
    SENT.clear()
    output, told = io.StringIO(), list[tuple[int, str, str]]()
    config = AlertsConfig(on_alert=(f"{__name__}:keep", f"{__name__}:break_down"), **settings)
    tell = lambda step, title, text: told.append((step, title, text))  # noqa: E731
    return Alerts(config, RunConsole(file=output), tell, run_name="mine", examine=examine), output, told


def test_a_metric_that_leaves_its_range_is_told_once_and_again_after_it_was_back() -> None:
    alerts, output, told = watch(entropy_below=0.1, reward_above=0.9, length_below=4.0, failures_above=0.5)
    good = {"policy/entropy": 0.5, "reward/mean": 0.2, "response_length/mean": 9.0, "failures/fraction": 0.5}
    with alerts.watching(0):
        for step, changed in enumerate(({}, {"policy/entropy": 0.05}, {"policy/entropy": 0.04}, {}), start=1):
            alerts.check(step, {**good, **changed})
        alerts.check(5, {**good, "policy/entropy": 0.01, "reward/mean": math.nan, "response_length/mean": 2.0})
        alerts.check(6, {**good, "failures/fraction": 0.51})
    assert [(alert.step, alert.kind) for alert in SENT] == [
        (2, "entropy"),
        (5, "entropy"),
        (5, "reward"),
        (5, "length"),
        (6, "failures"),
    ]
    assert told[0] == (2, "mine: entropy", "policy/entropy is 0.05, below alerts.entropy_below=0.1")
    assert "warning: alert (failures) after step 6: failures/fraction is 0.51, above alerts.failures_above=0.5" in (
        output.getvalue()
    )
    assert "break_down failed (ConnectionError: no route)" in output.getvalue()


def test_an_engine_that_drifts_from_the_trainer_is_told_with_causes_and_remedies() -> None:
    alerts, _, _ = watch()
    few, many = {"mismatch/ratio_outside_10_percent": 0.02}, {"mismatch/ratio_outside_10_percent": 0.4}
    with alerts.watching(0):
        for step, mean in enumerate((0.002, 0.003, 0.002, 0.004, 0.003, 0.02, 0.031, 0.04), start=1):
            alerts.check(step, {"mismatch/logprob_diff_mean": mean, **few})
        alerts.check(9, many)
        alerts.check(10, {"policy/lr": 0.0, "policy/approx_kl": 0.05})
    assert [(alert.step, alert.kind) for alert in SENT] == [(7, "mismatch_growth"), (9, "mismatch"), (10, "kl_at_lr_0")]
    assert SENT[0].text.startswith(
        "growth of mismatch/logprob_diff_mean is 10.33, above alerts.mismatch_growth_above=10"
    )
    assert "generator.verify_weight_sync=true" in SENT[1].text
    assert "nothing was trained" in SENT[2].text


def test_tokens_of_older_weights_and_a_policy_that_learns_may_differ() -> None:
    alerts, _, _ = watch()
    with alerts.watching(0):
        alerts.check(1, {"mismatch/ratio_outside_10_percent": 0.9, "off_policy/age/max": 1.0})
        alerts.check(2, {"policy/lr": 1e-6, "policy/approx_kl": 0.05})
        alerts.check(3, {"mismatch/logprob_diff_mean": 1e-6})
        alerts.check(4, {"mismatch/logprob_diff_mean": 1e-4})
    assert SENT == []


def test_what_rules_find_is_told_once_each_time_that_the_run_has_twice_as_many_steps() -> None:
    asked: list[int] = []

    def examine() -> list[tuple[str, str]]:
        asked.append(len(asked))
        found = [("stale_weights", "the engine is behind"), ("reward_fails", "half of them fail")]
        return found[: len(asked)]

    alerts, _, _ = watch(examine)
    with alerts.watching(0):
        for step in range(1, 81):
            alerts.check(step, {})
            if alerts._examining is not None:
                alerts._examining.join(20)
    assert len(asked) == 3
    assert [(alert.step, alert.kind, alert.text) for alert in SENT] == [
        (20, "stale_weights", "the engine is behind"),
        (40, "reward_fails", "half of them fail"),
    ]


def test_a_resumed_run_is_examined_soon_and_a_folder_that_cannot_be_read_ends_nothing() -> None:
    def examine() -> list[tuple[str, str]]:
        raise OSError("torn")

    alerts, output, _ = watch(examine)
    with alerts.watching(100):
        alerts.check(109, {})
        assert alerts._examining is None
        alerts.check(110, {})
        assert alerts._examining is not None
        alerts._examining.join(20)
    assert "the run could not be examined (OSError: torn)" in output.getvalue()
    silent, _, _ = watch(examine, findings=False)
    with silent.watching(0):
        silent.check(500, {})
    assert silent._examining is None


def test_a_run_that_waits_is_told_of_once_a_step_while_it_waits() -> None:
    alerts, _, _ = watch(stalled_after_s=0.05)
    with alerts.watching(3):
        deadline = time.monotonic() + 20
        while not SENT and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    assert [(alert.kind, alert.step) for alert in SENT] == [("stalled", 3)]
    assert "alerts.stalled_after_s=0.05" in SENT[0].text


def test_a_run_that_ends_by_an_error_is_told_of_and_one_that_is_stopped_is_not() -> None:
    alerts, _, _ = watch(failed=True)
    with pytest.raises(NonFiniteError), alerts.watching(2):
        raise NonFiniteError("the loss is nan")
    with pytest.raises(StopRequested), alerts.watching(2):
        raise StopRequested("SIGTERM", 2)
    assert [alert.text for alert in SENT] == ["the run ends: NonFiniteError: the loss is nan"]


def test_a_lost_worker_is_told_of_as_what_may_be_answered_by_another_attempt() -> None:
    alerts, _, _ = watch(failed=True)
    with pytest.raises(ActorLostError), alerts.watching(2):
        raise ActorLostError("rank 1 died", phase="update")
    (alert,) = SENT
    assert alert.text.startswith("a worker was lost; trainer.max_restarts says whether the run goes on: ActorLostError")


def test_a_function_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts_module, "_TELL_TIMEOUT_S", 0.1)
    output = io.StringIO()
    config = AlertsConfig(on_alert=(f"{__name__}:hang",), reward_below=0.5)
    Alerts(config, RunConsole(file=output), lambda step, title, text: None, run_name="mine").check(
        1, {"reward/mean": 0.1}
    )
    assert "hang failed (DeadlineError: the function did not answer within 0.1 s" in output.getvalue()


def test_without_settings_nothing_is_watched() -> None:
    alerts, output, told = watch()
    with alerts.watching(0):
        alerts.check(1, {"policy/entropy": 0.0, "reward/mean": math.nan})
    with pytest.raises(NonFiniteError), alerts.watching(1):
        raise NonFiniteError("the loss is nan")
    assert (SENT, told, output.getvalue()) == ([], [], "")
