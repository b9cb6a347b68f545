"""Environments of verifiers, unchanged, played under an interpreter that has it."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig
from skyrl_train.model import load_tokenizer
from skyrl_train.rollout.adapters.verifiers_episodes import _result
from skyrl_train.rollout.boundary import EnvironmentFailed
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.hosts.local import violations_in_process
from skyrl_train.rollout.tools.formats import make_parser
from skyrl_train.types import Outcome, Prompt, SamplingParams
from tests.support.adapter_cases import PYTHON, needs_others, played
from tests.support.fakes import FakeEngine
from tests.support.tool_cases import TEMPLATE

TASKSET = """
import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class EchoTaskset(vf.Taskset[EchoTask]):
    def load(self):
        for word in ("cat", "dog"):
            yield EchoTask(EchoData(prompt=f"Say {word}.", answer=word), self.config.task)


__all__ = ["EchoTaskset"]
"""

GAME = """
import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 / trace.num_turns


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated:
                number = int(segment.last_reply)
                if number == task.data.secret:
                    won = 1.0
                    break
                segment = await talk.turn("higher" if number < task.data.secret else "lower")
        talk.trace.record_reward("won", won)


class GuessTaskset(vf.Taskset[GuessTask]):
    def load(self):
        for secret in (3, 5, 1):
            data = GuessData(prompt="Guess from 0 to 9.", system_prompt="Play.", secret=secret)
            yield GuessTask(data, self.config.task)


__all__ = ["GuessTaskset", "GuessEnv"]
"""

SHELF = """
import verifiers.v1 as vf


class ShelfData(vf.TaskData):
    answer: str


class ShelfConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShelfTasksetConfig(vf.TasksetConfig):
    task: ShelfConfig = ShelfConfig()


class Shelf(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def find(self, word: str) -> str:
        "Finds a book by a word of its title."
        return {"war": "War and Peace"}.get(word, "nothing")


class ShelfTask(vf.Task[ShelfData, vf.State, ShelfConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(config.tools)]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def looked(self, trace) -> float:
        return float(len(trace.tool_messages))


class ShelfTaskset(vf.Taskset[ShelfTask, ShelfTasksetConfig]):
    def load(self):
        yield ShelfTask(ShelfData(prompt="Which book is of war?", answer="War and Peace"), self.config.task)


__all__ = ["ShelfTaskset"]

if __name__ == "__main__":
    Shelf.run()
"""


@needs_others
def test_a_task_of_verifiers_scores_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_tasks.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert violations_in_process(["verifiers:echo_tasks"], PYTHON) == []
    (cat, (missed,)), (dog, (hit,)) = played("verifiers:echo_tasks", [{"task": 0}, {"task": 1}], ["dog"])
    assert (cat, dog) == ("Say cat.", "Say dog.")
    assert (missed.reward, hit.reward, hit.components, hit.done) == (0.0, 2.0, {"exact": 2.0}, True)
    (violation,) = violations_in_process(["verifiers:no_such_tasks"], PYTHON)
    assert str(violation).startswith("environment.env_class.name: must be an installed taskset; got 'no_such_tasks'")


@needs_others
def test_an_environment_of_verifiers_talks_with_the_model_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess_game.py").write_text(GAME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [{"task": task, "max_turns": 3} for task in range(3)]
    (first, won), (_, cut), (_, at_once) = played("verifiers:guess_game", rows, ["1", "4", "3"])
    assert first == "Guess from 0 to 9."
    assert [step.observations for step in won] == [
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "lower"}],
        [],
    ]
    assert [(step.reward, step.done) for step in won] == [(0.0, False), (0.0, False), (pytest.approx(7 / 6), True)]
    assert won[-1].components == {"won": 1.0, "brief": pytest.approx(1 / 6)}
    # verifiers is told of generator.max_turns, and scores what there is then.
    assert (cut[-1].components["won"], cut[-1].done, cut[-1].truncated) == (0.0, True, True)
    assert [(step.reward, step.done, step.truncated) for step in at_once] == [(1.5, True, False)]
    with pytest.raises(
        EnvironmentFailed, match="verifiers could not play the task: ValueError: invalid literal for int"
    ):
        played("verifiers:guess_game", [{"task": 0}], ["none"])


@needs_others
def test_tools_of_verifiers_run_where_it_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf_tasks.py").write_text(SHELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    call = {"id": "000000000", "name": "shelf_find", "arguments": {"word": "war"}}
    calls = [call, {**call, "id": "000000001", "name": "shelf_burn"}, {**call, "id": "000000002", "arguments": "war"}]
    ((_, (looked, end)),) = played("verifiers:shelf_tasks", [{"task": 0}], [("I look.", calls), "War and Peace"])
    assert [(each["role"], each["tool_call_id"]) for each in looked.observations] == [
        ("tool", f"00000000{index}") for index in range(3)
    ]
    found, unknown, unreadable = (each["content"] for each in looked.observations)
    assert (found, unknown) == ("War and Peace", "error: unknown tool 'shelf_burn'")
    assert unreadable.startswith("error: invalid JSON in tool arguments")
    assert (end.reward, end.components, end.done) == (1.0, {"right": 1.0}, True)


@needs_others
def test_what_is_trained_on_is_what_called_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf_tasks.py").write_text(SHELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tokenizer: Any = load_tokenizer(ModelConfig())
    tokenizer.chat_template = TEMPLATE
    texts = ['I look.<tool_call>{"name": "shelf_find", "arguments": {"word": "war"}}</tool_call>', "War and Peace"]
    said = iter(texts)
    generator = RolloutGenerator(
        FakeEngine(lambda _: [*tokenizer.encode(next(said)), tokenizer.eos_token_id]),
        tokenizer,
        GeneratorConfig(max_turns=4, max_context_length=4096),
        EnvironmentConfig(env_class="verifiers:shelf_tasks", python=PYTHON),
        0,
        parse_calls=make_parser("auto", tokenizer),
    )
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "task"},), extras={"task": 0})
    try:
        (trajectory,) = generator.generate(
            [prompt],
            n_samples_per_prompt=1,
            sampling=SamplingParams(max_generate_length=512),
            global_step=1,
            purpose="train",
        ).trajectories
    finally:
        generator.close()
    called, answered = trajectory.turns
    assert [turn.response_token_ids.tolist() for turn in trajectory.turns] == [
        [*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts
    ]
    assert (called.parent, answered.parent) == (None, 0)
    assert "Finds a book by a word of its title." in tokenizer.decode(called.added_token_ids)
    assert "War and Peace" in tokenizer.decode(answered.added_token_ids)
    assert (called.reward, answered.reward, trajectory.outcome) == (0.0, 1.0, Outcome.DONE)
    assert (trajectory.metrics["tools/calls"], trajectory.metrics["looked"]) == (1.0, 1.0)


@needs_others
def test_environments_of_verifiers_that_no_trajectory_can_play_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_tasks.py").write_text(TASKSET)
    (tmp_path / "mute_tasks.py").write_text(TASKSET.replace('prompt=f"Say {word}."', "prompt=None"))
    (tmp_path / "boxed_tasks.py").write_text(
        TASKSET.replace("    @vf.metric", "    NEEDS_CONTAINER = True\n\n    @vf.metric")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    echo = {"_target_": "verifiers", "name": "echo_tasks"}
    user = {"model": "m", "client": {"type": "eval", "base_url": "http://127.0.0.1:9/v1"}}
    specs = [
        {**echo, "env": {"id": "best-of-n"}},
        {**echo, "env": {"id": "user-sim"}},
        "verifiers:mute_tasks",
        "verifiers:boxed_tasks",
        {**echo, "env": {"id": "user-sim", "user": user}},
    ]
    several, roles, mute, boxed = map(str, violations_in_process(specs, PYTHON))
    assert several == (
        "environment.env_class.name: must be played once in an episode; got 'echo_tasks'. "
        "Generator.n_samples_per_prompt says how often"
    )
    assert roles.startswith("environment.env_class.name: must be played by one model; got 'echo_tasks'. One role is")
    assert "assistant, user" in roles
    assert mute.startswith("environment.env_class.name: has tasks without a prompt")
    assert boxed.startswith("environment.env_class.name: must be one that its harness and its runtime can play")
    assert "NEEDS_CONTAINER" in boxed


@pytest.fixture
def another_model() -> Iterator[str]:
    """The URL of a model that asks for a dog, and is content with whatever follows."""
    said = iter(["Say dog, please.", "###DONE###"])

    class Model(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": next(said)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "1", "object": "chat.completion", "created": 0, "model": "user"}
            body = json.dumps({**head, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@needs_others
def test_the_user_is_played_by_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_model: str
) -> None:
    (tmp_path / "echo_tasks.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    user = {"model": "user", "client": {"type": "eval", "base_url": another_model}}
    spec = {"_target_": "verifiers", "name": "echo_tasks", "env": {"id": "user-sim", "user": user}}
    ((asked, (end,)),) = played(spec, [{"task": 1}], ["dog"])
    assert asked == "Say dog, please."
    assert (end.reward, end.done) == (2.0, True)


def test_a_tool_gets_the_arguments_that_the_model_wrote_or_the_model_is_told_what_is_wrong() -> None:
    called: list[Any] = []

    async def call_tool(name: str, arguments: dict[str, Any]) -> str:
        called.append((name, arguments))
        return "done"

    def result(written: str) -> Any:
        return asyncio.run(_result({"function": {"name": "add", "arguments": written}}, call_tool))

    assert (result('{"a": 1}'), result("")) == ("done", "done")
    assert called == [("add", {"a": 1}), ("add", {})]
    assert "resend the call with valid JSON" in result("{")
    assert "must be a JSON object" in result("[1]")
