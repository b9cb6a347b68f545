"""`python -m skyrl_train.plan`: the command in `runs/cli/plan.py`, for only `cli` imports Hydra."""

import runpy

runpy.run_module("skyrl_train.runs.cli.plan", run_name="__main__")
