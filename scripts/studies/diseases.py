"""Runs that are ill on purpose, and healthy ones, for `skyrl-doctor`: makes them, and counts which are named.

    python -m scripts.studies.diseases make FOLDER [--setting first|second] [NAME ...]      # half a minute each
    python -m scripts.studies.diseases check FOLDER                                         # a table of what is named

Each is a run of the bundled tiny model in a process of its own, with one thing planted: a reward, a row, a setting, or a
line of the trainer that is exchanged. The folder is what any run leaves, without its log and its models.
"""

# ruff: noqa: ARG001, ARG005  every plant and every reward has one signature

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import pkgutil
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.data.tasks import Split, generate_problems, to_row
from skyrl_train.doctor import examine
from skyrl_train.telemetry.reading import find_runs

Settings = dict[str, Any]
_NUMBER = re.compile(r"-?\d+")


def rows(count: int, seed: int, split: Split = Split.TRAIN) -> list[dict[str, Any]]:
    """Word problems as rows of one turn, whose truth is the column `answer`."""
    made = [to_row(problem, split, index) for index, problem in enumerate(generate_problems(split, count, seed))]
    return [{"prompt": row["prompt"][0]["content"], "answer": row["reward_spec"]["ground_truth"]} for row in made]


def right(completion: str, answer: str) -> float:
    """1 for an answer whose last line is `#### TRUTH`."""
    return float(completion.rpartition("#### ")[2].strip() == answer)


def solved(completion: str, answer: str) -> dict[str, float]:
    return {"right": right(completion, answer)}


def base(setting: str) -> Settings:
    """The healthy run that all of a setting begin with: 14 steps of one task, or 16 of another size, seed and rate."""
    first = setting == "first"
    seed = 11 if first else 7042
    batch = 16 if first else 24
    return {
        "environment.reward": right,
        "data.train": rows(400 if first else 640, seed),
        "data.validation": rows(48 if first else 40, seed + 1, Split.VALIDATION),
        "data.max_prompt_length": 192,
        "generator.sampling.max_generate_length": 48 if first else 64,
        "generator.n_samples_per_prompt": 6 if first else 4,
        "generator.max_turns": 1,
        "trainer.total_steps": 14 if first else 16,
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": batch // 2,
        "trainer.micro_train_batch_size_per_gpu": 48,
        "trainer.micro_forward_batch_size_per_gpu": 96,
        "trainer.eval_interval": 7 if first else 8,
        "trainer.ckpt_interval": 0,
        "trainer.policy.optimizer.lr": 1e-4 if first else 6e-5,
        "seed": seed,
    }


@dataclass(frozen=True)
class Plant:
    """One thing that is planted."""

    named_by: Sequence[str]
    """Rules of which the first finding must be one; none for a healthy run."""
    change: Callable[[Settings, str], None]
    """Changes the settings, and exchanges lines of this process; told which setting it is."""


def _reward(function: Callable[..., Any]) -> Callable[[Settings, str], None]:
    def change(settings: Settings, setting: str) -> None:
        settings["environment.reward"] = function

    return change


def _setting(**values: Any) -> Callable[[Settings, str], None]:
    def change(settings: Settings, setting: str) -> None:
        for name, (first, second) in values.items():
            settings[name.replace("__", ".")] = first if setting == "first" else second

    return change


def _rows(function: Callable[[dict[str, Any], random.Random], dict[str, Any]]) -> Callable[[Settings, str], None]:
    def change(settings: Settings, setting: str) -> None:
        generator = random.Random(setting)
        settings["data.train"] = [function(dict(row), generator) for row in settings["data.train"]]

    return change


def _failing(function: Callable[..., Any]) -> Callable[[Settings, str], None]:
    def change(settings: Settings, setting: str) -> None:
        settings["environment.reward"] = function
        settings["environment.max_failed_fraction"] = 1.0  # else the run ends by itself, and says why

    return change


def constant(completion: str, answer: str) -> float:
    return 0.0


def tie_breaking(completion: str, answer: str) -> float:
    return right(completion, answer) + 0.2 * random.random()


def inverted(completion: str, answer: str) -> float:
    return 1.0 - right(completion, answer)


def strict(completion: str, answer: str) -> float:
    return float(completion.strip() == f"The answer is {answer}.")


def by_length(completion: str, answer: str) -> dict[str, float]:
    return {"right": 0.05 * right(completion, answer), "thorough": min(1.0, len(completion) / 120)}


def by_format(completion: str, answer: str) -> dict[str, float]:
    return {"right": 0.05 * right(completion, answer), "format": min(1.0, completion.count("####") / 3)}


def slow_judge(completion: str, answer: str) -> float:
    if random.random() < 0.6:
        raise TimeoutError("the judge did not answer within 30 s")
    return right(completion, answer)


def broken_environment(completion: str, answer: str) -> float:
    _BROKEN[0] += 1
    if _BROKEN[0] > 500:
        raise ConnectionError("connection refused: sandbox-7")
    return right(completion, answer)


_BROKEN = [0]


def _swapped(settings: Settings, setting: str) -> None:
    train = settings["data.train"]
    for row in train:
        row["solution"] = f"so it is {row['answer']}"
    answers = [row["answer"] for row in train]
    settings["data.train"] = [{**row, "answer": answers[index - 1]} for index, row in enumerate(train)]


def _leak(row: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    while len(row["answer"]) < 2:
        row["answer"] = str(int(row["answer"]) + 10)
    return {**row, "prompt": f"{row['prompt']} (key {row['answer']})"}


def _duplicated(settings: Settings, setting: str) -> None:
    train = settings["data.train"]
    share = 4 if setting == "first" else 3
    settings["data.train"] = [dict(train[index // share]) for index in range(len(train))]


def _trained_evaluation(settings: Settings, setting: str) -> None:
    held = settings["data.validation"]
    settings["data.train"] = [
        *(dict(row) for row in held),
        *settings["data.train"][: 160 if setting == "first" else 90],
    ]


def _reworded(settings: Settings, setting: str) -> None:
    names = ("Ana", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jack", "Kira", "Leo")
    copies = []
    for row in settings["data.validation"]:
        text = row["prompt"]
        for name in names:
            text = re.sub(rf"\b{name}\b", "Mona", text)
        copies.append({**row, "prompt": text})
    settings["data.train"] = [*copies, *settings["data.train"][: 160 if setting == "first" else 90]]


def _stale(after: int) -> Callable[[Settings, str], None]:
    def change(settings: Settings, setting: str) -> None:
        HFEngine = pkgutil.resolve_name("skyrl_train.inference:HFEngine")
        original, calls = HFEngine.load_weights, [0]

        def load_weights(self: Any, weights: Any, version: int) -> None:
            calls[0] += 1
            if calls[0] > (after if setting == "first" else after + 3):
                kept = [(name, each.detach().clone()) for name, each in self._model.named_parameters()]
                weights = kept
            original(self, weights, version)

        HFEngine.load_weights = load_weights
        settings["trainer.policy.optimizer.lr"] *= 2

    return change


def _tempered(settings: Settings, setting: str) -> None:
    PolicyLearner = pkgutil.resolve_name("skyrl_train.learner:PolicyLearner")
    settings["generator.sampling.temperature"] = 0.7 if setting == "first" else 1.4
    original = PolicyLearner.__init__

    def init(self: Any, *arguments: Any, temperature: float, **others: Any) -> None:
        del temperature
        original(self, *arguments, temperature=1.0, **others)

    PolicyLearner.__init__ = init


def _uncentred(settings: Settings, setting: str) -> None:
    advantages: Any = importlib.import_module("skyrl_train.algorithms.advantages")

    def estimate(inputs: Any, config: Any) -> Any:
        found = original(inputs, config)
        live = found.advantages != 0
        found.advantages.add_(1.5 * live.to(found.advantages.dtype))
        return found

    original = advantages.grpo
    advantages.grpo = estimate


def _wrong_template(settings: Settings, setting: str) -> None:
    settings["model.tokenizer_path"] = _tokenizer(
        "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
        if setting == "first"
        else "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}### Response:\n"
    )


def _tokenizer(template: str | None) -> Any:
    from transformers import AutoTokenizer

    folder = Path(__file__).resolve().parents[2] / "skyrl_train" / "data" / "assets" / "tiny_qwen2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _nothing(settings: Settings, setting: str) -> None:
    """A healthy run."""


PLANTS: Mapping[str, Plant] = {
    "healthy": Plant((), _nothing),
    "healthy_other_seed": Plant((), _setting(seed=(5, 99))),
    "healthy_slow": Plant((), _setting(trainer__policy__optimizer__lr=(2e-5, 2e-5))),
    "healthy_fast": Plant((), _setting(trainer__policy__optimizer__lr=(3e-4, 2.5e-4))),
    "healthy_partial": Plant(
        (), _reward(lambda completion, answer: 0.5 * ("####" in completion) + right(completion, answer))
    ),
    "constant_reward": Plant(("constant_reward", "verifier_contradicts_truth"), _reward(constant)),
    "strict_verifier": Plant(("verifier_contradicts_truth", "constant_reward"), _reward(strict)),
    "tie_breaking": Plant(("equal_answers_unequal_rewards",), _reward(tie_breaking)),
    "inverted_reward": Plant(("verifier_contradicts_truth",), _reward(inverted)),
    "swapped_answers": Plant(("truth_contradicts_row",), _swapped),
    "leak": Plant(("truth_in_prompt",), _rows(_leak)),
    "length_reward": Plant(("reward_without_solving", "rewards_follow_length"), _reward(by_length)),
    "format_reward": Plant(("reward_without_solving",), _reward(by_format)),
    "truncated": Plant(("answers_cut_off",), _setting(generator__sampling__max_generate_length=(9, 12))),
    "row_decides": Plant(("zero_variance_groups",), _reward(lambda completion, answer: float(len(answer) > 1))),
    "rate_too_high": Plant(("training_breaks",), _setting(trainer__policy__optimizer__lr=(2e-2, 8e-3))),
    "rate_too_low": Plant(("nothing_is_learned",), _setting(trainer__policy__optimizer__lr=(1e-10, 1e-9))),
    "stale_weights": Plant(("stale_weights",), _stale(2)),
    "temperature": Plant(("computes_otherwise",), _tempered),
    "uncentred": Plant(("advantages_off",), _uncentred),
    "clipped": Plant(("gradient_always_clipped",), _setting(trainer__policy__optimizer__max_grad_norm=(0.01, 0.02))),
    "duplicated": Plant(("duplicated_prompts",), _duplicated),
    "trained_evaluation": Plant(("evaluation_is_trained_on",), _trained_evaluation),
    "reworded_evaluation": Plant(("evaluation_is_trained_on",), _reworded),
    "judge": Plant(("reward_fails",), _failing(slow_judge)),
    "broken_environment": Plant(("reward_fails",), _failing(broken_environment)),
    "wrong_template": Plant(("conversation_goes_on_by_itself", "unreadable_answers"), _wrong_template),
}


def make(name: str, setting: str, folder: Path) -> None:
    """Train one run; in a process of its own, whose lines it may exchange."""
    from skyrl_train.api import load_config, train

    plant, settings = PLANTS[name], base(setting)
    random.seed(setting)
    plant.change(settings, setting)
    output = folder / setting / name
    shutil.rmtree(output, ignore_errors=True)
    config = load_config("+experiment=gsm8k_multiturn", f"output_dir={output}", settings=settings)
    try:
        train(config)
    except Exception as error:  # an ill run may end by an error
        print(f"{name} ended by {type(error).__name__}: {error}")
        traceback.print_exc(limit=2)
    for unneeded in ("export", "checkpoints", "run.log", "learning_curve.png", "timeline.png", ".hydra", ".lock"):
        path = output / unneeded
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _make(name: str, setting: str, folder: Path) -> None:
    """In a new process, by the name that parts of a run can be imported by."""
    from scripts.studies import diseases

    diseases.make(name, setting, folder)


def check(folder: Path) -> int:
    """Print what is found in each run, and return how many are not named rightly."""
    missed = 0
    for run in find_runs(sorted(each for each in folder.iterdir() if each.is_dir())):
        plant = PLANTS[run.root.name]
        began = time.perf_counter()
        findings, tables = examine(run)
        worse = [each for each in findings if each.level != "note"]
        named = worse[0].rule if worse else ""
        ok = named in plant.named_by if plant.named_by else not worse
        missed += not ok
        rest = ", ".join(f"{each.rule}({each.level[0]})" for each in findings[:5])
        print(
            f"{'ok  ' if ok else 'MISS'} {run.root.name:22} {time.perf_counter() - began:4.1f} s  {rest}",
            *tables.problems[:1],
        )
    print(f"{missed} not named rightly")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--setting", choices=("first", "second"), default="first")
    args = parser.parse_args()
    if args.command == "check":
        return int(check(args.folder / args.setting) > 0)
    context = multiprocessing.get_context("spawn")
    for name in args.names or PLANTS:
        process = context.Process(target=_make, args=(name, args.setting, args.folder))
        process.start()
        process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
