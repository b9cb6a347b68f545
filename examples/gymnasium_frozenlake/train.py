"""A language model learns to cross gymnasium's frozen lake: random walks first, then GRPO.

    pip install -e '.[gymnasium]'
    python examples/gymnasium_frozenlake/train.py [--seed 0] [--warm-up-steps 30] [--output runs/lake] [KEY=VALUE ...]

`FrozenLake-v1` is gymnasium's own class. `conf/experiment/lake.yaml` says which lake, `lake.py` what the model is told of
an observation, which is a number and not a text. The lake is small (three by three squares, a hole in a corner) and not
slippery, so that a model of a million parameters learns it on a CPU; real ones take more of everything. The
model has never seen a lake, so it is shown random walks before: it learns to answer with the number of an action, and
reaches the goal as often as chance does, in 7 of 100 episodes. GRPO finds the way. KEY=VALUE are settings of its run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import yaml
from lake import walk

CONF = Path(__file__).resolve().parent / "conf"
QUESTION = "0 to 3?"


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(module: str, *settings: str) -> None:
    """One command line, with this folder where Python finds it."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-m", module, *settings], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("runs/lake"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(arguments.seed)
    conf = yaml.safe_load((CONF / "experiment" / "lake.yaml").read_text())
    spec, max_turns = conf["environment"]["env_class"], conf["generator"]["max_turns"]
    write_rows(folder / "walks.jsonl", [{"messages": walk(spec, QUESTION, max_turns, rng)} for _ in range(1000)])
    # Every episode starts alike: one prompt, as often as a run may want it.
    write_rows(folder / "prompts.jsonl", [{"prompt": [{"role": "user", "content": QUESTION}]}] * 512)
    run(
        "skyrl_train.main_sft",
        f"output_dir={folder / 'warm_up'}",
        f"seed={arguments.seed}",
        f"data.train=[{folder / 'walks.jsonl'}]",
        "data.validation=[]",
        "data.max_length=256",
        "data.loss_on=all",
        f"trainer.num_steps={arguments.warm_up_steps}",
        "trainer.batch_size=32",
        "trainer.layout=packed",
        "trainer.optimizer.lr=1e-3",
        "trainer.optimizer.warmup_steps=10",
        "trainer.optimizer.schedule=cosine",
        "trainer.ckpt_interval=0",
    )
    run(
        "skyrl_train.main",
        "--config-dir",
        str(CONF),
        "+experiment=lake",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'warm_up' / 'export'}",
        f"data.train=[{folder / 'prompts.jsonl'}]",
        *arguments.settings,
    )


if __name__ == "__main__":
    main()
