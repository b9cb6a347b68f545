"""`python -m skyrl_train.plan`: the command in `runs/planning.py`, which resolves a configuration and constructs no run."""

import runpy

runpy.run_module("skyrl_train.runs.planning", run_name="__main__")
