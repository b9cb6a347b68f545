"""What the console shows is in the log, and neither a terminal nor a disk that goes away ends a run."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.telemetry.logs.run_log import ConsoleStream, RunLogHandler, console_streams

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_log(tmp_path: Path) -> Iterator[Path]:
    handler = RunLogHandler(tmp_path / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    yield tmp_path / "run.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def test_lines_are_logged_whole_without_colours_and_without_bars(run_log: Path) -> None:
    terminal = io.StringIO()
    stream = ConsoleStream(terminal, "stdout")
    for text in ("a ", "line\nanother", "\n", "\x1b[33mwarning\x1b[0m\n", "\n"):
        stream.write(text)
    for bar in ("\rgenerate 1/3", "\rgenerate 2/3", "\r\x1b[2Kstep 1\n"):
        stream.write(bar)
        stream.flush()
    stream.write("api_key=abc\n")
    assert terminal.getvalue().startswith("a line\nanother\n\x1b[33mwarning\x1b[0m\n\n\rgenerate 1/3\rgenerate 2/3")
    assert terminal.getvalue().endswith("api_key=<redacted>\n")
    assert run_log.read_text().splitlines() == [
        "stdout: a line",
        "stdout: another",
        "stdout: warning",
        "stdout: step 1",
        "stdout: api_key=<redacted>",
    ]


def test_a_terminal_that_is_gone_costs_nothing_but_itself(run_log: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        stream = ConsoleStream(gone, "stderr")
        for step in (1, 2):
            stream.write(f"step {step}\n")
            stream.flush()
    assert run_log.read_text() == "stderr: step 1\nstderr: step 2\n"


def test_what_a_terminal_cannot_show_is_shown_in_ascii() -> None:
    content = io.BytesIO()
    stream = ConsoleStream(io.TextIOWrapper(content, encoding="ascii"), "stdout")
    stream.write("caf\u00e9 \udc80\n")
    stream.flush()
    assert content.getvalue() == b"caf\\xe9 \\udc80\n"


def test_a_disk_that_is_full_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = RunLogHandler("/dev/full")
    logger = logging.Logger("alone")
    logger.addHandler(handler)
    for step in (1, 2):
        logger.warning("step %d", step)
    assert capsys.readouterr().err == (
        "warning: /dev/full cannot be written ([Errno 28] No space left on device); the run goes on without it\n"
    )
    handler.flush()


CRASHING = """
import ctypes, logging, os, subprocess, sys
from skyrl_train.telemetry.logs.run_log import RunLogHandler, console_streams, log_once

with console_streams():
    logging.getLogger().addHandler(RunLogHandler(sys.argv[1], encoding="utf-8"))
    log_once()
    print("api_key=tangerine-7")
    sys.stderr.write("token=tangerine-8\\n")
    os.write(1, b"NCCL INFO of C\\n")
    subprocess.run(["sh", "-c", "echo a child >&2"], timeout=60)
    os.write(2, b"device-side assert\\n")
    ENDS
"""


@pytest.mark.parametrize(
    ("ends", "status", "last"),
    [
        ("os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("ctypes.string_at(8)", -signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        ("os._exit(3)", 3, "device-side assert"),
        ("pass", 0, "device-side assert"),
    ],
)
def test_what_others_write_to_the_descriptors_is_in_the_log_also_of_a_crash(
    ends: str, status: int, last: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", CRASHING.replace("ENDS", ends), str(log)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    lines = log.read_text().splitlines()
    for line, stream in (
        ("NCCL INFO of C", done.stdout),
        ("a child", done.stderr),
        ("device-side assert", done.stderr),
    ):
        assert (lines.count(line), stream.count(line)) == (1, 1)
    assert last in log.read_text()
    assert last in done.stderr
    for line, stream in (("api_key=<redacted>", done.stdout), ("token=<redacted>", done.stderr)):
        assert (lines.count(line), stream.count(line)) == (1, 1)
    assert "tangerine" not in log.read_text() + done.stdout + done.stderr


def test_streams_are_those_of_before_again_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with console_streams():
        print("token=abc", end="")
        assert sys.stdout is not before
    assert sys.stdout is before
    assert capsys.readouterr().out == "token=<redacted>"
