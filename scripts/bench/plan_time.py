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

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import harness

EXPERIMENT = "+experiment=gsm8k_multiturn"
TOLERANCE, MACHINE_TOLERANCE = 0.2, 0.3
RUNS = {
    "small": ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"],
    "large": ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"],
}
"""Overrides by name."""


def overrides(name: str, steps: int) -> list[str]:
    """Return those of a run that evaluates nothing but at its end."""
    return [f"trainer.total_steps={steps}", "trainer.eval_interval=0", *RUNS[name]]


def run_of(settings: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """Make a run in `folder`; return the records of its steps but the first."""
    records = harness.trained(folder, *settings, deadline_s=1800.0)
    return [record for record in records if "timing/update" in record][1:]


def phases_of(settings: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each phase by a plan."""
    said = harness.apart(["-m", "skyrl_train.plan", "--format", "json", *settings], deadline_s=600.0)
    return {phase["name"]: phase["seconds"] for phase in json.loads(said)["time"]["phases"]}


def against_machine(settings: Sequence[str], steps: int, folder: Path) -> float:
    """Print each phase as predicted and as measured; return how far the update is off."""
    experiment = [] if any(each.startswith("+experiment=") for each in settings) else [EXPERIMENT]
    common = [*experiment, "trainer.eval_interval=0", "trainer.eval_before_train=false", *settings]
    records = run_of([*common, f"trainer.total_steps={steps}"], folder)
    predicted = phases_of([*common, f"plan.lengths={folder / 'rollouts'}"])
    for name in ("generate", "score", "update"):
        took = median(record.get(f"timing/{name}", 0.0) for record in records)
        error = f" ({predicted[name] / took - 1:+.0%})" if took > 0.01 else ""
        print(f"{name}: {predicted[name]:.2f} s predicted, {took:.2f} s measured{error}")
    return predicted["update"] / median(record["timing/update"] for record in records) - 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--machine", action="store_true")
    parser.add_argument("overrides", nargs="*", help="with --machine")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        if args.machine:
            error = against_machine(args.overrides, args.steps, folder / "run")
            return int(args.check and abs(error) > MACHINE_TOLERANCE)
        measured = {
            name: median(record["timing/step"] for record in run_of(overrides(name, args.steps), folder / name))
            for name in RUNS
        }
        errors = []
        for name, other in (("large", "small"), ("small", "large")):
            phases = phases_of([EXPERIMENT, *overrides(name, args.steps), f"plan.rates={folder / other}"])
            predicted = sum(s for phase, s in phases.items() if phase not in ("checkpoint", "evaluate"))
            errors.append(predicted / measured[name] - 1)
            print(
                f"{name}: {predicted:.2f} s a step predicted by the rates of the {other} run, {measured[name]:.2f} s "
                f"measured ({errors[-1]:+.1%})"
            )
    return int(args.check and max(map(abs, errors)) > TOLERANCE)


if __name__ == "__main__":
    harness.run(main)
