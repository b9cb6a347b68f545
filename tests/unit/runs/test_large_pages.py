"""A run has torch ask for pages of 2 MiB, unless the user's environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.config import Config
from skyrl_train.runs.resolving import limit_threads
from skyrl_train.system import LARGE_PAGES

(NAME,) = LARGE_PAGES
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HELD = """
import re, torch
held = torch.ones(1 << 25)
print(re.search(r"AnonHugePages:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.parametrize(("stated", "then"), [(None, "1"), ("0", "0")])
def test_they_are_asked_for_unless_stated(stated: str | None, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, stated or "")
    if stated is None:
        monkeypatch.delenv(NAME)
    limit_threads(Config())
    assert os.environ[NAME] == then


@pytest.mark.slow
@pytest.mark.skipif(
    not ENABLED.is_file() or "[never]" in ENABLED.read_text(), reason="this system has no pages of 2 MiB to give"
)
def test_torch_then_has_them() -> None:
    kib = [
        int(
            subprocess.run(
                [sys.executable, "-c", HELD],
                env={**os.environ, NAME: value},
                capture_output=True,
                text=True,
                timeout=200,
                check=True,
            ).stdout
        )
        for value in ("0", "1")
    ]
    assert kib[1] >= kib[0]
    assert kib[1] > 64 * 1024 or "[always]" in ENABLED.read_text()
