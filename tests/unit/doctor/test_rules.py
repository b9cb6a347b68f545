"""Rules of the doctor on folders that are written here: each names its own fault, and a healthy run has none."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from skyrl_train.config import Config
from skyrl_train.doctor import Finding, Tables, examine
from skyrl_train.doctor.all_rules import RULES
from skyrl_train.doctor.rules import answers
from skyrl_train.main_doctor import main
from skyrl_train.telemetry.reading import find_runs
from skyrl_train.telemetry.records import arrow_schema
from skyrl_train.trainers.checkpoints import flat_config, settings_of

STEPS, PROMPTS, SAMPLES = 16, 6, 4
Row = dict[str, Any]
Metrics = dict[str, Any]


class Folder:
    """A run that was never run: solved ever more often, with everything as it should be."""

    def __init__(self) -> None:
        generator = random.Random(3)
        self.settings: dict[str, Any] = {
            "trainer": {
                "max_staleness": 0,
                "algorithm": {"advantage_estimator": "grpo", "normalize_by_std": True},
                "policy": {"optimizer": {"max_grad_norm": 1.0}},
            },
            "critic": {"optimizer": {"max_grad_norm": 1.0}},
        }
        self.plan = {"batches_per_epoch": 40}
        self.metrics = [self._metrics(step) for step in range(1, STEPS + 1)]
        self.train = {step: self._rows(step, generator) for step in range(1, STEPS + 1)}
        self.eval = {8: self._rows(0, generator, purpose="eval"), 16: self._rows(0, generator, purpose="eval")}

    def _metrics(self, step: int) -> Metrics:
        share = 0.2 + 0.7 * step / STEPS
        return {
            "step": step,
            "reward/mean": share,
            "reward/std": (share * (1 - share)) ** 0.5,
            "env/solved": share,
            "group/zero_variance": 0.3,
            "response_length/mean": 20.0 + 0.1 * step,
            "stop/length": 0.01,
            "failures/fraction": 0.0,
            "policy/entropy": 0.8 - 0.03 * step,
            "policy/approx_kl": 0.003,
            "policy/clip_fraction": 0.02,
            "policy/grad_norm": 0.4 + 0.01 * (step % 3),
            "policy/lr": 1e-5,
            "mismatch/logprob_diff_mean": 2e-5,
            "mismatch/ratio_outside_10_percent": 0.0,
            "timing/step": 2.0,
            "timing/generate": 1.2,
            "timing/engine/busy": 1.0,
            "batch/tokens": 2000.0,
        }

    def _rows(self, step: int, generator: random.Random, purpose: str = "train") -> list[Row]:
        rows = []
        for prompt in range(PROMPTS):
            left, right = generator.randint(10, 99), generator.randint(10, 99)
            name = ("Tom", "Ann", "Eva")[prompt % 3]
            question = f"{name} counts {left} birds and {right} fish at {purpose} pond {step}. How many?"
            solved = [generator.random() < 0.2 + 0.7 * step / STEPS for _ in range(SAMPLES - 2)]
            for sample, is_right in enumerate([*solved, True, False]):
                answer = left + right if is_right else left + right + generator.randint(1, 9)
                rows.append(row(step, f"{purpose}-{step}-{prompt}", sample, question, answer, left + right, generator))
        deviation = {
            uid: np.std([each["reward"] for each in rows if each["uid"] == uid]) for uid in {r["uid"] for r in rows}
        }
        for each in rows:
            mean = np.mean([one["reward"] for one in rows if one["uid"] == each["uid"]])
            advantage = (each["reward"] - mean) / (deviation[each["uid"]] + 1e-6)
            each["advantages"] = [float(advantage)] * len(each["response_token_ids"])
        return rows

    def each_row(self) -> Iterator[Row]:
        for rows in self.train.values():
            yield from rows

    def set_metric(self, name: str, value: Callable[[int], float | None]) -> None:
        for record in self.metrics:
            record[name] = value(record["step"])

    def write(self, root: Path) -> Path:
        (root / "rollouts").mkdir(parents=True)
        (root / "config.yaml").write_text(yaml.safe_dump(self.settings))
        (root / "plan.json").write_text(json.dumps(self.plan))
        (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.metrics))
        for purpose, files in (("train", self.train), ("eval", self.eval)):
            for step, rows in files.items():
                table = pa.Table.from_pylist(rows, schema=arrow_schema())
                pq.write_table(table, root / "rollouts" / f"{purpose}_step_{step:06d}.parquet")
        return root


def row(step: int, uid: str, sample: int, question: str, answer: int, truth: int, generator: random.Random) -> Row:
    ids = [generator.randint(10, 400) for _ in range(20)]
    reward = float(answer == truth)
    return {
        "global_step": step,
        "uid": uid,
        "sample": sample,
        "turn": 0,
        "num_turns": 1,
        "outcome": "done",
        "trajectory_reward": reward,
        "reward": reward,
        "prompt": json.dumps([{"role": "user", "content": question}]),
        "extras": json.dumps({"answer": str(truth)}),
        "metrics": json.dumps({"solved": reward}),
        "rewards": "{}",
        "text": f"{generator.choice(['So', 'Thus', 'Then'])} in all #### {answer}",
        "stop_reason": "stop",
        "response_token_ids": ids,
        "logprobs": [-0.3 - 0.01 * index for index in range(20)],
        "policy_logprobs": [-0.3 - 0.01 * index + 1e-5 for index in range(20)],
        "advantages": None,
    }


def examined(folder: Folder, root: Path) -> tuple[list[Finding], Tables]:
    (run,) = find_runs([folder.write(root / "run")])
    return examine(run)


def _constant(folder: Folder) -> None:
    folder.set_metric("reward/mean", lambda _: 0.0)
    folder.set_metric("reward/std", lambda _: 0.0)
    folder.set_metric("group/zero_variance", lambda _: 1.0)
    for each in folder.each_row():
        each.update(trajectory_reward=0.0, extras="{}")


def _no_spread(folder: Folder) -> None:
    folder.set_metric("group/zero_variance", lambda step: 0.3 if step < 5 else 0.95)
    folder.set_metric("reward/mean", lambda _: 0.1)


def _refuses(folder: Folder) -> None:
    for each in folder.each_row():
        each["trajectory_reward"] = 1.0 - each["trajectory_reward"]


def _ties(folder: Folder) -> None:
    for index, each in enumerate(folder.each_row()):
        each.update(text="all 7", extras="{}", trajectory_reward=each["trajectory_reward"] + 0.01 * (index % 5))


def _other_truths(folder: Folder) -> None:
    for each in folder.each_row():
        truth = json.loads(each["extras"])["answer"]
        each["extras"] = json.dumps({"ground_truth": truth, "solution": f"it is, after all, {int(truth) + 1000}"})


def _leaks(folder: Folder) -> None:
    for each in folder.each_row():
        message = json.loads(each["prompt"])[0]
        message["content"] += f" Hint: {json.loads(each['extras'])['answer']}"
        each["prompt"] = json.dumps([message])


def _pays_format(folder: Folder) -> None:
    folder.set_metric("env/solved", lambda _: 0.2)


def _pays_length(folder: Folder) -> None:
    folder.set_metric("response_length/mean", lambda step: 20.0 + 4 * step)
    for index, each in enumerate(folder.each_row()):
        length = 10 + 5 * (index % SAMPLES)
        each.update(response_token_ids=list(range(10, 10 + length)), text="word " * length, extras="{}")
        each["trajectory_reward"] = float(length)
        each.update(logprobs=None, policy_logprobs=None, advantages=None)


def _fails(folder: Folder) -> None:
    folder.set_metric("failures/fraction", lambda step: 0.0 if step < 6 else 0.6)
    for each in folder.each_row():
        if each["global_step"] >= 6 and each["sample"] < 2:
            each.update(failure_kind="reward_timeout", failure_message="the judge took more than 30 s")


def _cuts(folder: Folder) -> None:
    folder.set_metric("stop/length", lambda _: 0.6)
    for each in folder.each_row():
        each["stop_reason"] = "length"


def _marks(folder: Folder) -> None:
    for each in folder.each_row():
        each["text"] = f"{each['text']}<|im_start|>user\nand now?"


def _shrinks(folder: Folder) -> None:
    folder.set_metric("response_length/mean", lambda step: 40.0 / step)
    folder.set_metric("reward/mean", lambda _: 0.3)


def _repeats(folder: Folder) -> None:
    for each in folder.each_row():
        if each["global_step"] > 6:
            each["response_token_ids"] = [5, 6] * 10


def _guesses(folder: Folder) -> None:
    for each in folder.each_row():
        each["logprobs"] = [-5.0] * 20


def _answers_others(folder: Folder) -> None:
    generator = random.Random(5)
    for each in folder.each_row():
        numbers = [str(generator.randint(10, 99)) for _ in range(24)]
        each.update(text=f"{' + '.join(numbers)} #### {generator.randint(10, 99)}", trajectory_reward=0.0)


def _calls(folder: Folder) -> None:
    for each in folder.each_row():
        each.update(text=f'<tool_call>{{"name": "add{each["sample"]}"}}</tool_call>', tools='[{"name": "add"}]')


def _collapses(folder: Folder) -> None:
    folder.set_metric("policy/entropy", lambda step: 0.8 if step < 5 else 0.01)
    folder.set_metric("reward/mean", lambda _: 0.3)


def _copies(folder: Folder) -> None:
    for each in folder.each_row():
        each["prompt"] = json.dumps([{"role": "user", "content": f"question {each['uid'][-1]}"}])


def _again(folder: Folder) -> None:
    for step in (10, 11, 12):
        folder.train[step] = [{**each, "global_step": step} for each in folder.train[step - 9]]


def _few(folder: Folder) -> None:
    for step in range(9, STEPS + 1):
        for each in folder.train[step]:
            each["uid"] = f"train-{step % 2}-{each['uid'][-1]}"
    folder.plan["batches_per_epoch"] = 1000
    folder.set_metric("curriculum/new_fraction", lambda _: 0.0)


def _trains_on_held_out(folder: Folder) -> None:
    held = [each["prompt"] for each in folder.eval[8]]
    for each, prompt in zip(folder.train[3], held):
        each["prompt"] = prompt


def _learns_nothing(folder: Folder) -> None:
    folder.set_metric("reward/mean", lambda step: 0.3 + 0.01 * (step % 2))
    folder.set_metric("env/solved", lambda step: 0.3 + 0.01 * (step % 2))
    folder.set_metric("policy/entropy", lambda _: 0.8)
    folder.set_metric("policy/approx_kl", lambda _: 1e-9)


def _not_finite(folder: Folder) -> None:
    folder.metrics[7]["loss/policy"] = None


def _breaks(folder: Folder) -> None:
    folder.set_metric("reward/mean", lambda step: 0.7 if step < 6 else 0.0)
    folder.set_metric("policy/approx_kl", lambda step: 0.01 if step < 6 else 2.0)


def _clips(folder: Folder) -> None:
    folder.set_metric("policy/grad_norm", lambda _: 25.0)


def _not_centred(folder: Folder) -> None:
    for each in folder.each_row():
        each["advantages"] = [value + 2 for value in each["advantages"]]


def _not_divided(folder: Folder) -> None:
    for each in folder.each_row():
        each["advantages"] = [value * 0.1 for value in each["advantages"]]


def _diverges(folder: Folder) -> None:
    folder.set_metric("critic/value_loss", lambda step: 0.1 * 2**step)
    folder.set_metric("critic/explained_variance", lambda step: -float(step))


def _dead(folder: Folder) -> None:
    folder.set_metric("critic/value_loss", lambda _: 0.2)
    folder.set_metric("critic/explained_variance", lambda _: 0.0)
    folder.set_metric("critic/value", lambda _: 0.1)


def _overfits(folder: Folder) -> None:
    folder.set_metric("eval/loss", lambda step: 1.0 + 0.05 * abs(step - 6))
    folder.set_metric("train/loss", lambda step: 1.0 / step)


def _stale(folder: Folder) -> None:
    folder.set_metric("mismatch/logprob_diff_mean", lambda step: 2e-5 if step < 4 else 0.01 * step)


def _one_behind(folder: Folder) -> None:
    for each in folder.each_row():
        if each["sample"] == 1:
            each["policy_logprobs"] = [value - 0.4 for value in each["logprobs"]]


def _tempered(folder: Folder) -> None:
    folder.set_metric("mismatch/logprob_diff_mean", lambda _: 0.08)
    for each in folder.each_row():
        each["policy_logprobs"] = [1.4 * value for value in each["logprobs"]]


def _too_old(folder: Folder) -> None:
    folder.set_metric("off_policy/age/max", lambda step: float(step > 3) * 2)


def _waits(folder: Folder) -> None:
    folder.set_metric("timing/generate", lambda _: 9.0)


def _slows(folder: Folder) -> None:
    folder.metrics = [{**folder.metrics[0], "step": step} for step in range(1, 31)]
    folder.set_metric("timing/step", lambda step: 1.0 + 0.3 * step)


def _grows(folder: Folder) -> None:
    folder.set_metric("memory/policy_peak_gib", lambda step: 4.0 + 0.3 * step)


def _more_tokens(folder: Folder) -> None:
    for record in folder.metrics:
        own = folder.train[record["step"]]
        tokens = sum(len(each["response_token_ids"]) for each in own)
        record.update({"batch/trained_tokens": float(tokens + len(own)), "total/trajectories": float(len(own))})


def _says_nothing(folder: Folder) -> None:
    folder.set_metric("env/invalid_actions", lambda step: 0.3 * step)


def _never_ends(folder: Folder) -> None:
    folder.set_metric("train/loss", lambda step: 1.0 / step)


FAULTS: dict[str, Callable[[Folder], None]] = {
    "constant_reward": _constant,
    "zero_variance_groups": _no_spread,
    "verifier_contradicts_truth": _refuses,
    "equal_answers_unequal_rewards": _ties,
    "truth_contradicts_row": _other_truths,
    "truth_in_prompt": _leaks,
    "silence_pays": _says_nothing,
    "reward_without_solving": _pays_format,
    "rewards_follow_length": _pays_length,
    "reward_fails": _fails,
    "answers_cut_off": _cuts,
    "conversation_goes_on_by_itself": _marks,
    "length_changes": _shrinks,
    "repetition": _repeats,
    "unreadable_answers": _guesses,
    "questions_not_read": _answers_others,
    "calls_not_read": _calls,
    "entropy_collapses": _collapses,
    "tokens_trained": _more_tokens,
    "duplicated_prompts": _copies,
    "order_repeats": _again,
    "few_prompts_again": _few,
    "evaluation_is_trained_on": _trains_on_held_out,
    "nothing_is_learned": _learns_nothing,
    "not_finite": _not_finite,
    "training_breaks": _breaks,
    "gradient_always_clipped": _clips,
    "advantages_off": _not_centred,
    "critic_diverges": _diverges,
    "critic_is_dead": _dead,
    "held_out_gets_worse": _overfits,
    "stale_weights": _stale,
    "one_engine_behind": _one_behind,
    "computes_otherwise": _tempered,
    "too_old": _too_old,
    "one_group_is_waited_for": _waits,
    "steps_get_slower": _slows,
    "memory_grows": _grows,
}


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    findings, tables = examined(Folder(), tmp_path)
    assert (findings, tables.problems) == ([], [])


@pytest.mark.parametrize("rule", FAULTS)
def test_each_fault_is_named_with_its_step_rows_and_remedy(rule: str, tmp_path: Path) -> None:
    folder = Folder()
    FAULTS[rule](folder)
    findings, tables = examined(folder, tmp_path)
    assert tables.problems == []
    own = [each for each in findings if each.rule == rule]
    assert own, f"found {[each.rule for each in findings]}"
    assert all(each.what and each.remedy and 0 < each.certainty <= 1 for each in own)
    first = findings[0]
    assert first.rule == rule or any(each.follows_from == first.rule for each in own), f"first is {first.rule}"


def _pays_the_wrong_one(folder: Folder) -> None:
    for each in folder.each_row():
        if each["sample"] == SAMPLES - 1 and each["uid"].endswith("-0"):  # which is wrong
            each["trajectory_reward"] = 1.5


def _asks_known_and_new(folder: Folder) -> None:
    _few(folder)
    folder.set_metric("curriculum/new_fraction", lambda _: 0.25)


def _says_how_old(folder: Folder) -> None:
    _one_behind(folder)
    folder.settings["trainer"]["max_staleness"] = 1
    folder.set_metric("off_policy/age/max", lambda _: 1.0)


def _entropy_for_nothing(folder: Folder) -> None:
    folder.set_metric("policy/entropy", lambda step: 0.8 if step < 5 else 0.35)
    folder.set_metric("reward/mean", lambda step: 0.5 if step < 6 else 0.3)


def _entropy_for_reward(folder: Folder) -> None:
    folder.set_metric("policy/entropy", lambda step: 0.8 if step < 5 else 0.35)
    folder.set_metric("reward/mean", lambda step: 0.2 if step < 6 else 0.4)


def _values_out_of_bounds(folder: Folder) -> None:
    folder.set_metric("critic/value_loss", lambda _: 2.0)
    folder.set_metric("critic/value", lambda step: 2.5 if 3 <= step < 8 else 0.5)
    folder.set_metric("critic/explained_variance", lambda _: -0.3)


def _constant_and_half_cut_off(folder: Folder) -> None:
    _constant(folder)
    _cuts(folder)
    for each in folder.each_row():
        each["stop_reason"] = "length" if each["sample"] % 2 else "stop"


def _constant_and_all_cut_off(folder: Folder) -> None:
    _constant(folder)
    _cuts(folder)


def _all_wrong_at_last(folder: Folder) -> None:
    folder.set_metric("group/zero_variance", lambda step: 0.3 if step < 6 else 1.0)
    folder.set_metric("reward/mean", lambda step: 0.3 if step < 6 else 0.0)


def _all_right_at_last(folder: Folder) -> None:
    folder.set_metric("group/zero_variance", lambda step: 0.3 if step < 6 else 1.0)
    folder.set_metric("reward/mean", lambda step: 0.3 if step < 6 else 1.0)


def _one_step_cut_off(folder: Folder) -> None:
    """A step that cuts nothing off has no such metric."""
    for record in folder.metrics:
        del record["stop/length"]
    folder.metrics[2]["stop/length"] = folder.metrics[4]["stop/length"] = 0.5


def _grows_to_the_limit(folder: Folder) -> None:
    folder.set_metric("response_length/mean", lambda step: min(40.0, 18.0 + 3 * step))
    folder.set_metric("stop/length", lambda step: 0.1 if step < 6 else 0.95)
    folder.set_metric("reward/mean", lambda _: 0.3)


def _copies_of_which_few_are_asked(folder: Folder) -> None:
    """One prompt in six has the text of another, of two fifths of an epoch."""
    shared = {f"train-{step}-{prompt}" for step in range(1, STEPS + 1, 2) for prompt in (0, 1, 2)}
    for each in folder.each_row():
        if each["uid"] in shared:
            each["prompt"] = json.dumps([{"role": "user", "content": f"question of step {each['global_step']}"}])
            each["extras"] = "{}"


def _new_critic(folder: Folder) -> None:
    folder.set_metric("critic/value_loss", lambda _: 0.2)
    folder.set_metric("critic/explained_variance", lambda _: 0.01)
    folder.set_metric("critic/value", lambda step: 0.1 + 0.02 * step)


def _rounded_head(folder: Folder) -> None:
    folder.settings["model"] = {"dtype": "float32"}
    folder.set_metric("mismatch/logprob_diff_mean", lambda _: 5e-4)


def _asked_by_a_foreign_template(folder: Folder) -> None:
    """Words of the question are repeated, and its end token is not the one that ends answers."""
    generator = random.Random(5)
    for each in folder.each_row():
        words = json.loads(each["prompt"])[0]["content"].replace(".", "").replace("?", "")
        each.update(text=f"{words} 11 22 33 #### {generator.randint(10, 99)}", trajectory_reward=0.0)
        each.update(
            added_token_ids=[generator.randint(10, 400), 5], response_token_ids=[*each["response_token_ids"][1:], 2]
        )


@pytest.mark.parametrize(
    ("fault", "rule", "level"),
    [
        (_grows_to_the_limit, "length_changes", "problem"),
        (_copies_of_which_few_are_asked, "duplicated_prompts", "problem"),
        (_new_critic, "critic_is_dead", "note"),
        (_rounded_head, "computes_otherwise", "warning"),
        (_asked_by_a_foreign_template, "questions_not_read", "problem"),
        (_pays_the_wrong_one, "reward_without_solving", "problem"),
        (_asks_known_and_new, "", ""),
        (_says_how_old, "", ""),
        (_entropy_for_nothing, "entropy_collapses", "problem"),
        (_entropy_for_reward, "", ""),
        (_values_out_of_bounds, "critic_diverges", "problem"),
        (_constant_and_half_cut_off, "constant_reward", "problem"),
        (_constant_and_all_cut_off, "answers_cut_off", "problem"),
        (_all_wrong_at_last, "zero_variance_groups", "problem"),
        (_all_right_at_last, "zero_variance_groups", "note"),
        (_one_step_cut_off, "", ""),
    ],
)
def test_what_looks_like_another_fault_is_told_from_it(
    fault: Callable[[Folder], None], rule: str, level: str, tmp_path: Path
) -> None:
    folder = Folder()
    fault(folder)
    findings, tables = examined(folder, tmp_path)
    assert tables.problems == []
    assert [(each.rule, each.level) for each in findings[:1]] == ([(rule, level)] if rule else [])


def test_every_rule_is_tried_here() -> None:
    assert set(FAULTS) | {"never_ends"} == set(RULES)


def test_advantages_that_are_not_divided_are_named(tmp_path: Path) -> None:
    folder = Folder()
    _not_divided(folder)
    (finding,) = examined(folder, tmp_path)[0]
    assert (finding.rule, "deviation 0.1" in finding.what) == ("advantages_off", True)


def test_an_engine_that_is_behind_is_named_where_half_of_the_rows_were_not_scored(tmp_path: Path) -> None:
    folder = Folder()
    _one_behind(folder)
    for number, each in enumerate(folder.each_row()):
        if number // SAMPLES % 2:
            each["policy_logprobs"] = None
    assert examined(folder, tmp_path)[0][0].rule == "one_engine_behind"


def test_answers_of_a_supervised_run_that_never_end_are_named(tmp_path: Path) -> None:
    folder = Folder()
    folder.train, folder.eval = {}, {}
    folder.metrics = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 9)]
    root = folder.write(tmp_path / "run")
    (root / "samples").mkdir()
    lines = [
        {"set": "held", "example": n, "prompt": "2+2?", "answer": "4 4 4 4 4", "expected": "4", "stop_reason": "length"}
        for n in range(6)
    ]
    ended = [{**line, "stop_reason": "stop", "answer": "4"} for line in lines]

    def level(step: int, answers: list[dict[str, object]]) -> list[str]:
        """Of what is found with one evaluation more."""
        (root / "samples" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in answers))
        (run,) = find_runs([root])
        assert {each.rule for each in examine(run)[0]} <= {"never_ends"}
        return [each.level for each in examine(run)[0]]

    assert level(0, lines) == []  # of a model that was not trained yet
    assert level(4, lines) == ["note"]
    assert level(8, lines) == ["problem"]
    assert level(8, [*lines[:5], ended[0]]) == []  # it learns to


def test_the_token_that_ends_an_answer_is_no_mark_of_a_conversation(tmp_path: Path) -> None:
    folder = Folder()
    for each in folder.each_row():
        each["text"] += "<|im_end|>"
    assert examined(folder, tmp_path / "ends")[0] == []
    for each in folder.each_row():
        each["text"] += "\n<|im_start|>user\nmore<|im_end|>"
    findings, _ = examined(folder, tmp_path / "goes on")
    assert findings[0].rule == "conversation_goes_on_by_itself"
    assert findings[0].evidence[0].startswith("'<|im_")


def test_what_follows_from_another_finding_stands_behind_it(tmp_path: Path) -> None:
    folder = Folder()
    _refuses(folder)
    folder.set_metric("group/zero_variance", lambda _: 1.0)
    folder.set_metric("reward/mean", lambda _: 0.1)
    first, *others = examined(folder, tmp_path)[0]
    assert first.rule == "verifier_contradicts_truth"
    assert {each.rule: each.follows_from for each in others}["zero_variance_groups"] == first.rule


def test_the_command_tells_what_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder()
    _cuts(folder)
    root = str(folder.write(tmp_path / "run"))
    assert main([root]) == 1
    text = capsys.readouterr().out
    assert "1. problem" in text
    assert "60% of the answers" in text
    assert "do: Raise generator.sampling.max_generate_length" in text
    assert main([root, "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert [each["rule"] for each in told["findings"]] == ["answers_cut_off"]
    assert told["findings"][0]["rows"][0]["uid"] == "train-1-0"


def test_a_healthy_run_ends_with_0_and_a_missing_one_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(Folder().write(tmp_path / "run"))]) == 0
    assert "nothing is found to be wrong" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


def own_rule(run: Tables) -> Iterator[Finding]:
    """Rewards are too good."""
    if run.series("reward/mean").last() > 0.5:
        yield Finding(what="too good", evidence=(), remedy="doubt it", level="warning")


def broken_rule(run: Tables) -> Iterator[Finding]:
    raise KeyError("no such table")


def test_a_rule_of_ones_own_is_asked_and_one_that_fails_silences_no_other(tmp_path: Path, capsys: Any) -> None:
    root = str(Folder().write(tmp_path / "run"))
    assert main([root, "--rule", f"{__name__}:own_rule", "--rule", f"{__name__}:broken_rule"]) == 1
    text = capsys.readouterr().out
    assert "too good" in text
    assert f"rule {__name__}:broken_rule failed: KeyError" in text
    assert main([root, "--rule", "nowhere:rule"]) == 2


def test_torn_files_are_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = Folder()
    _cuts(folder)
    root = folder.write(tmp_path / "run")
    torn = root / "rollouts" / "train_step_000003.parquet"
    torn.write_bytes(torn.read_bytes()[:200])
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "reward/me')
    (run,) = find_runs([root])
    findings, tables = examine(run)
    assert findings[0].rule == "answers_cut_off"
    assert any("train_step_000003.parquet" in problem for problem in tables.problems)


@pytest.mark.parametrize("kind", ["trl", "verl"])
def test_dumps_of_other_trainers_are_read(kind: str, tmp_path: Path) -> None:
    for step in range(1, 6):
        records = [
            {"prompt": f"{prompt}?", "completion": f"all {prompt}", "reward": 0.0}
            for prompt in range(4)
            for _ in range(4)
        ]
        if kind == "trl":
            (tmp_path / "completions").mkdir(exist_ok=True)
            table = pa.Table.from_pylist([{"step": step, **each} for each in records])
            pq.write_table(table, tmp_path / "completions" / f"completions_{step:05d}.parquet")
        else:
            lines = [
                {"input": each["prompt"], "output": each["completion"], "score": 0.0, "step": step} for each in records
            ]
            (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = find_runs([tmp_path])
    findings, _ = examine(run)
    assert findings[0].rule == "constant_reward"
    assert findings[0].since == 1


def test_every_setting_that_a_remedy_names_is_one() -> None:
    rules = Path(answers.__file__).parent
    known = set(flat_config(settings_of(Config())))
    known |= {name.rsplit(".", depth)[0] for name in known for depth in (1, 2)}
    named = {
        name
        for path in rules.glob("*.py")
        for name in re.findall(r"\b(?:trainer|generator|environment|critic|data|model)(?:\.[a-z_]+)+", path.read_text())
        if not name.removeprefix("data.").startswith(tuple(RULES))
    }
    assert len(named) > 15
    assert [name for name in sorted(named) if name not in known and f"{name}.path" not in known] == []
