"""mini-swe-agent, unmodified and in an environment of its own, is trained on a repository with a bug: `repair.py` is a task.

    PYTHONPATH=examples python -m agent_mini_swe --python "$(./scripts/agent_env.sh mini_swe)" [--steps 2]
        [--launcher bubblewrap] [--output runs/agent_mini_swe]

The agent runs what the model says in a shell: of this machine, or with `--launcher` in a sandbox, which sees the agent's own
packages and this folder of its files. The engine answers as `script.py` says; what was trained on is compared with it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripted import check
from tools import run, write_model

from agent_mini_swe.script import expected

FILES = {
    "sums.py": "def add(a, b):\n    return a - b\n",
    "test.py": "from sums import add\n\nassert add(2, 3) == 5\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has mini-swe-agent")
    parser.add_argument("--launcher", default="null", help="bubblewrap, or as generator.agent_loop.launcher takes it")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/agent_mini_swe"))
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    question = {"role": "user", "content": "add in sums.py is wrong. Make test.py pass."}
    (folder / "train.jsonl").write_text(4 * (json.dumps({"prompt": [question], "files": FILES}) + "\n"))
    python = arguments.python.absolute()
    words = [python, Path(__file__).resolve().parent / "repair.py", python.parent / "mini"]
    command = ", ".join([*(f"'{word}'" for word in words), "'{task_file}'", "'{report_file}'", "'{folder}'"])
    launcher = arguments.launcher
    if launcher == "bubblewrap":
        read = {python.parents[1], python.resolve().parents[1], Path(__file__).resolve().parent}
        launcher = f"{{_target_: bubblewrap, read: [{', '.join(sorted(map(str, read)))}]}}"
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        "data.validation=[]",
        "environment.env_class=reported",
        "generator.backend=agent_mini_swe.script:Scripted",
        f"generator.agent_loop={{_target_: agent, command: [{command}], time_limit_s: 240, launcher: {launcher}}}",
        "generator.step_wise_trajectories=true",
        "generator.max_turns=6",
        "generator.max_context_length=800",
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
