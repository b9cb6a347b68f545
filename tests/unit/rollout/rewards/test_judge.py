"""The judge against a server on this machine: what is asked, what is made of replies, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.judge.stub_judge import MODEL, StubJudge
from skyrl_train.rollout import http as http_reply
from skyrl_train.rollout.boundary import EnvironmentFailed
from skyrl_train.rollout.rewards.judge import Judge, ReplyCache
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.types import FailureKind

ROOT = Path(__file__).resolve().parents[4]
TWO = ({"name": "clarity", "criterion": "is it clear?", "weight": 0.25}, {"name": "truth", "weight": 0.75})


class Scripted(StubJudge):
    """Replies in turn with what it was given: a text, or a status and a text. The last is said for ever."""

    def __init__(self, *replies: str | tuple[int, str], **settings: Any) -> None:
        super().__init__(**settings)
        self.replies = list(replies)

    def reply(self, request: Mapping[str, Any]) -> tuple[int, str]:
        with self.lock:
            said = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return said if isinstance(said, tuple) else (200, said)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(http_reply, "_FIRST_PAUSE_S", 0.0)
    servers: list[StubJudge] = []

    def start(server: StubJudge) -> StubJudge:
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def judge_of(server: StubJudge, **settings: Any) -> Judge:
    return Judge(url=server.url, model=MODEL, **settings)


def ask(judge: Judge, completion: str = "42", **columns: Any) -> Any:
    return asyncio.run(judge(completion, **{"prompt": "6 * 7?", **columns}))


def refusal(judge: Judge) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as caught:
        ask(judge)
    return caught.value


def test_a_score_of_the_scale_becomes_a_number_from_0_to_1(serve: Any) -> None:
    server = serve(StubJudge())
    assert ask(judge_of(server), completion="the digits 1 2 2 7") == pytest.approx(0.6)
    request = server.asked[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == (MODEL, 0.0, 1024)
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["messages"][1]["content"].startswith(
        "Task:\n6 * 7?\n\nAnswer:\nthe digits 1 2 2 7\n\nGrade the answer"
    )


def test_a_template_has_columns_and_what_is_inside_them(serve: Any) -> None:
    server = serve(Scripted("score: 1"))
    template = "{{as is}} {completion} | {answer} | {reward_spec.ground_truth} | {prompt}"
    judge = judge_of(server, template=template, system="")
    row = {"answer": 42, "reward_spec": {"ground_truth": "{42}"}}
    assert ask(judge, **row, prompt=[{"role": "user", "content": "6 * 7?"}]) == pytest.approx(0.1)
    assert server.asked[0]["messages"] == [{"role": "user", "content": "{as is} 42 | 42 | {42} | user: 6 * 7?"}]
    assert judge.missing_column(row) == ""
    assert judge.missing_column({"answer": 42, "reward_spec": {}}) == "reward_spec.ground_truth"


@pytest.mark.parametrize(
    ("settings", "reply", "expected"),
    [
        ({}, "I first thought score: 3, no.\n**Score:** 7.5/10", 0.75),
        ({}, "score: 3\nscore: 7", 0.7),
        ({"scale": (1, 5)}, "- score = 2", 0.25),
        ({"pattern": r"\[\[(\d+)\]\]"}, "[[2]] or rather [[8]].", 0.8),
        ({"reply": "grades"}, "Grade: A would be too much.\nscore: b", 0.75),
        ({"reply": "grades", "grades": {"A+": 2.0, "A": 1.0}}, "score: A+", 2.0),
        ({"reply": "json"}, '```json\n{"reasoning": "{x}", "score": 4}\n```', 0.4),
        ({"rubric": TWO[:1]}, "clarity: 10", {"clarity": 0.25}),
        ({"rubric": TWO}, "clarity: 10\ntruth: 5", {"clarity": 0.25, "truth": 0.375}),
        ({"rubric": TWO, "reply": "json"}, '{"clarity": 2, "truth": 10.0}', {"clarity": 0.05, "truth": 0.75}),
    ],
)
def test_replies_are_read_in_the_form_that_was_asked_for(
    serve: Any, settings: dict[str, Any], reply: str, expected: Any
) -> None:
    server = serve(Scripted(reply))
    assert ask(judge_of(server, **settings)) == pytest.approx(expected)
    names = [each["name"] for each in settings.get("rubric", ({"name": "score"},))]
    assert all(name in server.asked[0]["messages"][1]["content"] for name in names)
    schema = server.asked[0].get("response_format", {}).get("json_schema", {}).get("schema", {})
    assert schema.get("required", []) == (["reasoning", *names] if settings.get("reply") == "json" else [])


@pytest.mark.parametrize(
    ("settings", "reply", "why"),
    [
        ({}, "I cannot grade this.", "nothing for 'score'"),
        ({}, "", "nothing for 'score'"),
        ({}, "score: 11", "'11' for 'score', which must be a number from 0 to 10"),
        ({}, "score: -1", "'-1'"),
        ({}, "score: 7-8", "nothing for 'score'"),
        ({"reply": "grades"}, "score: E", "must be one of A, B, C, D, F"),
        ({"reply": "grades"}, "score: Almost", "nothing"),
        ({"reply": "json"}, '{"score": true}', "True for 'score'"),
        ({"reply": "json"}, '{"score": NaN}', "nan for 'score'"),
        ({"reply": "json"}, "[7]", "nothing for 'score'"),
        ({"reply": "json"}, '{"score": {"value": 7}}', "must be a number"),
        ({"rubric": TWO}, "clarity: 10", "nothing for 'truth'"),
    ],
)
def test_a_reply_without_a_score_is_a_failure_with_its_reason(
    serve: Any, settings: dict[str, Any], reply: str, why: str
) -> None:
    judge = judge_of(serve(Scripted(reply)), **settings)
    broken = refusal(judge)
    assert broken.kind is FailureKind.INVALID_REWARD
    assert why in broken.message
    assert judge.take_metrics()["failures"] == 1


def test_a_passing_error_is_tried_again_and_a_refusal_is_not(serve: Any) -> None:
    server = serve(Scripted((503, "busy"), (429, "too many"), "score: 5"))
    assert ask(judge_of(server)) == 0.5
    assert len(server.asked) == 3
    refusing = serve(Scripted((400, "no"), "score: 5"))
    broken = refusal(judge_of(refusing))
    assert "status 400" in broken.message
    assert broken.kind is FailureKind.ENVIRONMENT_ERROR
    dead = serve(Scripted((500, "dead")))
    assert "status 500" in refusal(judge_of(dead, max_retries=2)).message
    assert len(dead.asked) == 3


def test_a_reply_that_takes_too_long_is_a_failure_that_names_the_deadline(serve: Any) -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(StubJudge):
        def reply(self, request: Mapping[str, Any]) -> tuple[int, str]:
            entered.set()
            release.wait(30)
            return 200, "score: 5"

    broken = refusal(judge_of(serve(Slow()), timeout_s=0.3))
    release.set()
    assert entered.is_set()
    assert broken.kind is FailureKind.ENVIRONMENT_TIMEOUT
    assert "within 0.3 s" in broken.message


def test_a_reply_that_is_cut_off_or_no_completion_is_a_failure(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.judge import stub_judge

    for choices, why in (
        ([{"message": {"content": "score: 1"}, "finish_reason": "length"}], "cut off; raise sampling.max_tokens"),
        ([{"message": {"content": None}, "finish_reason": "stop"}], "no text"),
        ([], "no chat completion"),
        ("odd", "no chat completion"),
    ):
        monkeypatch.setattr(
            stub_judge._Handler, "do_POST", lambda handler, body=choices: handler._send(200, {"choices": body})
        )
        assert why in refusal(judge_of(serve(StubJudge()), max_retries=0)).message


def test_the_same_question_is_asked_once_and_no_more_calls_are_in_flight_than_are_allowed(serve: Any) -> None:
    lock, in_flight, most = threading.Lock(), 0, 0

    class Counting(StubJudge):
        def reply(self, request: Mapping[str, Any]) -> tuple[int, str]:
            nonlocal in_flight, most
            with lock:
                in_flight, most = in_flight + 1, max(most, in_flight + 1)
            threading.Event().wait(0.02)
            with lock:
                in_flight -= 1
            return super().reply(request)

    server = serve(Counting())
    judge = judge_of(server, max_concurrency=3, price={"prompt": 1.0, "completion": 10.0})

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(judge(f"answer {index % 10}", prompt="?") for index in range(40)))

    assert asyncio.run(all_at_once()) == [0.2] * 40
    assert (len(server.asked), most) == (10, 3)
    metrics = judge.take_metrics()
    assert metrics["calls"] == 10
    assert metrics["cache_hits"] == 30
    assert metrics["cost"] == pytest.approx((10 * 100 * 1.0 + 10 * 10 * 10.0) / 1e6)
    assert 0 < metrics["latency_p50_s"] <= metrics["latency_p95_s"]
    assert judge.take_metrics() == {}


def test_a_later_judge_reads_the_replies_of_an_earlier_one_and_other_settings_do_not(
    serve: Any, tmp_path: Path
) -> None:
    cache = str(tmp_path / "folder" / "replies.sqlite")
    server = serve(Scripted("nothing to say", "score: 3", "score: 9"))
    judge = judge_of(server, cache=cache)
    refusal(judge)  # what says no score is not kept
    assert ask(judge) == 0.3
    assert ask(judge_of(server, cache=cache)) == 0.3
    assert len(server.asked) == 2
    assert ask(judge_of(server, cache=cache, sampling={"temperature": 0.5})) == 0.9
    assert ask(Judge(url=server.url, model="another", cache=cache)) == 0.9
    assert len(server.asked) == 4


WRITER = """
import sys
from skyrl_train.rollout.rewards.judge import ReplyCache
cache, number = ReplyCache(sys.argv[1]), 0
while True:
    print(number, cache.put(f"key {number}", f"{sys.argv[2]} {number}"), flush=True)
    number += 1
"""


def test_replies_survive_a_kill_and_runs_that_share_them_agree(tmp_path: Path) -> None:
    path = str(tmp_path / "replies.sqlite")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, name], stdout=subprocess.PIPE, text=True, env=environ)
        for name in ("one", "two")
    ]
    said: list[dict[str, str]] = []
    for writer in writers:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(50)]
        said.append(dict(line.strip().split(" ", 1) for line in lines))
        writer.kill()
        writer.wait()
        writer.stdout.close()
    cache = ReplyCache(path)
    for number in range(50):
        assert cache.get(f"key {number}") == said[0][str(number)] == said[1][str(number)]


def test_a_file_that_is_no_cache_fails_the_trajectory_by_name(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"something else entirely, and long enough to be looked at" * 20)
    broken = refusal(judge_of(serve(StubJudge()), cache=str(tmp_path / "replies.sqlite")))
    assert "file is not a database" in broken.message


def test_the_key_comes_from_the_environment_and_is_in_no_message(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(StubJudge(key="abc-judge-77-key"))
    judge = judge_of(server, api_key_env="ANY_NAME")
    assert "status 401" in refusal(judge).message
    monkeypatch.setenv("ANY_NAME", "abc-judge-77-wrong")
    message = refusal(judge_of(server, api_key_env="ANY_NAME")).message
    assert "wrong key" in message
    assert "abc-judge-77" not in message
    monkeypatch.setenv("ANY_NAME", "abc-judge-77-key")
    assert ask(judge_of(server, api_key_env="ANY_NAME")) == 0.4
    assert redact_text("see abc-judge-77-key") == "see <redacted>"


def test_a_server_that_cannot_judge_is_told_in_one_line(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.judge import stub_judge

    server = serve(StubJudge())

    def problem(**settings: Any) -> str:
        return asyncio.run(Judge(**{"url": f"{server.url}/v1", "model": MODEL, **settings}).problem())

    assert problem() == ""
    assert "has no model 'gpt-9'; it has stub-judge" in problem(model="gpt-9")
    assert "does not answer (ConnectError)" in problem(url="http://127.0.0.1:9")
    for status, expected in ((404, ""), (401, "refuses the key"), (403, "SKYRL_TRAIN_JUDGE_API_KEY"), (502, "502")):
        monkeypatch.setattr(
            stub_judge._Handler, "do_GET", lambda handler, status=status: handler._send(status, {"data": []})
        )
        found = problem()
        assert expected in found
        assert bool(found) == (status != 404)
        assert "\n" not in found


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"template": "no field"}, "template"),
        ({"template": "{completion} {"}, "template"),
        ({"rubric": [{"criterion": "has no name"}]}, "rubric"),
        ({"rubric": [{"name": "a"}, {"name": "a"}]}, "rubric"),
        ({"rubric": []}, "rubric"),
        ({"reply": "xml"}, "reply"),
        ({"scale": [5, 1]}, "scale"),
        ({"scale": [5]}, "scale"),
        ({"pattern": "("}, "pattern"),
        ({"pattern": r"\d"}, "pattern"),
        ({"pattern": r"(\d)", "rubric": TWO}, "pattern"),
        ({"sampling": {"stream": True}}, "sampling"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    judge = Judge(**{"url": "http://127.0.0.1:8000", "model": "m", **settings})
    assert [violation.field for violation in judge.violations("environment.reward")] == [f"environment.reward.{field}"]


def test_sound_settings_are_not_refused() -> None:
    judge = Judge(url="https://api.example.com/v1", model="m", rubric=TWO, pattern=r"{name} is (\d)")
    assert list(judge.violations("environment.reward")) == []


def test_nothing_in_the_cache_but_texts(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "replies.sqlite"
    ask(judge_of(serve(StubJudge()), cache=str(path)))
    rows = sqlite3.connect(path).execute("SELECT key, reply FROM replies").fetchall()
    assert [(len(key), reply) for key, reply in rows] == [(64, "The answer has 2 different digits.\nscore: 4")]
    assert json.dumps(rows)
