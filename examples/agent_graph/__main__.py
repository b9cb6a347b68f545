"""An agent of LangGraph's, unmodified and in an environment of its own, is trained: `agent.py` is the agent.

    python -m venv V && V/bin/pip install langchain langgraph langchain-openai
    PYTHONPATH=examples python -m agent_graph --python V/bin/python [--steps 2] [--output runs/agent_graph]

The engine answers as `script.py` says, with calls of several tools at once; what was trained on is compared with it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from scripted import check
from tools import run, write_model

from agent_graph.script import expected


def write_data(path: Path, seed: int) -> None:
    """Shopping lists, whose prices the tools know."""
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(16):
            prices = {f"item {number}": rng.randint(1, 99) for number in rng.sample(range(1, 6), 2)}
            question = {"role": "user", "content": f"What do {' and '.join(prices)} cost together?"}
            row = {"prompt": [question], "prices": prices, "answer": str(sum(prices.values()))}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has langgraph")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/agent_graph"))
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_data(folder / "train.jsonl", arguments.seed)
    words = [arguments.python.absolute(), Path(__file__).resolve().parent / "agent.py"]
    command = ", ".join([*(f"'{word}'" for word in words), "'{task_file}'", "'{report_file}'"])
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        "data.validation=[]",
        "environment.env_class=reported",
        "generator.backend=agent_graph.script:Scripted",
        f"generator.agent_loop={{_target_: agent, command: [{command}], time_limit_s: 200}}",
        "generator.step_wise_trajectories=true",
        "generator.max_turns=4",
        "generator.max_context_length=640",
        "generator.n_samples_per_prompt=2",
        "generator.sampling.max_generate_length=200",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        f"trainer.total_steps={arguments.steps}",
        "trainer.dump_rollouts=true",
        "trainer.ckpt_interval=0",
    )
    check(folder / "rl", str(folder / "model"), arguments.steps, expected)


if __name__ == "__main__":
    main()
