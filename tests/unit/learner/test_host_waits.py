"""How often a pass makes the host wait for a device: once at its end, whatever the number of micro-batches and tiles.

Run with pytest on a machine with a CUDA device, or as a script under a Python whose device is pretended
(SKYRL_TRAIN_PRETENDED_PYTHON, as the self-test's cases are).
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.model.layers import set_numerics
from tests.support.layout_cases import close
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model

PRETENDED = os.environ.get("SKYRL_TRAIN_PRETENDED_PYTHON", "")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
"""Operations that read a value or a size back."""
MOST_WAITS = 4
"""Of a pass with backwards, at its end: foreseen gradients, losses, metrics."""


class Waits(TorchDispatchMode):
    """Counts operations on CUDA tensors for which the host waits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cuda" for tensor in tensors):
            indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
            masked = any(index is not None and index.dtype == torch.bool for index in indices)
            unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
            target = kwargs.get("device")
            to_host = name == "_to_copy" and target is not None and torch.device(target).type == "cpu"
            if name in WAITS or masked or unsized or to_host:
                self.seen[name] += 1
        return func(*args, **kwargs)


def count(folder: Path, layout: str, *, prompts: int) -> tuple[dict[str, int], int]:
    """Of a training pass over `prompts` micro-batches or so, by name; and how many forwards there were."""
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01)
    learner = make_learner(folder, layout=layout, device="cuda:0", rows_per_micro_batch=2, algorithm=algorithm)
    mini_batch = close(make_batch([9, 12] * prompts, prompt_length=4, dtype=torch.float32))
    learner.forward_backward(mini_batch)
    with Waits() as waits:
        metrics = learner.forward_backward(mini_batch)
    forwards = sum(metric.value for name, metric in metrics.items() if "_forwards_" in name)
    return dict(waits.seen), int(forwards)


def check() -> None:
    """Raises AssertionError where a pass waits more often with more micro-batches."""
    set_numerics(deterministic=False)
    folder = save_tiny_model(Path(tempfile.mkdtemp()))
    for layout in ("padded", "packed"):
        few, num_few = count(folder, layout, prompts=2)
        many, num_many = count(folder, layout, prompts=6)
        assert num_many == 3 * num_few, (layout, num_few, num_many)
        assert few == many, (layout, few, many)
        assert 1 <= sum(few.values()) <= MOST_WAITS, (layout, few)
        print(layout, few)


@pytest.mark.gpu
def test_a_pass_waits_for_the_device_once() -> None:
    check()


@pytest.mark.slow
@pytest.mark.skipif(not PRETENDED, reason="SKYRL_TRAIN_PRETENDED_PYTHON names no Python with a pretended device")
def test_a_pass_waits_for_a_pretended_device_once() -> None:
    subprocess.run([PRETENDED, __file__], check=True, timeout=600, cwd=Path(__file__).parents[3])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    check()
