"""A process that is forked with torch imported is what an ordinary one is to the command that runs in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.warm_python import WarmProcess

pytestmark = pytest.mark.slow

SEES = """
import json, os, signal, sys
from pathlib import Path
answered = [signal.getsignal(each) is not None for each in (signal.SIGINT, signal.SIGTERM)]
print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ.get("FRUIT"), sys.path[0], sys.stdin.read(), answered]))
print(os.getsid(0) == os.getpid(), "torch" in sys.modules, file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("words", [("sees.py", "a", "--b=c d"), ("-m", "sees", "x")])
def test_a_command_sees_what_it_would_see_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    paths = {"FRUIT": "quince", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:2]])}
    found = warm_python.run(*words, environment=paths, folder=tmp_path)
    expected = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **paths},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == expected.returncode == 3
    assert found.stdout.splitlines() == [*expected.stdout.splitlines(), "True True"], "one of them has torch"
    assert found.cpu_s > 0


def test_an_error_and_a_signal_end_it_with_the_status_of_an_ordinary_process(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('no such fruit')")
    failed = warm_python.run("fails.py", folder=tmp_path)
    assert failed.returncode == 1
    assert "ValueError: no such fruit" in failed.stdout
    (tmp_path / "waits.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    with open(tmp_path / "said", "wb") as file:
        process = warm_python.start(("waits.py",), output=file.fileno(), folder=tmp_path)
    assert isinstance(process, WarmProcess)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    while not (tmp_path / "said").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    process.kill()  # it is gone, which is no error


def test_another_environment_of_what_is_imported_gets_an_ordinary_process(tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text("import sys; print('torch' in sys.modules)")
    assert warm_python.run("sees.py", folder=tmp_path).stdout == "True\n"
    assert warm_python.run("sees.py", folder=tmp_path, environment={"HF_HOME": "/y"}).stdout == "False\n"
