"""A reward in three lines, on a file of questions and answers.

    python examples/reward_function.py                      # settings may follow

`score` below is all that the task needs: there is no environment. The rest writes the file, `questions.jsonl`, with one
question and answer a line, and runs

    PYTHONPATH=examples python -m skyrl_train.main environment.reward=reward_function:score \\
        data.train=[questions.jsonl] data.validation=[] data.prompt_column=question data.answer_column=answer ...

docs/rewards.md says what else such a function may take and return.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from skyrl_train.data.tasks import Split, generate_problems


def score(completion, answer):  # type: ignore[no-untyped-def]
    """1 for a response that ends with the answer after `#### `, else 0."""
    return float(completion.strip().endswith(f"#### {answer}"))


SETTINGS = (
    "environment.reward=reward_function:score",
    "data.prompt_column=question",
    "data.answer_column=answer",
    "data.validation=[]",
    "trainer.total_steps=12",
    "trainer.train_batch_size=32",
    "trainer.policy_mini_batch_size=16",
    "trainer.micro_train_batch_size_per_gpu=32",
    "trainer.micro_forward_batch_size_per_gpu=64",
    "trainer.policy.optimizer.lr=5e-5",
    "trainer.export_hf=false",
)


def write_questions(file: Path) -> None:
    """Write 2,000 questions of the kind that the bundled model has been taught to read."""
    problems = generate_problems(Split.TRAIN, 2000, seed=1)
    lines = (json.dumps({"question": problem.question, "answer": problem.answer}) for problem in problems)
    file.write_text("\n".join(lines) + "\n")


def main(settings: list[str]) -> int:
    """Train with further settings of the command line; returns the exit status."""
    file = Path("questions.jsonl").absolute()
    write_questions(file)
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "skyrl_train.main", *SETTINGS, f"data.train=[{file}]", *settings]
    return subprocess.run(
        command, env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
