"""`judge`: a reward that a chat model gives, behind an OpenAI-compatible URL.

    completion, columns --template--> messages --cache, else the server--> reply --rubric--> a score for each criterion

A rubric says what is judged, and how scores stand in a reply:

    number    a line `clarity: 7` for each criterion         grades    a line `clarity: B`
    json      an object `{"reasoning": "...", "clarity": 7}`, which the server is asked for by a JSON schema

A reply that is cut off, or has no score of the scale for some criterion, fails its trajectory with that reason, and so does
a server that does not answer: neither is ever a reward of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import string
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from skyrl_train.config.environment import ONE_SCORE, is_one_score
from skyrl_train.errors import DeadlineError, EngineError, Violation
from skyrl_train.rollout.boundary import EnvironmentFailed, column_in, environment_error, invalid_reward
from skyrl_train.rollout.http import (
    address_violations,
    ask_until_answered,
    client_arguments,
    send,
    server_problem,
)
from skyrl_train.rollout.rewards import HeldReward
from skyrl_train.system.files import is_text, parse_json
from skyrl_train.telemetry.logs import learn_secrets, redact_text
from skyrl_train.types import FailureKind

_GRADES = {"A": 1.0, "B": 0.75, "C": 0.5, "D": 0.25, "F": 0.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?!\.?\d)(?!\s*-\s*\d)"
"""Not the first of two, as in `7-8`."""


class Rubric:
    """Criteria with a weight each."""

    def __init__(
        self,
        criteria: Sequence[Mapping[str, Any]],
        *,
        reply: str,
        pattern: str,
        scale: Sequence[float],
        grades: Mapping[str, float] | None,
    ) -> None:
        """The arguments are those of `Judge`; `violations` says what is wrong with them."""
        self._criteria = {str(each.get("name", "")): each for each in criteria}
        self._is_one_score = is_one_score(criteria)
        self._num_given, self._reply, self._pattern = len(criteria), reply, pattern
        self._scale = tuple(scale)
        self._grades = {str(name).upper(): float(value) for name, value in (grades or _GRADES).items()}

    def violations(self, setting: str) -> Iterator[Violation]:
        """What is wrong with the settings; `setting` is where they are."""
        if not all(self._criteria) or not self._criteria or len(self._criteria) < self._num_given:
            remedy = "write rubric: [{name: clarity, criterion: ..., weight: 1}]"
            rule = "must give each criterion a name of its own"
            yield Violation.of(f"{setting}.rubric", list(self._criteria), rule, remedy)
        if self._reply not in ("number", "json", "grades"):
            yield Violation.of(f"{setting}.reply", self._reply, "must be number, json or grades", "write reply: number")
        if len(self._scale) != 2 or not self._scale[0] < self._scale[1]:
            rule, remedy = "must be the lowest and the highest number", "write scale: [0, 10]"
            yield Violation.of(f"{setting}.scale", list(self._scale), rule, remedy)
        if self._pattern and (problem := self._pattern_problem()):
            yield Violation.of(f"{setting}.pattern", self._pattern, problem, "write one such as '{name} is (\\d+)'")

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value of `score`."""
        grades = self._grades.values() if self._reply == "grades" else (0.0, 1.0)
        weights = [float(each.get("weight", 1.0)) for each in self._criteria.values()]
        ends = [weight * grade for weight in weights for grade in (min(grades), max(grades))]
        return min(ends), max(ends)

    def instructions(self) -> str:
        """Return what a judge is told of criteria and of the form of its reply."""
        criteria = "\n".join(f"- {name}: {each.get('criterion', name)}" for name, each in self._criteria.items())
        is_grade = self._reply == "grades"
        form = "\n".join(f"{name}: {'GRADE' if is_grade else 'NUMBER'}" for name in self._criteria)
        if self._reply == "json":
            form = json.dumps({"reasoning": "...", **dict.fromkeys(self._criteria, self._scale[1])})
        return f"Grade the answer with {self._wanted()} for each of\n{criteria}\n\nEnd your reply with\n{form}"

    def response_format(self) -> dict[str, Any]:
        """Return the field of a request that asks for an object of the rubric; empty where lines are asked for."""
        if self._reply != "json":
            return {}
        properties = {"reasoning": {"type": "string"}, **{name: {"type": "number"} for name in self._criteria}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "grades", "strict": True, "schema": schema}}
        return {"response_format": form}

    def score(self, reply: str) -> float | dict[str, float]:
        """Return weight times score, 0 to 1 or as the grades say: one for each criterion, by its name; of a judge without a
        rubric one number.

        Raises EnvironmentFailed (invalid_reward) naming the first criterion that the reply has no score for.
        """
        if self._reply == "json":
            found = _object_in(reply)
        else:  # the last line that gives a criterion a value
            found = {name: (re.findall(self._expression(name), reply) or [None])[-1] for name in self._criteria}
        scores = {
            name: float(criterion.get("weight", 1.0)) * self._score(name, found.get(name), reply)
            for name, criterion in self._criteria.items()
        }
        return next(iter(scores.values())) if self._is_one_score else scores

    def _score(self, name: str, value: Any, reply: str) -> float:
        if self._reply == "grades":
            if isinstance(value, str) and value.upper() in self._grades:
                return self._grades[value.upper()]
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
            low, high = self._scale
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = float("nan")
            if low <= number <= high:
                return (number - low) / (high - low)
        raise invalid_reward(
            f"judge: its reply has {'nothing' if value is None else repr(value)[:40]} for {name!r}, which must be "
            f"{self._wanted()}; it ends with {redact_text(reply[-120:])!r}"
        )

    def _wanted(self) -> str:
        if self._reply == "grades":
            return f"one of {', '.join(self._grades)}"
        return f"a number from {self._scale[0]:g} to {self._scale[1]:g}"

    def _expression(self, name: str) -> str:
        if self._pattern:
            return self._pattern.replace("{name}", re.escape(name))
        letters = "|".join(re.escape(grade) for grade in sorted(self._grades, key=len, reverse=True))
        value = rf"(?:{letters})(?![\w+-])" if self._reply == "grades" else _NUMBER
        return rf"(?im)^\W*{re.escape(name)}\W*[:=][\s*_`\"'(]*({value})"

    def _pattern_problem(self) -> str:
        try:
            num_groups = re.compile(self._expression(next(iter(self._criteria), ""))).groups
        except re.error as error:
            return f"must be a regular expression ({error})"
        if num_groups != 1:
            return "must have one group, which is the value"
        is_ambiguous = len(self._criteria) > 1 and "{name}" not in self._pattern
        return "must have {name} in it, since there are several criteria" if is_ambiguous else ""


def _object_in(text: str) -> dict[str, Any]:
    """Return the object in a text, fences and words around it left out; empty where there is none."""
    try:
        found = parse_json(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


DECLARED_METRICS = """
timing/<reward>/{calls,cache_hits,failures} | count | Requests to a judge, cached answers, failed requests. | with
    `judge` rewards
timing/<reward>/latency_{p50,p95}_s | s | Median and 95th percentile of a request. | with `judge` rewards
timing/<reward>/<kind>_tokens | tokens | Tokens that the judge read and wrote. | with `judge` rewards
timing/<reward>/cost | | Their cost by the reward's `price`. | with a price
"""

TEMPLATE = "Task:\n{prompt}\n\nAnswer:\n{completion}\n\n{instructions}"
_GIVEN = frozenset({"completion", "prompt", "messages", "instructions"})
"""Fields of a template that are no columns of the data."""
_MOST_TOKENS = 2**32
"""Of one request: what a server says beyond is no count."""
_SET_HERE = frozenset({"model", "messages", "response_format", "stream", "n"})
_LOCK_TIMEOUT_S = 30.0


@dataclass(kw_only=True)
class _Counts:
    """What a judge did since it was last asked."""

    cache_hits: int = 0
    failures: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "completion": 0})
    latencies_s: list[float] = field(default_factory=list)
    """Of each call that was answered, retries included."""


class Judge(HeldReward):
    """A reward function, `await judge(completion=..., prompt=..., **columns)`."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        template: str = TEMPLATE,
        system: str = "You grade answers. Be strict and fair.",
        rubric: Sequence[Mapping[str, Any]] = ONE_SCORE,
        reply: str = "number",
        pattern: str = "",
        scale: Sequence[float] = (0, 10),
        grades: Mapping[str, float] | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_concurrency: int = 32,
        max_retries: int = 4,
        timeout_s: float = 120.0,
        cache: str = "",
        price: Mapping[str, float] | None = None,
        api_key_env: str = "SKYRL_TRAIN_JUDGE_API_KEY",
    ) -> None:
        """
        Args:
            url: Base address of the server, with or without `/v1`.
            model: Name of the model there.
            template: The user's message. In braces stand `completion`, `prompt`, `messages`, `instructions` (what is
                judged, and how to reply) and columns of the row, as `reward_spec.ground_truth` what is inside one.
            system: The system message; empty is none.
            rubric: Criteria, `{name, criterion, weight}` each; a weight is 1 unless given.
            reply: How scores stand in a reply: `number`, `grades` or `json` (see the head).
            pattern: A regular expression in place of `number`'s and `grades`' lines: its one group is the value, `{name}`
                stands for the criterion's name, the last match counts.
            scale: Lowest and highest number, which become 0 and 1.
            grades: Letter to score; A, B, C, D, F unless given.
            sampling: Further fields of the request; `{temperature: 0, max_tokens: 1024}` unless given.
            max_concurrency: Calls in flight at most.
            max_retries: Attempts after the first, for what the server did not answer or answered with a passing error.
            timeout_s: Deadline of one attempt; one that exceeds it is not repeated.
            cache: A file of replies by model, messages and sampling; empty keeps them for this process alone.
            price: Of a million tokens, `{prompt: 0.15, completion: 0.6}`, in any currency.
            api_key_env: Environment variable that holds the server's key, where it wants one.
        """
        self._url, self._model, self._template, self._system = url.rstrip("/"), model, template, system
        self._rubric = Rubric(rubric, reply=reply, pattern=pattern, scale=scale, grades=grades)
        self._sampling = dict(sampling or {"temperature": 0.0, "max_tokens": 1024})
        self._max_concurrency, self._max_retries, self._timeout_s = max_concurrency, max_retries, timeout_s
        self._price, self._api_key_env, self._cache_path = dict(price or {}), api_key_env, cache
        self._cache: ReplyCache | None = None
        self._counts = _Counts()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, completion: str, **columns: Any) -> float | dict[str, float]:
        """Return the rubric's score of a completion. Raises EnvironmentFailed where there is none."""
        self._connect()
        try:
            messages = self._messages({**columns, "completion": completion})
            return self._rubric.score(await self._reply_to(messages))
        except EnvironmentFailed:
            self._counts.failures += 1
            raise

    @property
    def reward_range(self) -> tuple[float, float]:
        """As the rubric's weights, and its grades where those are asked for, say."""
        return self._rubric.range

    def violations(self, setting: str) -> Iterator[Violation]:
        """What is wrong with the settings, found without the network; `setting` is where they are."""
        if not self._model:
            yield Violation.of(f"{setting}.model", self._model, "must name a model", "write model: NAME")
        yield from address_violations(self._url, f"{setting}.url")
        if "completion" not in self._fields():
            rule, remedy = "must be text with {completion} in it", "double the braces that stand for themselves"
            yield Violation.of(f"{setting}.template", self._template[:80], rule, remedy)
        if taken := sorted(_SET_HERE & set(self._sampling)):
            yield Violation.of(f"{setting}.sampling", taken, "cannot have what the judge sets itself", "drop them")
        yield from self._rubric.violations(setting)

    def missing_column(self, columns: Mapping[str, Any]) -> str:
        """Return the first field of the template that a row with these columns lacks; empty where it has all."""
        return next((name for name in self._fields() if name not in _GIVEN and column_in(columns, name) is None), "")

    async def problem(self) -> str:
        """Return why the server cannot judge, in one line; empty where it answers and has the model, or lists none."""
        what = f"the judge at {redact_text(self._url)}"
        async with self._client() as client:
            return await server_problem(client, what=what, model=self._model, api_key_env=self._api_key_env)

    def take_metrics(self) -> dict[str, float]:
        """Return what happened since the last time, if anything: all of it depends on the machine and on what is cached."""
        counts, self._counts = self._counts, _Counts()
        if counts == _Counts():
            return {}
        latencies = sorted(counts.latencies_s)
        metrics: dict[str, float] = {
            "calls": len(latencies),
            "cache_hits": counts.cache_hits,
            "failures": counts.failures,
            **{f"{kind}_tokens": number for kind, number in counts.tokens.items()},
        }
        if latencies:
            metrics["latency_p50_s"] = latencies[(len(latencies) - 1) // 2]
            metrics["latency_p95_s"] = latencies[-1 - len(latencies) // 20]
        if self._price:
            metrics["cost"] = sum(self._price.get(kind, 0.0) * number / 1e6 for kind, number in counts.tokens.items())
        return {name: float(value) for name, value in metrics.items()}

    def _fields(self) -> list[str]:
        """Return the names in braces; none of a template that is no template."""
        try:
            return [name for _, name, _, _ in string.Formatter().parse(self._template) if name is not None]
        except ValueError:
            return []

    def _messages(self, columns: Mapping[str, Any]) -> list[dict[str, str]]:
        given, parts = {**columns, "instructions": self._rubric.instructions()}, []
        for literal, name, _, _ in string.Formatter().parse(self._template):
            value = "" if name is None else column_in(given, name)
            if value is None:
                raise invalid_reward(f"judge: the row has no {name!r}, which its template names")
            parts += [literal, as_text(value)]
        user = {"role": "user", "content": "".join(parts)}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def _connect(self) -> None:
        """Connections belong to an event loop."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._slots = loop, asyncio.Semaphore(self._max_concurrency)
            self._connections, self._asked = self._client(), dict[str, asyncio.Task[str]]()

    async def _reply_to(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the reply. What is asked already is not asked again."""
        body = {"model": self._model, "messages": messages, **self._rubric.response_format(), **self._sampling}
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if key in self._asked:
            self._counts.cache_hits += 1
        else:
            task = self._asked[key] = asyncio.ensure_future(self._cached(key, body))
            task.add_done_callback(partial(self._answered, key))
        return await asyncio.shield(self._asked[key])

    def _answered(self, key: str, task: asyncio.Task[str]) -> None:
        """Forget the question. Whoever asked it may be gone, so that the error is looked at here."""
        del self._asked[key]
        if not task.cancelled():
            task.exception()

    async def _cached(self, key: str, body: dict[str, Any]) -> str:
        try:
            if self._cache is None:
                self._cache = ReplyCache(self._cache_path)
            stored = await asyncio.to_thread(self._cache.get, key)
            if stored is not None:
                self._counts.cache_hits += 1
                return stored
            async with self._slots:
                reply = await self._ask(body)
            self._rubric.score(reply)  # one without a score is not kept
            return await asyncio.to_thread(self._cache.put, key, reply)
        except DeadlineError as error:
            raise EnvironmentFailed(FailureKind.ENVIRONMENT_TIMEOUT, redact_text(str(error))) from None
        except (EngineError, sqlite3.Error, OSError) as error:
            raise environment_error(redact_text(str(error))) from None

    async def _ask(self, body: dict[str, Any]) -> str:
        """Return the text of one chat completion. Raises EngineError, DeadlineError."""
        begun, where = time.monotonic(), f"the judge at {self._url}"
        answer = await ask_until_answered(
            lambda: send(self._connections, "POST", "/v1/chat/completions", body, timeout_s=self._timeout_s),
            where=where,
            max_retries=self._max_retries,
            timeout_s=self._timeout_s,
        )
        self._counts.latencies_s.append(time.monotonic() - begun)
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
            usage = answer.get("usage") or {}
            for kind in self._counts.tokens:
                count = usage.get(f"{kind}_tokens")
                # A reply is no worse where its server counts in a way of its own.
                self._counts.tokens[kind] += count if type(count) is int and 0 < count < _MOST_TOKENS else 0
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EngineError(f"{where}: its answer is no chat completion: {repr(answer)[:200]}") from None
        if reason == "length" or not isinstance(text, str) or not is_text(text):
            problem = "is cut off; raise sampling.max_tokens" if reason == "length" else "has no text"
            raise EngineError(f"{where}: its reply {problem}")
        return text

    def _client(self) -> httpx.AsyncClient:
        token = os.environ.get(self._api_key_env, "")
        learn_secrets({"token": token})
        arguments = client_arguments(self._url.removesuffix("/v1"), token, self._timeout_s)
        return httpx.AsyncClient(**arguments, limits=httpx.Limits(max_connections=None))


class ReplyCache:
    """Replies by key in an SQLite file: what was put there survives a kill, and several runs may share it."""

    def __init__(self, path: str) -> None:
        """`path` may be empty, for replies of this process alone. Raises OSError, sqlite3.Error."""
        file = Path(path).expanduser()
        if path:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(
            file if path else ":memory:", timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._lock = threading.Lock()
        self._write_ahead()
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    def _write_ahead(self) -> None:
        """Choose the journal that lets readers go on. SQLite refuses at once, whatever its timeout, where another process
        opens the file and chooses it in the same moment."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def get(self, key: str) -> str | None:
        """Return a reply, if there is one."""
        with self._lock:
            row = self._connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> str:
        """Return the reply that is kept: the first one, where another run was faster."""
        with self._lock:
            self._connection.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, reply))
        return self.get(key) or reply


def as_text(value: Any) -> str:
    """Return a value of a row as a judge reads it: texts as they are, messages as `role: content`, all else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(each, Mapping) and "role" in each for each in value):
        return "\n".join(f"{each['role']}: {as_text(each.get('content') or '')}" for each in value)
    return json.dumps(value, ensure_ascii=False, default=str)
