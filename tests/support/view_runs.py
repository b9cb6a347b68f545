"""Folders of runs that never ran, for the viewer's tests and timings: rollouts as Parquet, records, logs, configuration.

    python tests/support/view_runs.py FOLDER [--turns 100000] [--steps 40] [--seed 0]

Rewards rise over the steps, some trajectories fail, some fork, and some texts are as hostile as a model may write them.
The files are written with plain pyarrow, by the columns that docs/viewer.md names, not by the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).resolve().parents[2] / "skyrl_train" / "data" / "assets" / "tiny_qwen2" / "tokenizer.json"
LONGEST_CELL = 4000

_WORD = pa.dictionary(pa.int32(), pa.string())
_FLOATS, _INTS = pa.list_(pa.float32()), pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("global_step", pa.int32()),
        ("purpose", _WORD),
        ("uid", _WORD),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        ("parent", pa.int32()),
        ("num_turns", pa.int32()),
        ("outcome", _WORD),
        ("failure_kind", _WORD),
        ("failure_message", pa.string()),
        ("failure_turn", pa.int32()),
        ("error", pa.string()),
        ("trajectory_reward", pa.float64()),
        ("reward", pa.float64()),
        *((name, pa.string()) for name in ("rewards", "metrics", "extras", "prompt", "tools", "first_messages")),
        ("observations", pa.string()),
        ("tool_calls", pa.string()),
        ("greedy_reward", pa.float64()),
        ("env_class", _WORD),
        ("dataset", _WORD),
        ("text", pa.string()),
        ("stop_reason", _WORD),
        ("versions", pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int32())]))),
        ("added_token_ids", _INTS),
        ("response_token_ids", _INTS),
        ("logprobs", _FLOATS),
        ("loss_mask", pa.list_(pa.bool_())),
        ("advantages", _FLOATS),
        ("policy_logprobs", _FLOATS),
        ("entropies", _FLOATS),
    ],
    metadata={"skyrl_train": json.dumps({"format": 1, "bfloat16": []})},
)
PLAIN = ("3*4=12\n12+18=30\n#### 30", "#### 15", "I add both: 8+9=17.\n#### 17", "Let me think.\n6*7=42\n#### 42")
HOSTILE = (
    "<script>window.pwned=1</script>#### 1",
    "<img src=x onerror='window.pwned=1'></script><script>window.pwned=1</script>",
    "\u202eright to left\u202c \U0001f600 \x00 nul & <b>bold</b> javascript:window.pwned=1",
    "a long line " * 400,
)
FAILURES = (
    ("environment_error", "ValueError: unknown city '<script>window.pwned=1</script>'"),
    ("engine_timeout", "no answer in 60 s"),
)


def write_run(
    folder: Path,
    *,
    steps: int = 3,
    prompts: int = 4,
    samples: int = 4,
    turns: int = 2,
    eval_every: int = 2,
    failures: bool = True,
    trees: bool = True,
    hostile: bool = True,
    complete: bool = True,
    seed: int = 0,
) -> Path:
    """Write the folder of a run of `steps` steps with `prompts * samples` trajectories of up to `turns` turns each; with
    `failures`, step 2 has a rollout file of its failed first try, too."""
    maker = _Maker(prompts, samples, turns, failures=failures, trees=trees, hostile=hostile, seed=seed)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    _write_settings(folder, steps=steps, prompts=prompts, samples=samples, turns=turns, seed=seed)
    for step in range(steps + 1):
        if step:
            maker.write(folder, "train", step)
        if eval_every and step % eval_every == 0:
            maker.write(folder, "eval", step)
    if failures and steps > 1:
        maker.write(folder, "failed", 2)
    append_records(folder, range(steps + 1), eval_every=eval_every, num_trajectories=prompts * samples, seed=seed)
    _write_log(folder, failures=failures)
    if complete:
        (folder / "complete.json").write_text(json.dumps({"global_step": steps}))
    return folder


def append_records(
    folder: Path, steps: Sequence[int], *, eval_every: int = 2, num_trajectories: int = 16, seed: int = 0
) -> None:
    """Append what a run writes of each of these steps: a line of metrics and one of the timeline."""
    with (folder / "metrics.jsonl").open("a") as metrics, (folder / "timeline.jsonl").open("a") as timeline:
        for step in steps:
            rng = np.random.default_rng([seed, step])
            generate, update = float(rng.uniform(1, 2)), float(rng.uniform(0.5, 1.5))
            record: dict[str, Any] = {"step": step, "timing/step": generate + update + 0.1, "timing/other": 0.1}
            if eval_every and step % eval_every == 0:
                record |= {"eval/accuracy": _solve_rate(step), "eval/reward_mean": _solve_rate(step)}
            if step:
                record |= _step_metrics(step, rng, num_trajectories)
                record |= {"timing/generate": generate, "timing/update": update, "timing/wait/environments": 0.3}
            metrics.write(json.dumps(record, sort_keys=True) + "\n")
            line = {
                "step": step,
                "began": 1_763_844_000.0 + 4 * step,
                "seconds": generate + update + 0.1,
                "learner": [["generate", 0.0, generate], ["update", generate, generate + update]],
                "engine": [[0.05, 0.9 * generate]],
                "groups": [[0.0, 4], [0.5 * generate, 2], [generate, 0]],
            }
            timeline.write(json.dumps(line, sort_keys=True) + "\n")


def _solve_rate(step: int) -> float:
    return 0.9 - 0.8 * 0.9**step


def _step_metrics(step: int, rng: np.random.Generator, num_trajectories: int) -> dict[str, float | None]:
    return {
        "batch/tokens": 60.0 * num_trajectories,
        "reward/mean": _solve_rate(step) + float(rng.normal(0, 0.02)),
        "reward/std": 0.4,
        "policy/entropy": 0.7 * 0.98**step,
        "policy/grad_norm": None if step == 2 else float(rng.uniform(0.2, 0.6)),
        "policy/clip_fraction": 0.01,
        "response_length/mean": 12.0 + 0.1 * step,
        "mismatch/logprob_diff_mean": float(rng.uniform(0, 0.02)),
        "mismatch/ratio_outside_10_percent": 0.01,
        "off_policy/drift_abs_mean": 0.007,
        "off_policy/staleness_abs_mean": 0.0,
        "failures/count": 1.0,
        "failures/environment_error": 1.0,
        "memory/policy_peak_gib": 0.8 + 0.01 * step,
        "total/trajectories": float(step * num_trajectories),
        "total/tokens": 60.0 * step * num_trajectories,
    }


class _Maker:
    """Makes the rows of one step after another."""

    def __init__(
        self, prompts: int, samples: int, turns: int, *, failures: bool, trees: bool, hostile: bool, seed: int
    ) -> None:
        self._sizes, self._failures, self._trees, self._seed = (prompts, samples, turns), failures, trees, seed
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        # Hostile texts are rare, as in life; every one of them is in the first steps.
        self._texts = [*PLAIN, *(HOSTILE if hostile else ())]
        self._ids = [np.array(tokenizer.encode(text[:LONGEST_CELL]).ids, np.int32) for text in self._texts]
        self._added = np.array(
            tokenizer.encode("user\nGina buys 3 cups. How many dollars does she pay?\n").ids, np.int32
        )

    def write(self, folder: Path, purpose: str, step: int) -> None:
        """Write the file of one step."""
        rng = np.random.default_rng([self._seed, step, len(purpose)])
        prompts, samples, _ = self._sizes
        # Of the same prompts again every second epoch: the solve-rate over steps has several points.
        rows = [
            row
            for prompt in range(prompts)
            for sample in range(1 if purpose == "eval" else samples)
            for row in self._trajectory(purpose, step, (step % 2) * prompts + prompt, sample, rng)
        ]
        columns = {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in SCHEMA}
        table = pa.Table.from_pydict(columns, schema=SCHEMA)
        path = folder / "rollouts" / f"{purpose}_step_{step:06d}.parquet"
        pq.write_table(table, path, compression="zstd")

    def _trajectory(
        self, purpose: str, step: int, prompt: int, sample: int, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        hostile_first = prompt < len(HOSTILE) and sample == 0 and len(self._texts) > len(PLAIN)
        is_right = bool(rng.random() < _solve_rate(step))
        fails = self._failures and (step + prompt + 3 * sample) % 17 == 5
        kind, message = FAILURES[(step + sample) % len(FAILURES)]
        num_turns = int(rng.integers(1, self._sizes[2] + 1))
        if fails and (step + prompt) % 2:
            num_turns = 0
        head = {
            "global_step": step,
            "purpose": purpose,
            "uid": f"{'validation' if purpose == 'eval' else 'train'}-{prompt}",
            "sample": sample,
            "num_turns": num_turns,
            "outcome": "failed" if fails else "done",
            "failure_kind": kind if fails else None,
            "failure_message": message if fails else None,
            "failure_turn": num_turns if fails else None,
            "error": "NonFiniteError: the loss is nan" if purpose == "failed" else None,
            "trajectory_reward": None if fails else float(is_right),
            "env_class": ("word_problems", "search")[prompt % 2],
            "dataset": ("sums", "shop")[prompt % 2],
        }
        first = {
            "rewards": json.dumps({"environment": float(is_right), "format": 0.2}),
            "metrics": json.dumps({"solved": float(is_right), "turns": float(num_turns)}),
            "extras": json.dumps({"reward_spec": {"method": "rule", "ground_truth": "30"}}),
            "prompt": json.dumps(
                [{"role": "user", "content": f"Question {prompt}: Gina buys 3 cups. What does she pay?"}]
            ),
        }
        rows = [
            head | self._turn(turn, num_turns, step, is_right, rng, hostile=hostile_first and turn == 0, number=prompt)
            for turn in range(num_turns)
        ] or [head | {"reward": 0.0}]
        rows[0] |= first
        return rows

    def _turn(
        self,
        turn: int,
        num_turns: int,
        step: int,
        is_right: bool,
        rng: np.random.Generator,
        *,
        hostile: bool,
        number: int,
    ) -> dict[str, Any]:
        which = len(PLAIN) + number if hostile else int(rng.integers(len(PLAIN)))
        ids = self._ids[which]
        logprobs = -rng.exponential(0.4, len(ids)).astype(np.float32)
        forks = self._trees and turn > 1 and number % 3 == 0
        is_last = turn == num_turns - 1
        calls = [{"name": "calculator", "arguments": {"expression": "3*4"}}] if turn % 2 else None
        return {
            "turn": turn,
            "parent": None if turn == 0 else (0 if forks else turn - 1),
            "reward": float(is_right and is_last),
            "observations": "[]" if is_last else json.dumps([{"role": "user", "content": "Wrong. Try again. <b>"}]),
            "tool_calls": json.dumps(calls) if calls else None,
            "text": self._texts[which],
            "stop_reason": "stop" if len(ids) < 100 else "length",
            "versions": [{"start": 0, "version": max(0, step - 1 - (number % 4 == 1))}],
            "added_token_ids": self._added,
            "response_token_ids": ids,
            "logprobs": logprobs,
            "loss_mask": np.arange(len(ids)) % 7 != 6,
            "advantages": np.full(len(ids), 0.7 if is_right else -0.7, np.float32),
            "policy_logprobs": logprobs + rng.normal(0, 0.05, len(ids)).astype(np.float32),
            "entropies": rng.exponential(0.5, len(ids)).astype(np.float32),
        }


def _write_settings(folder: Path, *, steps: int, prompts: int, samples: int, turns: int, seed: int) -> None:
    config = f"""run_name: {folder.name}
seed: {seed}
output_dir: {folder}
model:
  path: builtin:tiny_qwen2
  tokenizer_path: null
trainer:
  total_steps: {steps}
  train_batch_size: {prompts}
  algorithm:
    eps_clip_low: 0.2
    eps_clip_high: 0.28
generator:
  n_samples_per_prompt: {samples}
  max_turns: {turns}
  api_key: sk-0123456789abcdef0123456789abcdef
"""
    (folder / "config.yaml").write_text(config)
    plan = {
        "total_steps": steps,
        "num_prompts_per_batch": prompts,
        "num_samples_per_batch": prompts * samples,
        "total_optimizer_steps": 2 * steps,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    probe = {"rows": 4, "longest": 128, "positions": 512, "training": True, "peak_bytes": 17283329}
    sizing = {"tokens": 943, "limit_bytes": 53687091, "predicted_tokens": 900, "probes": [probe]}
    (folder / "memory.json").write_text(json.dumps({"policy": [{"name": "policy", "training": sizing}]}))
    evaluation = {"global_step": 0, "n_samples_per_prompt": 1, "overall": {"accuracy": 0.1}, "parts": {}}
    (folder / "evaluation.json").write_text(json.dumps({"evaluations": [evaluation]}))


def _write_log(folder: Path, *, failures: bool) -> None:
    lines = ["2026-11-22 18:51:52,526 INFO stdout: skyrl_train: " + folder.name]
    if failures:
        lines += [
            "2026-11-22 18:51:59,100 WARNING skyrl_train: 1 of 16 trajectories failed <script>window.pwned=1</script>",
            "2026-11-22 18:52:09,125 ERROR skyrl_train: step 2 failed",
            "Traceback (most recent call last):",
            '  File "loop.py", line 3, in step',
            "skyrl_train.errors.NonFiniteError: the loss is nan",
        ]
    (folder / "run.log").write_text("\n".join([*lines, "2026-11-22 18:53:00,000 INFO stdout: done"]) + "\n")


def main() -> None:
    """Write one run of about so many turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="0: chosen by the number of turns")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_large_run(args.folder, turns=args.turns, steps=args.steps, seed=args.seed)


def write_large_run(folder: Path, *, turns: int, steps: int = 0, seed: int = 0) -> Path:
    """Write a run of about `turns` turns, whose trajectories have two in the mean."""
    steps = steps or max(2, min(100, turns // 500))
    trajectories = max(1, turns // (2 * steps))
    samples = 8 if trajectories >= 16 else 1
    return write_run(
        folder, steps=steps, prompts=max(1, trajectories // samples), samples=samples, turns=3, eval_every=10, seed=seed
    )


def write_long_run(folder: Path, *, steps: int, rows: int, seed: int = 0) -> Path:
    """Write a run of `steps` steps of `rows` trajectories of one turn, which are the same in each but for their step."""
    (folder / "rollouts").mkdir(parents=True)
    maker = _Maker(max(1, rows // 8), min(8, rows), 1, failures=True, trees=False, hostile=True, seed=seed)
    maker.write(folder, "train", 2)
    table = pq.read_table(folder / "rollouts" / "train_step_000002.parquet")
    place = table.schema.get_field_index("global_step")
    for step in range(1, steps + 1):
        of_step = table.set_column(place, table.schema.field(place), pa.array([step] * len(table), pa.int32()))
        pq.write_table(of_step, folder / "rollouts" / f"train_step_{step:06d}.parquet", compression="zstd")
    _write_settings(folder, steps=steps, prompts=rows // 8, samples=8, turns=1, seed=seed)
    append_records(folder, range(steps + 1), eval_every=100, num_trajectories=rows, seed=seed)
    _write_log(folder, failures=True)
    (folder / "complete.json").write_text(json.dumps({"global_step": steps}))
    return folder


if __name__ == "__main__":
    main()
