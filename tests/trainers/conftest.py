from pathlib import Path

import pytest


@pytest.fixture
def real_learning_curve() -> None:
    """Ask for it to have the picture drawn."""


@pytest.fixture(autouse=True)
def _quick_learning_curve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest of a fake run."""
    if "real_learning_curve" in request.fixturenames:
        return

    def draw(metrics_file: Path, image_file: Path, *, title: str) -> bool:
        image_file.touch()
        return True

    monkeypatch.setattr("skyrl_train.trainers.ppo.draw_learning_curve", draw)
    monkeypatch.setattr("skyrl_train.trainers.sft.draw_loss_curve", draw)
