"""Writes the table of plans in `docs/recipes.md`: each recipe on 1 and on 8 GPUs of 80 GB, by `python -m skyrl_train.plan`.

    python scripts/make_recipe_plans.py                # into the page
    python scripts/make_recipe_plans.py --print lora   # to the terminal, of some recipes

No model and no device is needed. A plan of sizes that were never traced on this machine takes minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- plans -->", "<!-- /plans -->"
RECIPES: Mapping[str, Sequence[str]] = {
    "gsm8k_multiturn": (),
    "math_dapo": (),
    "ppo_critic": (),
    "lora": (),
    "distillation": (),
    "async": (),
    "code_sandbox": (),
    "text2sql": (),
    "search_agent": (),
    "rl_after_sft": ("plan.architecture=Qwen2.5-1.5B",),
    "vlm": ("plan.architecture=Qwen2.5-3B",),
}
"""By recipe, what its plan is told beside the GPUs: sizes of models whose config is not on this machine."""
PLACEMENTS: Mapping[tuple[str, int], Sequence[str]] = {
    ("async", 8): ("placement=gpu_8_split", "generator.vllm.num_engines=4"),
}
"""Where another placement than the one that is chosen for so many GPUs is what the recipe is for."""
COLUMNS = ("recipe", "GPUs", "on them", "model", "state, GB", "positions", "micro-batches", "disk, GB")
SHORT = {"policy": "policy", "reference": "reference", "critic": "critic", "engine": "engines"}
STATE = ("parameters", "gradients", "optimizer state")


def command(recipe: str, gpus: int) -> list[str]:
    """Return the arguments of the plan."""
    placement = PLACEMENTS.get((recipe, gpus), (f"placement.num_gpus={gpus}",))
    return [f"+experiment={recipe}", "platform=gpu", *placement, "plan.device_memory_gb=80", *RECIPES[recipe]]


def plan(recipe: str, gpus: int) -> dict[str, Any]:
    """Return the plan as it is printed for scripts, refused or not. Raises ValueError where there is none."""
    arguments = [sys.executable, "-m", "skyrl_train.plan", "--format", "json", *command(recipe, gpus)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode not in (0, 2) or not done.stdout.startswith("{"):
        raise ValueError(f"{' '.join(command(recipe, gpus))}: {done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def gigabytes(count: float) -> str:
    """Return GB of 10^9 bytes, to three digits."""
    return f"{count / 1e9:.3g}"


def rows(recipe: str, gpus: int, found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield a line of the table for each model, or the one that says why it is refused."""
    if found["violations"]:
        fields = ", ".join(f"`{each['field']}`" for each in found["violations"])
        yield (recipe, gpus, f"refused: {fields}", *[""] * 5)
        return
    groups = [
        "{}: {}".format(group["num_bundles"], ", ".join(SHORT[role] for role, _ in group["slots"]))
        for group in found["placement"]["groups"]
    ]
    passes = {(each["role"], each["phase"]): each for each in found["memory"]["passes"]}
    estimates = {each["role"]: each for each in found["estimates"]}
    first = (recipe, gpus, "; ".join(groups))
    disk = gigabytes(sum(found["disk"].values()))
    for learner in found["plan"]["learners"]:
        role = learner["role"]
        best = passes.get((role, "training")) or passes[role, "scoring"]
        state = sum(best["kinds"].get(kind, 0) for kind in STATE)
        computed = estimates.get(role)
        count = computed["micro_batches_per_rank"] if computed else ""
        yield (*first, role, gigabytes(state), f"{best['budget']:,}", count, disk)
        first, disk = ("", "", ""), ""


def table(recipes: Sequence[str]) -> str:
    """Return Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for recipe in recipes:
        for gpus in (1, 8):
            for row in rows(recipe, gpus, plan(recipe, gpus)):
                lines.append("| " + " | ".join(map(str, row)) + " |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the plans, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument("recipes", nargs="*", help="only these (default: all, which is what is written)")
    parsed = parser.parse_args(arguments)
    content = table(parsed.recipes or list(RECIPES))
    if not parsed.print and not parsed.recipes:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
