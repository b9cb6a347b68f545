"""A data worker is there before the first step needs it: what it unpickles imports torch, and no library of models."""

from __future__ import annotations

import subprocess
import sys

COMMAND = """
import pickle, sys
from skyrl_train.batch import assemble
from skyrl_train.cluster import RayPlane, put_arrays
from skyrl_train.config import Config
from skyrl_train.model.files import image_reader
from skyrl_train.trainers import batch_metrics, steps

config = Config()
pickle.loads(pickle.dumps(image_reader(config.model, config.data.images)))
for function in (steps.assemble, steps.estimate, batch_metrics):
    pickle.loads(pickle.dumps(function))
print(*(name for name in ("torch", "transformers", "scipy", "peft", "pandas") if name in sys.modules))
"""


def test_it_imports_no_library_of_models() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["torch"]
