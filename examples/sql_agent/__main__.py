"""Trains two steps with the script, and checks what was trained on."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from scripted import check
from tools import run, write_model

from sql_agent.script import expected


def write_data(path: Path, seed: int) -> None:
    """Shops whose prices are to be added up."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(64):
            prices = [rng.randint(1, 99) for _ in range(rng.randint(2, 6))]
            items = ", ".join(f"('item {index}', {price})" for index, price in enumerate(prices))
            row = {
                "prompt": [{"role": "user", "content": "items (name, price): what do all cost together?"}],
                "database": f"create table items (name text, price integer); insert into items values {items};",
                "answer": str(sum(prices)),
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/sql_agent"))
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
        "environment.env_class=sql_agent.agent:Database",
        "environment.num_workers=2",
        "generator.backend=sql_agent.script:Scripted",
        "generator.max_turns=3",
        "generator.n_samples_per_prompt=4",
        "generator.sampling.max_generate_length=128",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        f"trainer.total_steps={arguments.steps}",
        "trainer.dump_rollouts=true",
        "trainer.ckpt_interval=0",
    )
    check(folder / "rl", str(folder / "model"), arguments.steps, expected)


if __name__ == "__main__":
    main()
