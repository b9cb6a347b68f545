"""Rewards by name: `environment.reward=exact_match`, or `{_target_: regex, pattern: "#### (.*)", answer_group: 1}`.

Each is a function, or a class whose objects are called, as `rollout/rewards/__init__.py` describes; `answer`, `schema` and
`tests` are columns of the data, what else they take stands beside the name.

Tests of code that a model wrote run beside it, each of the two in a sandbox of its own (`system/sandbox/child.py`). The
program never holds the tests, their answers or the verdict. Tests ask it by the names that they do not define themselves;
what passes between the two is plain data.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import counted
from skyrl_train.rollout.rewards import within
from skyrl_train.system.sandbox import START_WITHIN_S, Level, Limits, made, readable

_STARTED = b"started\n"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of the tests."""

    passed: int = 0
    """0 to the number of tests."""
    undecided: tuple[str, ...] = ()
    """Why tests could not be decided in this way; none of them passed."""


def run_tests(code: str, tests: Sequence[str], *, timeout_s: float, memory_mb: int, sandbox: Level) -> Verdict:
    """Return how many of the tests pass after `code` has run; none where it raises, exceeds a limit or takes too long.

    Raises OSError, SandboxUnavailable among them, where a sandbox cannot be started, which says nothing about the code.
    """
    clean = [text.encode("utf-8", "replace").decode() for text in (code, *tests)]
    with made(sandbox, Limits(timeout_s=timeout_s, memory_mb=memory_mb)) as box:
        reading, writing = os.pipe()
        pipe = box.opened(reading)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                box.start("program", {"code": clean[0], "link": theirs.fileno()}, fds=[theirs.fileno()])
                given = {"tests": clean[1:], "link": ours.fileno(), "verdict": writing}
                box.start("tests", given, fds=[ours.fileno(), writing])
            finally:
                os.close(writing)
        if _read(pipe, len(_STARTED), START_WITHIN_S) != _STARTED:
            raise OSError(f"the code and its tests did not start, or not within {START_WITHIN_S:g} s")
        said = _read(pipe, None, timeout_s)
    if said is None or not said.endswith(b"\n"):
        return Verdict()
    passed, undecided = json.loads(said)
    if len(passed) != len(tests) or not all(type(each) is bool for each in passed):
        raise OSError("the verdict is none of these tests")
    return Verdict(passed=sum(passed), undecided=tuple(undecided))


def _read(pipe: int, size: int | None, within_s: float) -> bytes | None:
    """Return so many bytes, or all to the end; None where they do not come in time."""
    data, ends = b"", time.monotonic() + within_s
    while size is None or len(data) < size:
        if not readable([pipe], ends - time.monotonic()):
            return None
        more = os.read(pipe, 1 << 16 if size is None else size - len(data))
        if not more:
            break
        data += more
    return data


logger = logging.getLogger(__name__)

_CHOICES = (
    re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Za-z])\)?\s*\}"),
    re.compile(r"(?i:answer|choice|option)(?i:\s+is|\s*:)?[\s*]*\(?([A-Z])\)?(?![A-Za-z])"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\A\W*([A-Za-z])\W*\Z"),
)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@within(0.0, 1.0)
def exact_match(completion: str, answer: object, *, ignore_case: bool = False, strip: bool = True) -> float:
    """1 where the response is the answer and nothing else, after white space around both is taken off; else 0."""
    given, wanted = completion, str(answer)
    if strip:
        given, wanted = given.strip(), wanted.strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


@within(0.0, 1.0)
def choice(completion: str, answer: object) -> float:
    """1 where the response chooses the letter `answer`: the last in a box, after "answer is", or in brackets, or the only
    thing said; else 0."""
    chosen = next((found[-1] for pattern in _CHOICES if (found := pattern.findall(completion))), "")
    return float(bool(chosen) and chosen.upper() == str(answer).strip().strip("().").upper())


@within(0.0, 1.0)
def math_verify(completion: str, answer: object) -> float:
    """1 where the response's last expression equals the answer, as the library math-verify reads both; else 0.

    Raises ValueError for an answer that it cannot read. Its own deadlines need the main thread: the call's deadline holds.
    """
    from math_verify import parse, verify

    text = str(answer)
    wanted = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify reads no expression in the answer {text!r}")
    return float(verify(wanted, parse(completion, parsing_timeout=None), timeout_seconds=None))


@within(0.0, 1.0)
class JsonSchema:
    """1 where the response, or the last fenced block in it, is JSON that fits the schema; else 0."""

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        """`schema` is for all rows; without one each row has its own in its column `schema`, a mapping or JSON text.
        Raises jsonschema.SchemaError for one that is none."""
        from jsonschema.validators import validator_for

        self._schema = schema
        if schema is not None:
            validator_for(schema).check_schema(schema)

    def __call__(self, completion: str, schema: Any = None) -> float:
        from jsonschema import ValidationError, validate

        wanted = schema if self._schema is None else self._schema
        if wanted is None:
            raise ValueError("there is no schema: give the reward one, or the row a column of that name")
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted  # what this raises is the row's
        fenced = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", completion, re.DOTALL)
        try:
            validate(json.loads(fenced[-1] if fenced else completion), wanted)
        except (ValidationError, ValueError, RecursionError):
            return 0.0
        return 1.0


@within(0.0, 1.0)
class Regex:
    """1 where the response contains the pattern, or where a group of its last match is the answer; else 0."""

    def __init__(self, pattern: str, answer_group: int = 0, flags: str = "") -> None:
        """`answer_group` 0 compares nothing; `flags` are letters as in `(?im)`. Raises re.error, ValueError."""
        self._pattern = re.compile(f"(?{flags}){pattern}" if flags else pattern)
        self._answer_group = answer_group
        if not 0 <= answer_group <= self._pattern.groups:
            raise ValueError(f"answer_group={answer_group}: the pattern has {counted(self._pattern.groups, 'group')}")

    def __call__(self, completion: str, answer: object = None) -> float:
        found = list(self._pattern.finditer(completion))
        if not found or not self._answer_group:
            return float(bool(found))
        if answer is None:
            raise ValueError("answer_group is compared with the row's column answer, and there is none")
        return float((found[-1][self._answer_group] or "").strip() == str(answer).strip())


@within(0.0, 1.0, counts=("undecided_tests",))
def code(
    completion: str,
    tests: Sequence[str] | str,
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    sandbox: Level = "required",
) -> dict[str, float]:
    """1 where the response's Python code, its last fenced block or all of it, passes all tests; else 0, or with `partial`
    the share that passes. `tests` are statements, such as `assert add(1, 2) == 3`; those that cannot be decided without
    the program's own classes do not pass, and are counted as `undecided_tests`. `sandbox.py` says what limits hold."""
    fenced = _FENCED.findall(completion)
    each = [tests] if isinstance(tests, str) else list(tests)
    if not each:
        raise ValueError("the row has no tests")
    source = fenced[-1] if fenced else completion
    verdict = run_tests(source, each, timeout_s=timeout_s, memory_mb=memory_mb, sandbox=sandbox)
    for reason in dict.fromkeys(verdict.undecided):
        logger.warning("a test of the reward code did not pass: %s", reason)
    score = verdict.passed / len(each) if partial else float(verdict.passed == len(each))
    return {"code": score, "undecided_tests": float(len(verdict.undecided))}


@within(-1.0, 0.0)
class LengthPenalty:
    """0 up to `start` tokens of all responses, -1 from `end` on, on a line in between (DAPO, arXiv:2503.14476, eq. 13)."""

    def __init__(self, start: int, end: int) -> None:
        """Raises ValueError where they are not in that order."""
        if not 0 <= start < end:
            raise ValueError(f"start={start} must be at least 0 and below end={end}")
        self._start, self._end = start, end

    def __call__(self, response_length: int) -> float:
        return -min(1.0, max(0.0, (response_length - self._start) / (self._end - self._start)))


@within(-1.0, 0.0)
def not_stopped_penalty(stop_reason: str) -> float:
    """-1 where the last response did not end by itself, else 0; its weight says how much that is."""
    return 0.0 if stop_reason == "stop" else -1.0
