"""`python -m skyrl_train.plan`: the command in `cli/plan.py`, for only `cli` imports Hydra."""

import runpy

runpy.run_module("skyrl_train.cli.plan", run_name="__main__")
