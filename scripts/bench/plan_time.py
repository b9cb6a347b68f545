"""How well a plan predicts a step's time: one run gives the rates, the plan of another is held against that run.

    python scripts/bench/plan_time.py                # two short runs of the bundled experiment, each predicts the other
    python scripts/bench/plan_time.py --steps 8 --check

The runs differ in the prompts of a batch and in the optimizer steps made of it. Steps but the first count, in the median,
as the first makes what later ones find. `--check` exits with status 1 where a prediction is off by more than 20 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

TOLERANCE = 0.2
RUNS = {
    "small": ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"],
    "large": ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"],
}
"""Overrides by name."""


def overrides(name: str, steps: int) -> list[str]:
    """Return the command line of a run, which writes no checkpoint and evaluates nothing but at its end."""
    return ["+experiment=gsm8k_multiturn", f"trainer.total_steps={steps}", "trainer.eval_interval=0", *RUNS[name]]


def run(name: str, steps: int, folder: Path) -> float:
    """Make the run in `folder`; return the seconds of a step."""
    command = [sys.executable, "-m", "skyrl_train.main", *overrides(name, steps), f"output_dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return median([record["timing/step"] for record in records if "timing/step" in record][1:])


def predict(name: str, steps: int, rates: Path) -> float:
    """Return the seconds of a step by a plan that takes the rates of the run in `rates`: of what every step does."""
    command = [sys.executable, "-m", "skyrl_train.plan", "--format", "json", *overrides(name, steps)]
    done = subprocess.run(
        [*command, f"plan.rates={rates}"], check=True, capture_output=True, text=True, timeout=300, encoding="utf-8"
    )
    phases = json.loads(done.stdout)["time"]["phases"]
    return sum(phase["seconds"] for phase in phases if phase["name"] not in ("checkpoint", "evaluate"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = {name: run(name, args.steps, Path(folder) / name) for name in RUNS}
        errors = []
        for name, other in (("large", "small"), ("small", "large")):
            predicted = predict(name, args.steps, Path(folder) / other)
            errors.append(predicted / measured[name] - 1)
            print(
                f"{name}: {predicted:.2f} s a step predicted by the rates of the {other} run, {measured[name]:.2f} s "
                f"measured ({errors[-1]:+.1%})"
            )
    return int(args.check and max(abs(error) for error in errors) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
