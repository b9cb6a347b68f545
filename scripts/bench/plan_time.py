"""How well a plan predicts a step's time: one run gives the rates, the plan of another is held against that run.

    python scripts/bench/plan_time.py                # two short runs of the bundled experiment, each predicts the other
    python scripts/bench/plan_time.py --steps 8 --check
    python scripts/bench/plan_time.py --machine [+experiment=smollm2 ...]     # by what the machine does in a second

The runs differ in the prompts of a batch and in the optimizer steps made of it. Steps but the first count, in the median,
as the first makes what later ones find. `--check` exits with status 1 where a prediction is off by more than 20 %.
`--machine` makes one run, of the overrides that are given, and shows each phase beside what a plan predicts of a machine on
which no run was made, for rows as long as the run's; with `--check` an update may be off by 30 %. For quiet cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

TOLERANCE, MACHINE_TOLERANCE = 0.2, 0.3
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
    return median(record["timing/step"] for record in run_of(overrides(name, steps), folder))


def run_of(settings: list[str], folder: Path) -> list[dict[str, float]]:
    """Make a run in `folder`; return the records of its steps but the first."""
    command = [sys.executable, "-m", "skyrl_train.main", *settings, f"output_dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "timing/update" in record][1:]


def predict(name: str, steps: int, rates: Path) -> float:
    """Return the seconds of a step by a plan that takes the rates of the run in `rates`: of what every step does."""
    phases = phases_of([*overrides(name, steps), f"plan.rates={rates}"])
    return sum(seconds for name, seconds in phases.items() if name not in ("checkpoint", "evaluate"))


def phases_of(settings: list[str]) -> dict[str, float]:
    """Return the seconds of each phase by a plan."""
    command = [sys.executable, "-m", "skyrl_train.plan", "--format", "json", *settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600, encoding="utf-8")
    return {phase["name"]: phase["seconds"] for phase in json.loads(done.stdout)["time"]["phases"]}


def against_machine(settings: list[str], steps: int, folder: Path) -> float:
    """Print each phase as predicted and as measured; return how far the update is off."""
    experiment = [] if any(each.startswith("+experiment=") for each in settings) else ["+experiment=gsm8k_multiturn"]
    common = [*experiment, "trainer.eval_interval=0", "trainer.eval_before_train=false", *settings]
    records = run_of([*common, f"trainer.total_steps={steps}"], folder)
    predicted = phases_of([*common, f"plan.lengths={folder / 'rollouts'}"])
    for name in ("generate", "score", "update"):
        took = median(record.get(f"timing/{name}", 0.0) for record in records)
        error = f" ({predicted[name] / took - 1:+.0%})" if took > 0.01 else ""
        print(f"{name}: {predicted[name]:.2f} s predicted, {took:.2f} s measured{error}")
    return predicted["update"] / median(record["timing/update"] for record in records) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--machine", action="store_true")
    parser.add_argument("overrides", nargs="*", help="with --machine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.machine:
            error = against_machine(args.overrides, args.steps, Path(folder) / "run")
            return int(args.check and abs(error) > MACHINE_TOLERANCE)
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
