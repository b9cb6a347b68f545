"""Trains two steps with the script, and checks what was trained on."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from scripted import check
from tools import run

from verifiers_env.script import GUESS, total


def expected(rollout):
    """The texts of a rollout's turns, and its reward: the weights of the rewards that it earns."""
    (message,) = rollout["first_messages"]
    return ([GUESS], 0.0) if rollout["sample"] % 2 else ([total(message["content"])], 1.25)


def expected_of_retries(rollout):
    """As `expected`, of two turns: the second answer is what counts."""
    (last,), reward = expected(rollout)
    return [GUESS, last], reward


TASKSETS = {"sums_taskset": ("Scripted", expected), "retries_taskset": ("SecondThoughts", expected_of_retries)}
"""Which engine plays each, and what is checked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter that has verifiers and numpy")
    parser.add_argument("--taskset", choices=TASKSETS, default="sums_taskset", help="retries_taskset: of two turns")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/verifiers_env"))
    arguments = parser.parse_args()
    engine, expects = TASKSETS[arguments.taskset]
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # A row says which task it is; the prompt is the task's own.
    rows = [{"prompt": [{"role": "user", "content": "task"}], "task": index} for index in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"data.train=[{folder / 'train.jsonl'}]",
        "data.validation=[]",
        f"environment.env_class=verifiers:{arguments.taskset}",
        f"environment.python={Path(arguments.python).absolute()}",
        f"generator.backend=verifiers_env.script:{engine}",
        "generator.max_turns=3",
        "generator.n_samples_per_prompt=4",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        f"trainer.total_steps={arguments.steps}",
        "trainer.dump_rollouts=true",
        "trainer.ckpt_interval=0",
    )
    check(folder / "rl", str(folder / "rl" / "export"), arguments.steps, expects)


if __name__ == "__main__":
    main()
