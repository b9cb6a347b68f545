"""The healthy runs that every plant begins with: a recipe in one of four settings, which differ in model, tokenizer, task,
seed, sizes, rate and lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from scripts.studies.diseases import models
from skyrl_train.data.tasks import Split, WordProblem

Settings = dict[str, Any]
Name = Literal["first", "second", "third", "fourth"]
Score = Callable[[str, str], Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the runs of one setting have in common."""

    name: Name
    models: Path
    """Where the models are that are made for it."""
    is_trial: bool = False
    """With other rows and draws than those that are counted: to see whether a healthy run of it is healthy."""

    @property
    def is_first(self) -> bool:
        return self.name == "first"

    def pick(self, first: Any, second: Any, third: Any, fourth: Any) -> Any:
        """Return a value of this setting."""
        return {"first": first, "second": second, "third": third, "fourth": fourth}[self.name]

    @property
    def seed(self) -> int:
        return int(self.pick(11, 7042, 530, 9176)) + 1000 * self.is_trial

    @property
    def start(self) -> str:
        """The model that reinforcement learning begins with."""
        return "builtin:tiny_qwen2" if self.is_first else models.trained_model(self.models / self.name, self.name)


def right(completion: str, answer: str) -> float:
    """1 for an answer whose last line is `#### TRUTH`."""
    return float(completion.rpartition("#### ")[2].strip() == answer)


def answered(completion: str, answer: str, error: Exception | None) -> float:
    """Return the reward, or raise what a service that does not answer raises: its name and place are in the record."""
    if error is not None:
        raise error
    return right(completion, answer)


@cache
def problems(name: Name, count: int, seed: int, split: Split) -> tuple[WordProblem, ...]:
    """Distinct problems of the setting's task, of one split."""
    rng, found = random.Random(seed), dict[str, WordProblem]()
    while len(found) < count:
        problem = models.KINDS[name].draw(rng)
        if problem.split is split:
            found.setdefault(problem.question, problem)
    return tuple(found.values())


def rows(setting: Setting, count: int, split: Split = Split.TRAIN) -> list[dict[str, Any]]:
    """Rows of one turn: `answer` is their truth, `solution` how it is found."""
    made = problems(setting.name, count, setting.seed + (split is not Split.TRAIN), split)
    return [{"prompt": each.question, "answer": str(each.answer), "solution": each.solution} for each in made]


def scored_by(score: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward whose name says nothing."""

    def reward(completion: str, answer: str) -> Any:
        return score(completion, answer)

    return reward


def base(setting: Setting) -> Settings:
    """Reinforcement learning of one turn."""
    pick = setting.pick
    return {
        "model.path": setting.start,
        "environment.reward": scored_by(right),
        "environment.max_failed_fraction": 1.0,
        "data.train": rows(setting, pick(200, 240, 210, 220)),
        "data.validation": rows(setting, pick(14, 16, 18, 17), Split.VALIDATION),
        "data.max_prompt_length": 192,
        "generator.sampling.max_generate_length": pick(40, 36, 44, 48),
        "generator.n_samples_per_prompt": pick(4, 3, 5, 4),
        "generator.max_turns": 1,
        "trainer.total_steps": pick(12, 13, 14, 15),
        "trainer.train_batch_size": pick(6, 8, 6, 8),
        "trainer.policy_mini_batch_size": pick(3, 4, 2, 4),
        "trainer.critic_mini_batch_size": pick(3, 4, 2, 4),
        "trainer.micro_train_batch_size_per_gpu": 48,
        "trainer.micro_forward_batch_size_per_gpu": 96,
        "trainer.eval_interval": pick(6, 7, 5, 5),
        "trainer.ckpt_interval": 0,
        "trainer.export_hf": False,
        "trainer.policy.optimizer.lr": pick(1e-4, 2e-4, 1.5e-4, 2e-4),
        "seed": setting.seed,
    }


def turns(setting: Setting) -> Settings:
    """Two turns in the environment of word problems."""
    settings = base(setting)
    for name in ("data.train", "data.validation"):
        settings[name] = [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "env_class": "word_problems",
                "reward_spec": {"ground_truth": row["answer"]},
            }
            for row in settings[name]
        ]
    del settings["environment.reward"]
    return {**settings, "environment.env_class": "word_problems", "generator.max_turns": 2}


def adapter(setting: Setting) -> Settings:
    """An adapter in place of the weights."""
    rate = setting.pick(2e-3, 3e-3, 2.5e-3, 2.25e-3)
    return {**base(setting), "model.lora.rank": setting.pick(16, 8, 12, 14), "trainer.policy.optimizer.lr": rate}


def critic(setting: Setting) -> Settings:
    """PPO: advantages from a critic."""
    return {**base(setting), "critic.optimizer.lr": setting.pick(3e-4, 5e-4, 4e-4, 4.5e-4)}


def curriculum(setting: Setting) -> Settings:
    """Prompts chosen by how often they are solved."""
    return {**base(setting), "data.curriculum.enabled": True}


def held_near(setting: Setting) -> Settings:
    """With a reference, and checkpoints that can be audited."""
    return {
        **base(setting),
        "trainer.algorithm.kl_loss_coef": setting.pick(0.02, 0.05, 0.03, 0.025),
        "trainer.ckpt_interval": setting.pick(5, 6, 4, 4),
    }


def calls(setting: Setting) -> Settings:
    """A tool that adds."""
    from scripts.studies.diseases import plants

    rng = random.Random(setting.seed)
    begin, end = models.KINDS[setting.name].call
    made = {}
    while len(made) < 500:
        conversation, total = models.sum_with_call(rng, begin, end)
        made[conversation[0]["content"]] = {"prompt": conversation[0]["content"], "answer": str(total)}
    every = list(made.values())
    return {
        **base(setting),
        "model.path": models.calling_model(setting.models / f"calling_{setting.name}", setting.name, setting.start),
        "data.train": every[:440],
        "data.validation": every[440:480],
        "environment.tools": [plants.add],
        "generator.max_turns": 2,
        "generator.sampling.max_generate_length": 80,
        "trainer.total_steps": setting.pick(8, 7, 9, 8),
    }


def supervised(setting: Setting) -> Settings:
    """Supervised training of a model that knows nothing yet."""
    made = rows(setting, setting.pick(800, 700, 750, 720))
    held = rows(setting, 24, Split.VALIDATION)
    return {
        "model.path": models.untrained_model(setting.models / f"untrained_{setting.name}", setting.name),
        "data.train": [{"prompt": row["prompt"], "completion": row["solution"]} for row in made],
        "data.validation": [{"prompt": row["prompt"], "completion": row["solution"]} for row in held],
        "data.cache": False,  # a plant changes what is kept
        "data.prompt_column": "prompt",
        "data.completion_column": "completion",
        "trainer.num_steps": setting.pick(60, 64, 66, 62),
        "trainer.batch_size": setting.pick(16, 16, 16, 16),
        "trainer.eval_interval": setting.pick(20, 16, 22, 18),
        "trainer.eval_samples": 8,
        "trainer.eval_sampling.max_generate_length": setting.pick(72, 80, 64, 80),
        "trainer.ckpt_interval": 0,
        "trainer.export": "none",
        "trainer.optimizer.lr": setting.pick(2e-3, 3e-3, 2.5e-3, 2.25e-3),
        "seed": setting.seed,
    }


def real_model(setting: Setting) -> Settings:
    """SmolLM2 of 135 million parameters, on sums, for a few steps. As it is asked here it solves about half of them, and one
    answer in eight is longer than the limit."""
    shown = "Add two numbers and write the sum. Examples:\n3 + 4 = 7\n10 + 2 = 12\n5 + 5 = 10\n8 + 1 = 9\nNow: "
    sums = [(left, other) for left in range(1, 10) for other in range(1, 10)]
    random.Random(setting.seed).shuffle(sums)
    every = [{"prompt": f"{shown}{left} + {other} = ?", "answer": str(left + other)} for left, other in sums]

    def last_number(completion: str, answer: str) -> float:
        words = completion.replace(".", " ").split()
        return float(bool(words) and words[-1] == answer)

    return {
        "environment.reward": scored_by(last_number),
        "environment.max_failed_fraction": 1.0,
        "data.train": every[:72],
        "data.validation": every[72:],
        "generator.n_samples_per_prompt": 4,
        "generator.sampling.max_generate_length": 32,
        "generator.sampling.temperature": 0.3,
        "trainer.total_steps": 5,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.critic_mini_batch_size": 4,
        "trainer.eval_interval": 5,
        "trainer.export_hf": False,
        "seed": setting.seed,
    }


RECIPES: dict[str, tuple[str, Callable[[Setting], Settings]]] = {
    "base": ("gsm8k_multiturn", base),
    "turns": ("gsm8k_multiturn", turns),
    "adapter": ("gsm8k_multiturn", adapter),
    "critic": ("ppo_critic", critic),
    "curriculum": ("gsm8k_multiturn", curriculum),
    "held_near": ("gsm8k_multiturn", held_near),
    "calls": ("gsm8k_multiturn", calls),
    "supervised": ("sft_gsm8k", supervised),
    "real_model": ("smollm2", real_model),
}
"""By name: the preset, and the settings beside it."""
VARIED: Sequence[str] = ("output_dir", "data.train", "data.validation", "environment.reward", "derived")
"""Settings that differ between runs of one recipe whatever is planted: paths and digests of rows and functions."""
