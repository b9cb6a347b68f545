"""The suite's sample, as CI runs it, and how the suite counts."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.reliability.suite import PARTS, REPOSITORY, counts, main


def why_nothing_can_be_recorded() -> str:
    """Return why file operations cannot be recorded on this machine; empty where they can."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    tried = subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, text=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(part.name, marks=pytest.mark.nightly if part.name != "bit_flips" else ())
        for part in PARTS
        if part.sample
    ],
)
def test_the_sample_of(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "crash_states" and (why := why_nothing_can_be_recorded()):
        pytest.skip(why)
    status = main(["--sample", name])
    said = capsys.readouterr().out
    print(said)
    assert status == 0, said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("a line\n12 cases, 0 failures\n", (12, 0)),
        ("1 cases, 1 failures\n20 cases, 3 failures\n", (20, 3)),
        ("....\n85 passed, 2 skipped in 8.84s\n", (85, 0)),
        ("F..\n2 failed, 83 passed in 9.10s\n", (85, 2)),
        ("1 failed in 0.26s\n", (1, 1)),
        ("1 failed, 3 passed, 2 errors in 0.26s\n", (6, 3)),
        ("Killed\n", (0, 1)),
        ("no tests ran in 0.01s\n", (0, 1)),
    ],
)
def test_cases_and_failures_are_those_that_a_part_states_last(said: str, expected: tuple[int, int]) -> None:
    assert counts(said) == expected


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_a_part_runs_is_there_and_in_the_documentation(part: object) -> None:
    words = part.whole.split()  # type: ignore[attr-defined]
    for word in words:
        if word.startswith("tests/"):
            assert (REPOSITORY / word).exists(), word
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"`{part.name}`" in text  # type: ignore[attr-defined]


def test_an_unknown_part_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(SystemExit):
        main(["no_such_part"])
