"""Trajectories with tools: a scripted engine calls them, and what they answer is in the next prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.errors import ConfigError
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.tools.formats import make_parser
from skyrl_train.rollout.tools.toolbox import tool_schemas
from skyrl_train.telemetry.records import decode_trajectory, encode_trajectory
from skyrl_train.types import FailureKind, GenerationRequest, Outcome, Prompt, SamplingParams, Trajectory
from tests.support.fakes import FakeEngine
from tests.support.tool_cases import JUDGE, TEMPLATE


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = load_tokenizer(ModelConfig())
    loaded.chat_template = TEMPLATE
    return loaded


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def run(tokenizer: Any) -> Iterator[Callable[..., Trajectory]]:
    """Rolls out one trajectory whose turns say `texts`, the last one again and again."""
    made: list[RolloutGenerator] = []

    def run(
        texts: Sequence[str], tools: Sequence[Any] = (), *, max_turns: int = 4, room: int = 4096, **settings: Any
    ) -> Trajectory:
        extras = settings.pop("extras", {})
        row_tools = settings.pop("row_tools", ())
        parse_calls = settings.pop("parse_calls", make_parser("auto", tokenizer))
        said = iter(texts)

        def answer(_: GenerationRequest) -> list[int]:
            return [*tokenizer.encode(next(said, texts[-1])), tokenizer.eos_token_id]

        environment = {"env_class": JUDGE, "isolation": "thread", "step_timeout_s": 30.0, **settings}
        generator = RolloutGenerator(
            FakeEngine(answer),
            tokenizer,
            GeneratorConfig(max_turns=max_turns, max_context_length=room),
            EnvironmentConfig(tools=tuple(tools), max_failed_fraction=1.0, **environment),
            0,
            parse_calls=parse_calls,
        )
        made.append(generator)
        prompt = Prompt(
            uid="p", messages=({"role": "user", "content": "2 + 3?"},), extras=extras, tools=tuple(row_tools)
        )
        sampling = SamplingParams(max_generate_length=1024)
        batch = generator.generate([prompt], n_samples_per_prompt=1, sampling=sampling, global_step=1, purpose="train")
        (trajectory,) = batch.trajectories
        assert decode_trajectory(json.loads(json.dumps(encode_trajectory(prompt, trajectory))))[1] == trajectory
        return trajectory

    yield run
    for generator in made:
        generator.close()


def said(trajectory: Trajectory) -> list[list[str]]:
    return [[str(message["content"]) for message in turn.observations] for turn in trajectory.turns]


def tool_counts(trajectory: Trajectory) -> tuple[float, ...]:
    return tuple(trajectory.metrics[f"tools/{name}"] for name in ("calls", "failed", "malformed"))


ADD = "tests.support.tool_cases:add"


def test_a_call_is_answered_and_the_answer_that_follows_is_scored(run: Any, tokenizer: Any) -> None:
    trajectory = run([call("add", a=2, b=3), "5"], [ADD])
    assert (trajectory.outcome, trajectory.reward, said(trajectory)) == (Outcome.DONE, 1.0, [["5"], []])
    assert tool_counts(trajectory) == (1.0, 0.0, 0.0)
    assert trajectory.metrics["heard"] == 1.0
    (message,) = trajectory.turns[0].observations
    assert message == {"role": "tool", "tool_call_id": "000000000", "name": "add", "content": "5"}
    first = tokenizer.decode(trajectory.prompt_token_ids(0))
    assert '"name": "add"' in first
    assert "Adds two numbers." in first


def test_each_prompt_continues_the_sampled_tokens_by_what_the_template_adds(run: Any, tokenizer: Any) -> None:
    texts = [call("add", a=2, b=3) + call("add", a=5, b=1), "so" + call("add", a=1, b=1), "5"]
    trajectory = run(texts, [ADD])
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    added = [tokenizer.decode(turn.added_token_ids) for turn in trajectory.turns[1:]]
    end = "<|im_end|>\n"
    assert added[0] == f"\n<|im_start|>tool\n5{end}<|im_start|>tool\n6{end}<|im_start|>assistant\n"
    assert added[1] == f"\n<|im_start|>tool\n2{end}<|im_start|>assistant\n"
    for turn, text in zip(trajectory.turns, texts):
        assert turn.response_token_ids.tolist() == [*tokenizer.encode(text), tokenizer.eos_token_id]
    whole = np.concatenate([trajectory.prompt_token_ids(2), trajectory.turns[2].response_token_ids])
    assert tokenizer.decode(whole).count("<tool_call>") == 3


@pytest.mark.parametrize(
    ("text", "told", "counts"),
    [
        (call("add", a=2), "missing 1 required positional argument: 'b'", (1.0, 1.0, 0.0)),
        (call("subtract", a=2), "there is no tool 'subtract'; there are add, fail, long_text", (1.0, 1.0, 0.0)),
        (call("fail"), "Error: ValueError: no luck", (1.0, 1.0, 0.0)),
        ('<tool_call>{"name": "add", "arguments"</tool_call>', "this is no call of a tool", (1.0, 0.0, 1.0)),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "this is no call of a tool", (1.0, 0.0, 1.0)),
        ('<tool_call>["add"]</tool_call>', "must be a JSON object with a name", (1.0, 0.0, 1.0)),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "must be a JSON object", (1.0, 0.0, 1.0)),
        (call("long_text"), "... (99968 more characters)", (1.0, 0.0, 0.0)),
        (call("add", a=1, b=1) + "<tool_call>{</tool_call>", "2", (2.0, 0.0, 1.0)),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(
    run: Any, text: str, told: str, counts: tuple[float, ...]
) -> None:
    tools = [ADD, "tests.support.tool_cases:fail", "tests.support.tool_cases:long_text"]
    trajectory = run([text, "5"], tools, max_tool_result_chars=32 if "long" in text else 4000)
    assert told in said(trajectory)[0][0]
    assert (trajectory.reward, tool_counts(trajectory)) == (1.0, counts)


@pytest.mark.parametrize(
    ("text", "name", "arguments", "error"),
    [
        (call("add", a=2, b=3), "add", {"a": 2, "b": 3}, None),
        (call("nothing", deep=[{"a": "\u2713"}]), "nothing", {"deep": [{"a": "\u2713"}]}, None),
        ('<tool_call>{"name": "add", "arguments"</tool_call>', "add", {}, "Expecting ':' delimiter"),
        (call("add", a=float("nan")), "add", {}, "'function.arguments.a' is nan"),
        (call("add", a=json.loads("[" * 90 + "]" * 90)), "add", {}, "is nested deeper than 64 levels"),
    ],
)
def test_calls_are_recorded_with_their_turn_as_far_as_a_file_can_hold_them(
    run: Any, text: str, name: str, arguments: dict[str, Any], error: str | None
) -> None:
    first, second = run([text, "5"], [ADD]).turns
    (recorded,) = first.tool_calls
    assert recorded["function"] == {"name": name, "arguments": arguments}
    assert (error is None) == ("error" not in recorded)
    assert error is None or error in recorded["error"]
    assert second.tool_calls == ()


def test_a_parser_that_raises_is_a_call_that_cannot_be_read(run: Any) -> None:
    answers = iter([(), ()])
    trajectory = run(
        ["[[[", "5"], [ADD], parse_calls=lambda text, _: json.loads("[" * 100_000) if "[" in text else next(answers)
    )
    assert "RecursionError" in said(trajectory)[0][0]
    assert (trajectory.reward, tool_counts(trajectory)) == (1.0, (1.0, 0.0, 1.0))


def test_a_call_in_the_last_turn_is_scored_as_an_answer(run: Any) -> None:
    trajectory = run([call("add", a=2, b=3)], [ADD], max_turns=2)
    assert (trajectory.outcome, trajectory.reward, trajectory.metrics["heard"]) == (Outcome.DONE, 0.0, 1.0)
    assert said(trajectory) == [["5"], []]


def test_a_trajectory_whose_context_a_result_fills_is_scored(run: Any) -> None:
    trajectory = run([call("long_text"), "5"], ["tests.support.tool_cases:long_text"], room=600)
    assert (trajectory.outcome, len(trajectory.turns), trajectory.metrics["heard"]) == (Outcome.CONTEXT_FULL, 1, 1.0)


def test_without_tools_a_call_is_an_answer(run: Any) -> None:
    trajectory = run([call("add", a=2, b=3)])
    assert (trajectory.outcome, said(trajectory)) == (Outcome.DONE, [[]])
    assert "tools/calls" not in trajectory.metrics


def test_an_environment_offers_tools_of_its_own(run: Any, tokenizer: Any) -> None:
    trajectory = run([call("secret"), "7"], [ADD], extras={"answer": "7", "own": True})
    assert (trajectory.reward, said(trajectory)) == (1.0, [["7"], []])
    assert '"name": "secret"' in tokenizer.decode(trajectory.prompt_token_ids(0))


def test_each_trajectory_has_an_object_of_its_own(run: Any) -> None:
    counter = {"_target_": "tests.support.tool_cases:Counter", "start": 3}
    trajectory = run([call("count_up") + call("count_up"), call("count_up"), "5"], [counter])
    assert said(trajectory) == [["4", "5"], ["6"], []]
    assert said(run([call("count_up"), "5"], [counter])) == [["4"], []]


def test_a_row_says_which_tools_it_offers(run: Any, tokenizer: Any) -> None:
    tools = [ADD, "tests.support.tool_cases:fail"]
    (schema,) = tool_schemas([ADD])
    trajectory = run([call("fail"), "5"], tools, row_tools=[schema])
    assert "there is no tool 'fail'; there are add" in said(trajectory)[0][0]
    assert '"fail"' not in tokenizer.decode(trajectory.prompt_token_ids(0))
    failed = run([call("fail"), "5"], [], row_tools=[schema])
    assert failed.failure is not None
    assert "the row offers the tool 'add', which is neither" in failed.failure.message


def test_asynchronous_tools_of_one_turn_run_together(run: Any) -> None:
    trajectory = run(
        ["".join(call("slow_add", a=each, b=1) for each in range(4)), "5"], ["tests.support.tool_cases:slow_add"]
    )
    assert said(trajectory)[0] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("tool", "isolation", "kind", "reason"),
    [
        ("down", "thread", FailureKind.ENVIRONMENT_ERROR, "ToolUnavailable: the archive does not answer"),
        pytest.param(
            "hang",
            "process",
            FailureKind.ENVIRONMENT_TIMEOUT,
            "Judge.tools did not answer within 5 s",
            marks=pytest.mark.slow,
        ),
        ("crash", "process", FailureKind.ENVIRONMENT_ERROR, "its worker process exited with status 7"),
    ],
)
def test_a_tool_that_is_down_or_takes_its_process_down_fails_the_trajectory(
    run: Any, tool: str, isolation: str, kind: FailureKind, reason: str
) -> None:
    settings = {"isolation": isolation, "step_timeout_s": 5.0 if tool == "hang" else 60.0, "num_workers": 1}
    trajectory = run([call(tool), "5"], [f"tests.support.tool_cases:{tool}", ADD], **settings)
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, reason in trajectory.failure.message) == (kind, True)


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (["tests.support.tool_cases:no_hint"], "missing a type hint"),
        (["tests.support.tool_cases:no_docstring"], "docstring"),
        (["tests.support.tool_cases:nothing"], r"environment.tools\[0\]"),
        (["tests.support.tool_cases:TEMPLATE"], "must name a function or a class"),
        ([ADD, ADD], "each must have a name of its own"),
        ([{"_target_": "tests.support.tool_cases:Counter", "begin": 1}], "begin"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(tools: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tool_schemas(tools)
