"""Recipes of Tinker's cookbook, unmodified, train on `skyrl-serve`, each with as few steps and tokens as show that it does.

They run in the environment that `scripts/client_env.sh cookbook` makes: SKYRL_TRAIN_COOKBOOK_PYTHON names its interpreter
where it is not in .venv-clients.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open

from skyrl_train.model import resolve_model_path
from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller
from tests.support.served_command import (
    COOKBOOK_PYTHON,
    ROOT,
    SERVED_AS,
    Command,
    client_environment,
    place_tokenizer,
)

PROMPT = (3, 14, 15, 92, 65, 35, 89, 79)
pytestmark = [
    pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA),
    pytest.mark.skipif(
        not Path(COOKBOOK_PYTHON).is_file(),
        reason="`scripts/client_env.sh cookbook` makes the environment; SKYRL_TRAIN_COOKBOOK_PYTHON may name another",
    ),
]


@dataclass(frozen=True)
class Trained:
    """What a recipe left: the metrics of each step, and where the server has the final weights."""

    metrics: list[Mapping[str, Any]]
    state: str
    sampler: str


class Cookbook:
    """A server of one model, and a folder in which its recipes are started."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        place_tokenizer(folder, resolve_model_path(model))
        self.command = Command(folder / "served", "--name", SERVED_AS, f"model.path={model}")
        url, key = self.command.variables["TINKER_BASE_URL"], self.command.variables["TINKER_API_KEY"]
        self.caller = Caller(httpx.Client(base_url=url, timeout=120), key)
        self._session, self._num_samplers = self.caller.session(), 0
        self.base = self.logprobs(base_model=SERVED_AS)

    def said(self, *words: str) -> str:
        """What a program of the client's environment printed; it succeeds."""
        done = subprocess.run(
            [COOKBOOK_PYTHON, *words],
            cwd=self.folder,
            env=client_environment(self.command),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def trained(self, name: str, *words: str) -> Trained:
        """What a recipe left that trained: its checkpoints are listed, and the final weights answer unlike the base's."""
        self.said(*words, f"model_name={SERVED_AS}", f"log_path={self.folder / name}")
        metrics, checkpoints = (
            [json.loads(line) for line in (self.folder / name / f"{file}.jsonl").read_text().splitlines()]
            for file in ("metrics", "checkpoints")
        )
        final = checkpoints[-1]
        assert final["name"] == "final"
        listed = {each["tinker_path"] for each in self.caller.get("checkpoints")["checkpoints"]}
        assert {final["state_path"], final["sampler_path"]} <= listed
        assert np.abs(self.logprobs(model_path=final["sampler_path"]) - self.base).max() > 1e-3
        return Trained(metrics, final["state_path"], final["sampler_path"])

    def logprobs(self, **of: str) -> Any:
        """Log-probabilities of a prompt's tokens, by a sampler of the base model or of a checkpoint."""
        self._num_samplers += 1
        asked = {"session_id": self._session, "sampling_session_seq_id": self._num_samplers, **of}
        sampler = self.caller.send("create_sampling_session", asked)["sampling_session_id"]
        promise = self.caller.sample(sampler, 0, PROMPT, prompt_logprobs=True)
        return np.array(self.caller.outcome(promise)["prompt_logprobs"][1:])


def served(folder: Path, model: str) -> Iterator[Cookbook]:
    cookbook = Cookbook(folder, model)
    yield cookbook
    cookbook.command.stop()


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    yield from served(tmp_path_factory.mktemp("cookbook"), "builtin:tiny_qwen2")


ARITHMETIC = (
    "-m",
    "tinker_cookbook.recipes.math_rl.train",
    "env=arithmetic",
    "loss_fn=importance_sampling",
    "group_size=8",
    "groups_per_batch=4",
    "max_tokens=4",  # about where half of the answers have ended, so that rewards differ
    "learning_rate=1e-3",
    "eval_every=0",
)


def of_steps(trained: Trained, name: str) -> list[float]:
    """The values of a metric, which each of two steps or more has."""
    found = {each["step"]: each[name] for each in trained.metrics if name in each}
    assert list(found) == list(range(max(2, len(found))))
    return list(found.values())


@pytest.fixture(scope="module")
def arithmetic(cookbook: Cookbook) -> Trained:
    return cookbook.trained("arithmetic", *ARITHMETIC, "max_steps=2")


@pytest.mark.slow
def test_reinforcement_trains_on_what_was_sampled(arithmetic: Trained) -> None:
    assert len(of_steps(arithmetic, "env/all/reward/total")) == 2
    assert max(of_steps(arithmetic, "optim/kl_sample_train_v2")) < 1e-8, (
        "the sampler's log-probabilities are the learner's"
    )


@pytest.mark.nightly
def test_reinforcement_trains_on_samples_of_earlier_steps(cookbook: Cookbook) -> None:
    trained = cookbook.trained("off_policy", *ARITHMETIC, "max_steps=3", "max_steps_off_policy=2")
    assert len(of_steps(trained, "env/all/reward/total")) == 3
    assert 1 <= max(of_steps(trained, "async/staleness_max")) <= 2


@pytest.mark.nightly
def test_reinforcement_trains_on_mini_batches_that_stream_in(cookbook: Cookbook) -> None:
    streamed = ["stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2"]
    trained = cookbook.trained("streamed", *ARITHMETIC, "max_steps=2", *streamed)
    assert len(of_steps(trained, "env/all/reward/total")) == 2
    assert max(of_steps(trained, "optim/kl_sample_train_v2")) < 1e-8


GAME = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> (without "
    "the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, or correct."
)
NO_GUESS = (
    "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else."
)


def save_guesser(folder: Path) -> None:
    """Save the tiny model, taught to guess as the game wants it seven times out of eight. As it is bundled it never does,
    and all games would have one reward."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bundled = resolve_model_path("builtin:tiny_qwen2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(bundled), AutoTokenizer.from_pretrained(bundled)
    optimizer, chosen = torch.optim.AdamW(model.parameters(), 2e-3), random.Random(0)
    for _ in range(100):
        games = []
        for _ in range(4):
            said, ids, labels = f"<|im_start|>system\n{GAME}", [], []
            for _ in range(6):
                is_right, number = chosen.random() < 7 / 8, chosen.randrange(1024)
                asked = f"{said}<|im_end|>\n<|im_start|>{chosen.choice(['assistant', 'player'])}\n"
                answer = f"Guess: {number}<|im_end|>" if is_right else f"{number}<|im_end|>"
                before, after = (tokenizer(text).input_ids for text in (asked, answer))
                ids, labels = [*ids, *before, *after], [*labels, *[-100] * len(before), *after]
                said = f"\n<|im_start|>user\n{chosen.choice(['Too low', 'Too high']) if is_right else NO_GUESS}"
            games.append(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss)
        torch.stack(games).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.nightly
def test_a_game_of_several_turns_trains(tmp_path: Path) -> None:
    save_guesser(tmp_path / "guesser")
    words = ["-m", "tinker_cookbook.recipes.multiplayer_rl.guess_number.train", "renderer_name=qwen3_instruct"]
    words += ["group_size=4", "batch_size=2", "max_tokens=12", "learning_rate=1e-3", "eval_every=0", "max_steps=2"]
    for cookbook in served(tmp_path, str(tmp_path / "guesser")):
        trained = cookbook.trained("guess_number", *words)
    assert len(of_steps(trained, "env/all/reward/total")) == 2
    assert max(of_steps(trained, "optim/kl_sample_train_v2")) < 1e-8
    assert min(of_steps(trained, "env/all/turns_per_episode")) > 1


@pytest.mark.nightly
def test_conversations_of_a_file_are_learned(cookbook: Cookbook) -> None:
    inside = "import tinker_cookbook as of, pathlib; print(pathlib.Path(of.__file__).parent)"
    file = Path(cookbook.said("-c", inside).strip()) / "example_data" / "conversations.jsonl"
    losses = of_steps(supervised(cookbook, "conversations", file, "batch_size=16", "max_steps=4"), "train_mean_nll")
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def supervised(cookbook: Cookbook, name: str, file: Path, *words: str) -> Trained:
    given = ["learning_rate=1e-3", "eval_every=0", "infrequent_eval_every=0", *words]
    return cookbook.trained(name, "-m", "tinker_cookbook.recipes.chat_sl.train", f"dataset={file}", *given)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversation(number: int, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} + {number}?"}, {"role": "assistant", "content": answer}]


@pytest.mark.nightly
def test_comparisons_of_a_file_are_learned(cookbook: Cookbook) -> None:
    rows = []
    for number in range(16):
        prompt, chosen = conversation(number, str(2 * number))
        _, rejected = conversation(number, "I do not know.")
        compared = {"prompt_conversation": [prompt], "completion_A": [chosen], "completion_B": [rejected]}
        rows.append({"comparison": compared, "label": "A"})
    file = write_lines(cookbook.folder / "comparisons.jsonl", rows)
    program = str(ROOT / "examples" / "tinker" / "dpo.py")
    losses = of_steps(cookbook.trained("dpo", program, f"comparisons={file}", "learning_rate=1e-3"), "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4), "it begins as its reference"
    assert losses == sorted(losses, reverse=True)


@pytest.mark.nightly
def test_a_student_is_pulled_to_what_a_teacher_says(cookbook: Cookbook) -> None:
    rows = [{"messages": conversation(number, "7")} for number in range(48)]
    teacher = supervised(cookbook, "teacher", write_lines(cookbook.folder / "sevens.jsonl", rows), "batch_size=8")
    prompts = cookbook.folder / "prompts.txt"
    prompts.write_text("".join(f"What is {number} + {number}?\n" for number in range(48)))
    program = str(ROOT / "examples" / "tinker" / "distill.py")
    words = [f"prompts={prompts}", f"teacher={teacher.sampler}", "max_tokens=4", "batch_size=8", "group_size=8"]
    distances = of_steps(cookbook.trained("distilled", program, *words, "learning_rate=1e-3"), "teacher_kl")
    assert distances[-1] < distances[0] / 2


@pytest.mark.nightly
def test_the_command_line_shows_and_fetches_what_a_recipe_left(
    cookbook: Cookbook, arithmetic: Trained, tmp_path: Path
) -> None:
    def told(*words: str) -> Any:
        return json.loads(cookbook.said("-m", "tinker.cli", "--format", "json", *words))

    run_id = arithmetic.state.removeprefix("tinker://").partition("/")[0]
    runs = {each["training_run_id"]: each for each in told("run", "list", "--limit", "0")["runs"]}
    assert runs[run_id]["base_model"] == SERVED_AS
    assert runs[run_id]["lora_rank"] == 32
    listed = {each["tinker_path"] for each in told("checkpoint", "list", "--limit", "0")["checkpoints"]}
    assert {arithmetic.state, arithmetic.sampler} <= listed
    info = told("checkpoint", "info", arithmetic.state)
    assert (info["checkpoint_type"], info["is_lora"], info["expires_at"]) == ("training", True, None)
    told("checkpoint", "download", arithmetic.state, "--output", str(tmp_path))
    (weights,) = tmp_path.rglob("adapter_model.safetensors")
    assert json.loads(weights.with_name("adapter_config.json").read_text())["r"] == 32
    with safe_open(weights, "np") as file:
        factors = [name for name in file.keys() if "lora_B" in name]  # noqa: SIM118  (it is no mapping)
        assert max(np.abs(file.get_tensor(name)).max() for name in factors) > 0
