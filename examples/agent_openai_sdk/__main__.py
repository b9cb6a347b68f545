"""The `openai` package, unmodified, in a loop with a tool, is trained: `agent.py` is the agent.

    PYTHONPATH=examples python -m agent_openai_sdk [--engine script] [--steps 2] [--output runs/agent_openai_sdk]

`--engine script` answers as `script.py` says, and what was trained on is compared with it; `--engine hf` is the bundled
model, which is too small for the task.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from scripted import check
from tools import run, write_model

from agent_openai_sdk.script import expected

ENGINES = {"script": "agent_openai_sdk.script:Scripted", "hf": "hf"}


def write_data(path: Path, seed: int) -> None:
    """Sums and products of two digits."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(64):
            left, right, sign = rng.randint(2, 9), rng.randint(2, 9), rng.choice("+*")
            answer = left + right if sign == "+" else left * right
            question = {"role": "user", "content": f"{left}{sign}{right}=?"}
            file.write(json.dumps({"prompt": [question], "answer": str(answer)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="script")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/agent_openai_sdk"))
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_data(folder / "train.jsonl", arguments.seed)
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        "data.validation=[]",
        "environment.env_class=reported",
        f"generator.backend={ENGINES[arguments.engine]}",
        "generator.agent_loop={_target_: agent, run: agent_openai_sdk.agent:play, time_limit_s: 120}",
        "generator.step_wise_trajectories=true",
        "generator.max_turns=3",
        "generator.n_samples_per_prompt=4",
        "generator.sampling.max_generate_length=96",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        f"trainer.total_steps={arguments.steps}",
        "trainer.dump_rollouts=true",
        "trainer.ckpt_interval=0",
    )
    if arguments.engine == "script":
        check(folder / "rl", str(folder / "model"), arguments.steps, expected)


if __name__ == "__main__":
    main()
