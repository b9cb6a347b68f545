"""Bodies of cases for the tests of how cases are run: each ends in another way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from skyrl_train.selftest import Context, SkipCase


def process_id(context: Context) -> str:
    print(f"for {Path.cwd()}")
    assert Path.cwd() == context.folder
    return str(os.getpid())


def figure(context: Context) -> str:
    return f"rank {context.rank} of {context.num_ranks} on {context.device}"


def wrong(context: Context) -> str:
    raise AssertionError("2 is not 3\nand more")


def skips(context: Context) -> str:
    raise SkipCase("no compiler here")


def lacks_a_package(context: Context) -> str:
    import package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

    return ""


def aborts(context: Context) -> str:
    os.abort()


def hangs_with_a_child(context: Context) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.folder / "child").write_text(str(child.pid))
    print("the child is", child.pid, flush=True)
    time.sleep(600)
    return ""


def rank_1_is_wrong(context: Context) -> str:
    if context.rank == 1:
        raise AssertionError("rank 1 has the reason")
    time.sleep(600)
    return ""
