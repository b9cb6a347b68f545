"""The switch for kernels whose result does not vary, in processes of their own: it holds for a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config.algorithm import AlgorithmConfig
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model

_STEP = """
import hashlib, os, sys, torch
from pathlib import Path
from skyrl_train.model.layers.numerics import is_deterministic, set_numerics
set_numerics(deterministic=sys.argv[2] == "yes")
assert is_deterministic() == torch.are_deterministic_algorithms_enabled() == (sys.argv[2] == "yes")
assert not torch.backends.cuda.cudnn_sdp_enabled()
from skyrl_train.batch.steps.minibatch import close_mini_batch
from tests.support.learner_cases import make_batch, make_learner
learner = make_learner(Path(sys.argv[1]))
batch = make_batch([9, 12, 9, 14, 5, 7], dtype=torch.float32)
learner.forward(batch)
learner.forward_backward(close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64))
learner.optim_step()
weights = b"".join(p.detach().numpy().tobytes() for p in learner.engine.parameters.values())
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), hashlib.sha256(weights).hexdigest())
"""
_RAISES_ON_CUDA = {
    "nll_loss_forward",
    "nll_loss_backward",
    "put_",
    "histc",
    "median",
    "kthvalue",
    "mode",
    "scatter_reduce",
}
"""Of what torch lists as without a deterministic kernel on CUDA (`use_deterministic_algorithms`), what a learner might
call; sums along a dimension of floats (`cumsum`) are looked at by type."""


def step(folder: Path, deterministic: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _STEP, str(folder), deterministic],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[3],
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.slow
def test_a_step_on_a_cpu_is_the_same_with_it_and_cublas_gets_one_workspace(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    workspace, with_it = step(folder, "yes", CUBLAS_WORKSPACE_CONFIG=":0:0")
    unset, without = step(folder, "no")
    assert (workspace, unset) == (":4096:8", "None")
    assert with_it == without


class Called(TorchDispatchMode):
    """Names of operations that have no deterministic kernel on CUDA, among all that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        name = func._schema.name.removeprefix("aten::")
        sums_floats = name in ("cumsum", "cumsum_", "cumprod") and args[0].is_floating_point()
        counts_weights = name == "bincount" and len(args) > 1 and args[1] is not None
        if name in _RAISES_ON_CUDA or sums_floats or counts_weights:
            self.refused.add(name)
        return func(*args, **(kwargs or {}))


def test_a_learner_calls_nothing_that_is_refused_on_cuda(tmp_path: Path) -> None:
    """What runs on a device goes through the same operations; only attention has kernels of its own there."""
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01)
    folder = save_tiny_model(tmp_path)
    for layout in ("padded", "packed", "prefix_shared"):
        learner = make_learner(folder, algorithm=algorithm, layout=layout)
        batch = make_batch([9, 12, 9, 14, 5, 7], dtype=torch.float32)
        mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64)
        with Called() as called:
            learner.forward(batch)
            learner.forward_backward(mini_batch)
            learner.optim_step()
        assert called.count > 100
        assert not called.refused
