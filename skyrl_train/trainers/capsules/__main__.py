"""`python -m skyrl_train.trainers.capsules` runs `skyrl_train.main_capsule`, which constructs runs and stands above
this layer."""

import runpy

runpy.run_module("skyrl_train.main_capsule", run_name="__main__", alter_sys=True)
