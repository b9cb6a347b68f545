import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from skyrl_train.errors import StopRequested
from skyrl_train.trainers.stop import StopFlag, stop_on_signals


def test_without_a_signal_nothing_is_raised():
    with stop_on_signals() as stop:
        stop.raise_if_set(3)
    assert not stop.is_set


def test_the_first_signal_is_kept_for_the_safe_point(capfd):
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        with pytest.raises(StopRequested, match="stopped by SIGTERM after step 3"):
            stop.raise_if_set(3)
    assert "SIGTERM: finishing the running step, then writing a checkpoint." in capfd.readouterr().err


def test_the_second_signal_ends_at_once():
    statuses: list[int] = []
    flag = StopFlag(exit_now=statuses.append)
    flag.handle(signal.SIGTERM, None)
    assert statuses == []
    flag.handle(signal.SIGINT, None)
    assert statuses == [130]
    assert flag.signal_name == "SIGTERM"


def test_handlers_are_put_back_also_after_an_error():
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]

    def break_inside() -> None:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) not in before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_inside()
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


def test_signals_are_watched_in_a_process_with_thousands_of_open_files():
    with contextlib.ExitStack() as files:
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2_000:
            pytest.skip("this machine allows a process fewer than 2,000 open files")
        while files.enter_context(open(os.devnull)).fileno() < 1_100:
            pass
        with stop_on_signals():
            (watcher,) = (each for each in threading.enumerate() if each.name == "signals")
            watcher.join(timeout=0.2)
            assert watcher.is_alive()


@pytest.mark.slow
def test_a_process_that_does_not_reach_a_safe_point_dies_at_the_second_signal():
    program = (
        "import sys, time\n"
        "from skyrl_train.trainers.loop import stop_on_signals\n"
        "with stop_on_signals():\n"
        "    print('ready', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline().startswith("SIGINT: finishing")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
