"""A game of several turns in twenty lines: two guesses at a number from 1 to 3, the wrong one answered with more or less.

    python examples/guess_number.py                      # settings may follow

Whoever hears nothing finds two numbers of three; whoever begins with 2 and uses the hint finds all. The bundled model
finds one in twenty at first, two in three after some 20 steps, and after 40 all, with two seeds of three. From 1 to 9 in
four turns it stays where hints are not heard (4 of 9): it settles on an order of guesses before its samples use a hint by
chance.

`Guess` is all that the game needs; docs/environments.md says what else a class may do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


class Guess:
    """Reward 1 where the row's `secret` is guessed within two turns."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:  # noqa: ARG002
        self.secret, self.turns = int(extras["secret"]), 0

    async def init(self, prompt: Any) -> Any:
        return prompt, {}

    async def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        guess = int((re.findall(r"\d+", action) or ["0"])[-1])
        return {
            "observations": [{"role": "user", "content": "more" if guess < self.secret else "less"}],
            "reward": float(guess == self.secret),
            "done": guess == self.secret,
            "truncated": self.turns == 2,
        }


SETTINGS = (
    "environment=single_turn",
    "environment.env_class=guess_number:Guess",
    "data.validation=[]",
    "generator.max_turns=2",
    "generator.sampling.max_generate_length=6",
    "generator.n_samples_per_prompt=16",
    "trainer.total_steps=60",
    "trainer.train_batch_size=9",
    "trainer.policy_mini_batch_size=9",
    "trainer.policy.optimizer.lr=1e-4",
    "trainer.export_hf=false",
)


def main(settings: list[str]) -> int:
    """Train with further settings of the command line; returns the exit status."""
    file = Path("secrets.jsonl").absolute()
    rows = ({"prompt": "Guess a number.", "secret": secret} for secret in 6 * [1, 2, 3])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "skyrl_train.main", *SETTINGS, f"data.train=[{file}]", *settings]
    return subprocess.run(
        command, env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
