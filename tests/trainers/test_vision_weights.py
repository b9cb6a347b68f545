"""The weights of runs with images: adapters, a frozen tower, exports that load again, a run that is killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from skyrl_train.images import ImageSpan
from skyrl_train.model.files import FamilyProcessor
from skyrl_train.runs import train
from skyrl_train.telemetry.records import read_rollouts
from tests.support.vision_cases import own_arguments
from tests.support.vision_runs import (
    command,
    forget_images,
    png,
    rl_config,
    rl_settings,
    save_model,
    weights,
    write_rows,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_images(monkeypatch)


def logits(model: Any, folder: Path) -> Tensor:
    """Of transformers' own forward of a picture and some tokens, with the processor and tokenizer of `folder`."""
    image = FamilyProcessor(folder)(png(1), "0" * 64)
    placeholder = FamilyProcessor(folder).placeholder
    ids = torch.tensor([[1, 47, *[placeholder] * image.num_tokens, 46, 9, 10]])
    with torch.no_grad():
        found: Tensor = model.eval()(**own_arguments(ids, (ImageSpan(2, image),), torch.float32)).logits
    return found


def load(folder: Path | str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(str(folder))


def tower(model: Any) -> dict[str, Tensor]:
    return {name: each for name, each in model.state_dict().items() if "visual" in name}


@pytest.mark.parametrize("kind", ["whole", "frozen", "adapter", "adapter beside a frozen tower"])
def test_an_export_loads_again_with_its_tower(tmp_path: Path, kind: str) -> None:
    model = save_model(tmp_path / "model")
    settings = rl_settings(model, write_rows(tmp_path / "rows")[0]) | {"trainer.export_hf": True}
    settings |= {"model.lora.rank": 4} if "adapter" in kind else {}
    settings |= {"model.freeze": ["vision"]} if "frozen" in kind else {}
    train(rl_config(tmp_path / "run", settings))
    export = tmp_path / "run" / "export"
    before, after = load(model), load(export)
    same = [torch.equal(tower(before)[name], each) for name, each in tower(after).items()]
    assert all(same) if "frozen" in kind else not all(same)
    assert not torch.equal(logits(before, export), logits(after, export))
    if "adapter" in kind:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(load(model), str(export / "adapter"))
        assert torch.allclose(logits(adapted, export), logits(after, export), atol=1e-5)
        adapts_the_tower = any("visual" in name and "lora" in name for name, _ in adapted.named_parameters())
        assert adapts_the_tower is ("frozen" not in kind)
    assert len(AutoTokenizer.from_pretrained(str(export))) == 50
    if kind == "whole":  # what was exported is trained on
        train(rl_config(tmp_path / "again", settings | {"model.path": str(export), "trainer.export_hf": False}))


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    settings = rl_settings(save_model(tmp_path / "model"), write_rows(tmp_path / "rows")[0])
    settings |= {
        "trainer.total_steps": 3,
        "trainer.ckpt_interval": 1,
        "trainer.callbacks": ["tests.support.vision_runs:kill_after_a_step"],
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = command("skyrl_train.main", whole, settings, environment=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    done = command("skyrl_train.main", killed, settings, environment={**paths, "KILL_AFTER_A_STEP": "1"})
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    done = command("skyrl_train.main", killed, settings, environment=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3" in done.stdout
    last = Path("checkpoints/step_000003")
    assert weights([whole / last]) == weights([killed / last])
    assert len(weights([whole / last])) >= 2
    for step in (1, 2, 3):
        name = Path("rollouts") / f"train_step_{step:06d}.parquet"
        one, other = (read_rollouts(each / name) for each in (whole, killed))
        assert one == other
        assert all(turn.images for trajectory in one[step].trajectories for turn in trajectory.turns)
    images = [{file.name: file.read_bytes() for file in (each / "images").iterdir()} for each in (whole, killed)]
    assert images[0] == images[1]
    assert len(images[0]) == 8
