import io
import os
import pty
import time

import pytest

from skyrl_train.telemetry.logs.console import RunConsole, clock, step_line

METRICS = {
    "reward/mean": 0.4123,
    "kl/reference": 0.00112,
    "env/solved": 0.3125,
    "policy/entropy": 0.8204,
    "policy/grad_norm": 0.2718,
    "mismatch/logprob_diff_mean": 0.00041,
    "response_length/mean": 18.24,
    "context_length/mean": 1041.4,
    "timing/tokens_per_s": 4812.0,
    "timing/step": 1.31,
    "failures/count": 0.0,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_step_in_one_line():
    assert step_line(METRICS, step=3, total_steps=40, left_s=48.0) == (
        "step  3/40  reward 0.412  acc 0.31  kl 0.0011  ent 0.82  grad 0.27  diff 0.0004  len 18.2  4.8k tok/s  1.3 s  "
        "0:48 left"
    )


def test_a_line_of_ordinary_values_fits_a_terminal():
    metrics = {**METRICS, "timing/step": 412.31, "response_length/mean": 1480.2, "context_length/mean": 12041.0}
    assert len(step_line(metrics, step=120, total_steps=150, left_s=3 * 3600)) <= 125


def test_the_update_says_how_far_engine_and_trainer_differ_where_the_batch_was_not_scored_before():
    metrics = {"policy/rollout_logprob_diff": 0.0123, "policy/grad_norm": 0.00314}
    assert step_line(metrics, step=1, total_steps=1, left_s=0.0) == "step 1/1  grad 0.0031  diff 0.0123"


def test_what_was_not_measured_is_left_out_and_failures_stand_out():
    metrics = {"failures/count": 8.0, "timing/step": 2.0}
    assert step_line(metrics, step=40, total_steps=40, left_s=0.0) == "step 40/40  2.0 s  8 FAILED"


def test_a_step_without_a_loss_token_says_so() -> None:
    line = step_line({"batch/trained_tokens": 0.0}, step=2, total_steps=2, left_s=0.0)
    assert line == "step 2/2  0 LOSS TOKENS: NOTHING LEARNED"
    assert "LOSS TOKENS" not in step_line({"batch/trained_tokens": 1.0}, step=2, total_steps=2, left_s=0.0)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(4.6, "0:05"), (760, "12:40"), (10930, "3:02:10"), (183600, "2 d 03:00:00")]
)
def test_the_time_left(seconds, shown):
    assert clock(seconds) == shown


def test_the_time_left_is_the_mean_of_recent_steps_times_the_remaining_ones():
    output = io.StringIO()
    console = RunConsole(file=output)
    for step, seconds in ((1, 2.0), (2, 4.0)):
        console.step({"timing/step": seconds}, step=step, total_steps=12)
    assert output.getvalue().splitlines() == ["step  1/12  2.0 s  0:22 left", "step  2/12  4.0 s  0:30 left"]


def test_off_a_terminal_there_are_no_control_characters_bars_or_wrapped_lines(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    console = RunConsole(file=output)
    console.header("skyrl_train [bold]0.1[/bold]", ["model: " + "x" * 200])
    with console.phase("generate"):
        for done in range(10):
            console.on_progress(done, 10)
    console.warn("careful")
    assert output.getvalue() == f"skyrl_train [bold]0.1[/bold]\n  model: {'x' * 200}\nwarning: careful\n"


def test_on_a_terminal_a_bar_moves_during_a_phase_and_is_gone_afterwards(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = Terminal()
    console = RunConsole(file=output)
    console.on_progress(1, 4)
    assert output.getvalue() == ""
    with console.phase("generate"):
        console.on_progress(1, 4)
        console.on_progress(3, 4)
    shown = output.getvalue()
    assert "generate" in shown
    assert "3/4" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    console.warn("careful")
    assert "\x1b[33mwarning: careful" in output.getvalue()


def test_a_phase_that_does_not_say_how_far_it_is_has_a_bar_once_it_takes_long(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("skyrl_train.telemetry.logs.console._SHOWN_AFTER_S", 0.01)
    output = Terminal()
    console = RunConsole(file=output)
    with console.phase("checkpoint"):
        deadline = time.monotonic() + 10
        while "checkpoint" not in output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "checkpoint" in output.getvalue()
        assert "/" not in output.getvalue().split("checkpoint")[1].split("\x1b[?25h")[0].replace("\x1b[0m", "")
    monkeypatch.undo()
    with console.phase("quick"):
        pass
    assert "quick" not in output.getvalue()
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")


def test_no_color_and_dumb_terminals_are_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    output = Terminal()
    console = RunConsole(file=output)
    with console.phase("generate"):
        console.on_progress(1, 4)
    console.warn("careful")
    assert output.getvalue() == "warning: careful\n"


def test_without_the_console_tracker_only_what_matters_is_said():
    output = io.StringIO()
    console = RunConsole(step_lines=False, file=output)
    console.step(METRICS, step=1, total_steps=2)
    console.note("resuming from somewhere")
    assert output.getvalue() == "resuming from somewhere\n"


def test_a_real_terminal_gets_its_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    main, child = pty.openpty()
    with os.fdopen(child, "w", encoding="utf-8") as file:
        console = RunConsole(file=file)

        def break_inside() -> None:
            with console.phase("update"):
                console.on_progress(1, 2)
                raise RuntimeError

        with pytest.raises(RuntimeError):
            break_inside()
        console.note("the end")
        file.flush()
        shown = ""
        while "the end" not in shown:
            shown += os.read(main, 65536).decode()
    os.close(main)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
