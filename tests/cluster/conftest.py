"""One Ray session for all tests of this folder: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import PlacementConfig
from tests.support.learner_cases import save_tiny_model


@pytest.fixture(scope="session")
def session() -> Iterator[RaySession]:
    opened = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=8, name="tests")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)
