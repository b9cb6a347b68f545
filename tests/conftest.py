"""What holds for all tests."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network, or is another where there is one

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

# Time on a machine that others use as well says nothing of a test. In CI the same examples are drawn each time: a run
# fails for what was changed, while new examples are found where somebody looks at them.
settings.register_profile("project", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("project")


gc.disable()  # until all is imported and collected, of which nothing is garbage


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what was imported and collected, through which it looked again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
