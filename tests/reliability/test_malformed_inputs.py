"""Malformed data rows, answers of engines, servers, environments and judges, recorded rollouts: each is refused by an error
of the project that says where, or is accepted with the meaning that `_require_*` states. Any other exception fails the test.

A sample runs by default; all of it with `pytest -m slow tests/reliability/test_malformed_inputs.py -s`, which prints counts.
SKYRL_TRAIN_MALFORMED_COUNT sets the number of cases of each kind.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from pyarrow.parquet import read_table, write_table

from skyrl_train.config import SFTDataConfig
from skyrl_train.config.models import HTTPConfig
from skyrl_train.data import find_sources, load_prompts, read_content, read_rows
from skyrl_train.errors import DataError, EngineError, SkyrlTrainError
from skyrl_train.inference import HTTPEngine
from skyrl_train.rollout import check_answer
from skyrl_train.rollout.boundary import EnvironmentFailed, check_step, read_answer
from skyrl_train.rollout.rewards import Judge, RewardModel
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.system.files import json_line
from skyrl_train.telemetry.records import read_rollouts, write_rollouts
from skyrl_train.trainers.checkpoints import DataFingerprint
from skyrl_train.types import GenerationOutput, GenerationRequest, RolloutBatch, SamplingParams, StopReason
from tests.reliability.malformed import ANSWER, ATOMS, RECORDS, ROWS, as_text, mutated

SAMPLE, ALL = 80, 1500
VOCABULARY_SIZE, MAX_CONTEXT_LENGTH = 300, 64
REQUEST = GenerationRequest(
    request_id="r1", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=4), seed=3
)
COUNTS = [
    pytest.param(SAMPLE, id="sample"),
    pytest.param(int(os.environ.get("SKYRL_TRAIN_MALFORMED_COUNT", ALL)), id="all", marks=pytest.mark.slow),
]
PLACES = ("line ", "row ", "UTF-8", "no rows", "must be a list of rows", "JSON", "no trajectories", "step ")
"""A refusal of a file names one, or what the whole file is."""
tried: Counter[int] = Counter()
"""Cases so far, by how many of each kind were asked for."""
Case = Callable[[random.Random, Path], str]
"""Tries one input; returns `accepted`, or where and why it was refused. Raises AssertionError, or whatever is a defect."""


def data_row(numbers: random.Random, folder: Path) -> str:
    """A row of a file that a run would train on."""
    form = numbers.choice(("jsonl", "jsonl", "jsonl", "json"))
    value = mutated(numbers, numbers.choice(ROWS))
    path = folder / f"train.{form}"
    path.write_bytes(as_text(numbers, value if form == "jsonl" else [ROWS[0], value]))
    try:
        prompts = load_prompts([str(path)])
    except DataError as error:
        return _refused(error, str(path), one_of=PLACES)
    DataFingerprint.of(prompts)
    for prompt in prompts:
        assert isinstance(prompt.uid, str)
        assert all(isinstance(message["content"], str) for message in prompt.messages)
        _require_exact(
            {"messages": list(prompt.messages), "extras": dict(prompt.extras), "env_class": prompt.env_class}
        )
    return "accepted"


def conversation(numbers: random.Random, folder: Path) -> str:
    """A row of a file that a supervised run would train on."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[]"}]
    rows += [{"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}, {"text": "a"}]
    path = folder / "sft.jsonl"
    path.write_bytes(as_text(numbers, mutated(numbers, numbers.choice(rows))))
    try:
        for source in find_sources([str(path)]):
            for row in read_rows(source):
                _require_exact(vars(read_content(row, SFTDataConfig())))
    except DataError as error:
        return _refused(error, str(path), one_of=PLACES)
    return "accepted"


def engine_answer(numbers: random.Random, folder: Path) -> str:
    """What a custom engine returns in place of a GenerationOutput."""
    fields = {"token_ids": [8, 2, 5], "logprobs": [-0.5, -1.0, -0.0], "stop_reason": "stop", "weight_version": 7}
    fields = mutated(numbers, fields)
    given: Any = fields
    if isinstance(fields, dict) and numbers.random() < 0.95:
        reason = fields.get("stop_reason")
        given = GenerationOutput(
            token_ids=_column(numbers, fields.get("token_ids")),
            logprobs=_column(numbers, fields.get("logprobs")),
            stop_reason=StopReason.STOP if reason == "stop" else reason,  # type: ignore[arg-type]
            weight_version=fields.get("weight_version"),  # type: ignore[arg-type]
        )
    try:
        output = check_answer(given, REQUEST, vocabulary_size=VOCABULARY_SIZE, versions=(6, 7))
    except EngineError as error:
        return _refused(error, "the engine ")
    _require_answer(output)
    assert list(output.token_ids) == list(given.token_ids)
    assert list(output.logprobs) == list(given.logprobs)
    return "accepted"


class Server:
    """Answers what it is told to; making an engine for each case would take most of the time."""

    def __init__(self) -> None:
        self.body, self.content_type = b"", "application/json"
        self.engine = HTTPEngine(
            HTTPConfig(url="http://server", model="served", max_retries=0),
            stop_token_ids=(2,),
            timeout_s=5.0,
            vocabulary_size=VOCABULARY_SIZE,
            transport=httpx.MockTransport(self._answer),
            control_transport=httpx.MockTransport(self._answer),
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=self.body, headers={"content-type": self.content_type})


SERVER = functools.cache(Server)


def server_answer(numbers: random.Random, folder: Path) -> str:
    """The body of a server's answer to a completion."""
    server = SERVER()
    server.body = as_text(numbers, mutated(numbers, ANSWER))
    server.content_type = numbers.choice(("application/json", "text/html; charset=none", "\x7f"))
    try:
        output = asyncio.run(server.engine.generate(REQUEST))
    except EngineError as error:
        return _refused(error, one_of=("the engine ", "http://server", "r1"))
    _require_answer(output)
    assert list(output.token_ids) == json.loads(server.body)["choices"][0]["token_ids"]
    return "accepted"


def served_models(numbers: random.Random, folder: Path) -> str:
    """What a server says of its models."""
    server = SERVER()
    server.body = as_text(
        numbers, mutated(numbers, {"object": "list", "data": [{"id": "served", "max_model_len": 64}]})
    )
    try:
        name = server.engine._served_model()
    except EngineError as error:
        return _refused(error, "http://server/v1/models")
    assert name == json.loads(server.body)["data"][0]["id"]
    assert name.encode()
    return "accepted"


class Scorers:
    """Judges and a reward model whose servers answer what they are told to, on one event loop."""

    def __init__(self) -> None:
        self.body, self.loop = b"", asyncio.new_event_loop()
        self.judges = {
            form: Judge(url="http://judge", model="m", reply=form, max_retries=0) for form in ("number", "json")
        }
        self.model = RewardModel(url="http://judge", served_model="m", max_retries=0, timeout_s=5.0)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=self.body))
        for each in (*self.judges.values(), self.model):
            setattr(each, "_client", lambda: httpx.AsyncClient(base_url="http://judge", transport=transport))  # noqa: B010


SCORERS = functools.cache(Scorers)


def judge_reply(numbers: random.Random, folder: Path) -> str:
    """The body of a judge's answer: a score of its scale that the reply states, or a failure; never another number."""
    scorers = SCORERS()
    judge = scorers.judges[numbers.choice(("number", "json"))]
    said = numbers.choice(("score: 7", '{"reasoning": "fair", "score": 7}', "score: 11", "7-8", "\ud800 score: 7"))
    reply: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
    reply["usage"] = {"prompt_tokens": 9, "completion_tokens": 3}
    scorers.body = as_text(numbers, mutated(numbers, reply))
    try:
        # A completion that was not judged before.
        score = scorers.loop.run_until_complete(judge(completion=str(numbers.random()), prompt="2+2?"))
    except EnvironmentFailed as error:
        outcome = _refused(EngineError(error.message), "judge")
    else:
        assert score == 0.7
        outcome = "accepted"
    assert all(math.isfinite(value) and value >= 0 for value in judge.take_metrics().values())
    return outcome


def served_score(numbers: random.Random, folder: Path) -> str:
    """The body of the answer of a server with a reward model: the number in it, or a failure."""
    scorers = SCORERS()
    scorers.body = as_text(numbers, mutated(numbers, {"data": [{"index": 0, "probs": [0.25, 0.5], "num_classes": 2}]}))
    asked = scorers.model(completions=["4"], messages=[[{"role": "user", "content": "2+2?"}]])
    try:
        (score,) = scorers.loop.run_until_complete(asked)
    except EngineError as error:
        return _refused(error, "http://judge")
    given = json.loads(scorers.body)["data"][0]["probs"]
    assert type(score) is float
    assert math.isfinite(score)
    assert isinstance(given, list)
    assert type(given[0]) in (int, float)
    assert score == given[0]
    return "accepted"


def environment_answer(numbers: random.Random, folder: Path) -> str:
    """What a worker process, or a server behind it, answers to a step: the reward in it, or a failure."""
    step = {"observations": [{"role": "user", "content": "no"}], "reward": 0.5, "done": False}
    named = {"observations": None, "reward": {"right": 1.0, "short": -0.5}, "done": True}
    answer = mutated(numbers, {"value": numbers.choice((step, named))})
    try:
        result = check_step(read_answer(answer, source="env.step"), source="env.step")
    except EnvironmentFailed as error:
        return _refused(EngineError(error.message), "env.step")
    given = answer["value"]["reward"]
    assert math.isfinite(result.reward)
    assert result.reward == (sum(given.values()) if isinstance(given, dict) else given)
    assert isinstance(result.done, bool)
    _require_exact({"observations": result.observations})
    return "accepted"


def recorded_rollout(numbers: random.Random, folder: Path) -> str:
    """A line of a recording that is replayed."""
    path = folder / "mine.jsonl"
    path.write_bytes(as_text(numbers, mutated(numbers, numbers.choice(RECORDS))))
    try:
        source = ReplayGenerator(path, vocabulary_size=VOCABULARY_SIZE, max_context_length=MAX_CONTEXT_LENGTH)
    except DataError as error:
        return _refused(error, str(path), one_of=PLACES)
    (batch,) = source._load(path).values()
    _require_replayable(batch)
    again = write_rollouts(folder / "again", batch, purpose="train", global_step=1)
    (same,) = ReplayGenerator(again)._load(again).values()
    assert same == batch
    return "failed alone" if any(trajectory.failed for trajectory in batch.trajectories) else "accepted"


@functools.cache
def stored_rows() -> list[dict[str, Any]]:
    """The rows of a file that a run wrote."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "mine.jsonl"
        lines.write_bytes(b"".join(json_line(record) for record in RECORDS[1:2]))
        (batch,) = read_rollouts(lines).values()
        rows: list[dict[str, Any]] = read_table(
            write_rollouts(Path(folder), batch, purpose="train", global_step=1)
        ).to_pylist()
        return rows


def stored_rollout(numbers: random.Random, folder: Path) -> str:
    """Rows of a Parquet file that is replayed, of whatever types they are, and whatever became of its bytes."""
    path = folder / "mine.parquet"
    try:
        write_table(pa.Table.from_pylist(mutated(numbers, stored_rows())), path)
    except (pa.ArrowException, OverflowError, ValueError, TypeError, AttributeError):
        write_table(pa.Table.from_pylist(stored_rows()), path)
    content = bytearray(path.read_bytes())
    for _ in range(numbers.choice((0, 0, 1, 3))):
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content[: numbers.choice((len(content), len(content), numbers.randrange(len(content))))])
    try:
        source = ReplayGenerator(path, vocabulary_size=VOCABULARY_SIZE, max_context_length=MAX_CONTEXT_LENGTH)
    except DataError as error:
        return _refused(error, str(path))
    batches = source._load(path).values()
    for batch in batches:
        _require_replayable(batch)
    return "failed alone" if any(each.failed for batch in batches for each in batch.trajectories) else "accepted"


def _require_replayable(batch: RolloutBatch) -> None:
    for trajectory in batch.trajectories:
        for turn, start in zip(trajectory.turns, trajectory.prompt_lengths()):
            assert math.isfinite(np.float32(turn.reward))
            assert start + len(turn.response_token_ids) <= MAX_CONTEXT_LENGTH
            assert max(*turn.added_token_ids.tolist(), *turn.response_token_ids.tolist(), 0) < VOCABULARY_SIZE
            assert (turn.response_logprobs <= 0).all()


CASES: list[Case] = [
    data_row,
    conversation,
    engine_answer,
    server_answer,
    served_models,
    judge_reply,
    served_score,
    environment_answer,
    recorded_rollout,
    stored_rollout,
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_comes_from_outside_is_refused_by_name_or_has_a_meaning(case: Case, count: int, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(count):
        try:
            outcomes[case(random.Random(f"{case.__name__}/{number}"), tmp_path).partition(":")[0]] += 1
        except Exception as error:
            raise AssertionError(f"case {number} of {case.__name__}: {type(error).__name__}: {error}") from error
    tried[count] += count
    print(f"\n{case.__name__}: " + ", ".join(f"{each} {kind}" for kind, each in outcomes.most_common()))
    print(f"{tried[count]} cases, 0 failures")
    assert outcomes["refused"] > count / 20, "the grammar has to break something"
    assert outcomes["accepted"] > count / 50, "and not everything"


@pytest.mark.parametrize("atom", ATOMS, ids=lambda atom: str(type(atom).__name__))
def test_every_atom_in_an_extra_column_can_be_written_or_is_refused_with_the_column(atom: Any, tmp_path: Path) -> None:
    from skyrl_train.data import Row, make_prompt

    row = Row(source="s", index=0, place="s, row 0", values={"prompt": "2+2?", "extra_info": {"score": atom}})
    try:
        prompt = make_prompt(row)
    except DataError as error:
        _refused(error, "s, row 0: column 'extra_info")
        return
    _require_exact(dict(prompt.extras))


def _require_exact(record: dict[str, Any]) -> None:
    """What is written is read back as it was."""
    assert json.loads(json_line(record)) == json.loads(json.dumps(record, allow_nan=False))


def _refused(error: SkyrlTrainError, *words: str, one_of: tuple[str, ...] = ("",)) -> str:
    """Return the outcome. A refusal has all `words`, one of the others, and a length that can be read."""
    message = str(error)
    assert all(word in message for word in words), message
    assert any(word in message for word in one_of), message
    assert len(message) < 1500
    return f"refused: {message}"


def _require_answer(output: GenerationOutput) -> None:
    assert all(type(token_id) is int and 0 <= token_id < VOCABULARY_SIZE for token_id in output.token_ids)
    assert all(type(value) is float and math.isfinite(value) and value <= 0 for value in output.logprobs)
    assert 1 <= len(output.token_ids) == len(output.logprobs) <= REQUEST.sampling.max_generate_length
    assert isinstance(output.stop_reason, StopReason)
    assert asdict(output)


def _column(numbers: random.Random, values: Any) -> Any:
    """A list as engines give it: a tuple, a list, or an array where its values allow one."""
    if not isinstance(values, list):
        return values
    if (
        numbers.random() < 0.3
        and values
        and all(type(value) in (int, float, bool) and abs(value) < 2**31 for value in values)
    ):
        return np.array(values)
    return numbers.choice((tuple, list))(values)
