"""A taskset of verifiers, unchanged, under an interpreter of its own.

    python -m venv V
    V/bin/pip install verifiers numpy
    PYTHONPATH=examples python -m verifiers_env --python V/bin/python [--steps 2] [--output runs/verifiers_env]

`sums_taskset.py` is what one writes for verifiers: tasks with a prompt each, and rewards. It knows nothing of this trainer,
and is found on the PYTHONPATH; one of the hub is installed into V, and named alike. No learning is shown at this size: one
small model, two steps, and an engine that follows a script in place of sampling. Every other sample of a task is right, the
others are not, with the log-probabilities that the model gives to those tokens. What the run shows, and `__main__.py`
checks, is that trained tokens are the sampled ones, that rewards are exactly those of the taskset, and that the groups have
a gradient.
"""
