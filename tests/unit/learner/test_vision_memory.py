"""A plan counts the vision tower: its parameters, and what it keeps of images for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from skyrl_train.config import Config
from skyrl_train.errors import ModelError
from skyrl_train.learner.memory.predict import Effort, PredictedPasses
from skyrl_train.model.parallel import check_divisible
from skyrl_train.model.sizes import meta_model, model_sizes, of_depth, read_architecture, read_config, sizes_of_model
from skyrl_train.plan import models_of
from tests.support.vision_cases import make_gemma, make_image, make_vlm

LONGEST, PROMPT = 24, 16
SIZES = {"hidden_size": 64, "intermediate_size": 160}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path, family: str) -> str:
    (make_vlm() if family == "qwen" else make_gemma()).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


def predicted(path: str, **model: Any) -> PredictedPasses:
    config = Config()
    config = replace(
        config,
        platform=replace(config.platform, name="cpu", device="cpu"),
        model=replace(config.model, path=path, **model),
        data=replace(config.data, max_prompt_length=PROMPT),
        generator=replace(config.generator, max_context_length=LONGEST),
    )
    return models_of(config, Effort())["policy"]


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_parameters_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    path, model = saved(tmp_path / "model", family), make_vlm() if family == "qwen" else make_gemma()
    count = sum(each.numel() for each in model.parameters())
    assert model_sizes(path).parameters == count
    assert "vision_config" not in read_config(path)
    shallow = of_depth(read_architecture(path), 1)
    assert sizes_of_model(meta_model(shallow, name="m")).num_layers == 1
    with pytest.raises(ModelError, match="it reads images"):  # before weights are read
        check_divisible(meta_model(read_architecture(path), name="m"), 2, name="m")


@pytest.mark.slow
def test_a_tower_that_stays_as_it_is_has_no_gradients_and_keeps_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", "qwen")
    trained, frozen = predicted(path), predicted(path, freeze=("vision",))
    tower = sum(each.numel() for name, each in make_vlm().named_parameters() if "visual" in name)
    assert trained.counts.trained == trained.counts.total == frozen.counts.total
    assert frozen.counts.trained == trained.counts.total - tower
    kept = trained.estimate("training", 1).kinds["vision tower"]
    assert kept == PROMPT * trained.sizes.tower_bytes(checkpointing=False)
    assert "vision tower" not in frozen.estimate("training", 1).kinds
    assert trained.sizes.tower_bytes(checkpointing=True) < kept / PROMPT


def test_a_stated_architecture_may_have_no_tower_to_freeze() -> None:
    counts = predicted("builtin:tiny_qwen2", freeze=("vision",)).counts
    assert counts.trained == counts.total


def kept_bytes(model: Any, forward: Callable[[], object]) -> int:
    """What autograd saves of a forward, parameters aside."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()  # whose graph must live: another storage could have the same address
    del kept
    return sum(found.values())


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_what_a_tower_keeps_is_what_autograd_saves(family: str) -> None:
    small = (make_vlm() if family == "qwen" else make_gemma()).config.to_dict()
    changes = {"depth": 3} if family == "qwen" else {"num_hidden_layers": 3, "image_size": 32}
    small["vision_config"] |= SIZES | changes
    small |= {} if family == "qwen" else {"mm_tokens_per_image": 64}
    config = AutoConfig.for_model(**small)
    model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    image = make_image(1, 8, 8)
    given = (torch.from_numpy(image.pixels), torch.tensor([image.patches]))
    pixels = given if family == "qwen" else (torch.randn(1, 3, 32, 32),)
    measured = kept_bytes(model, lambda: model.model.get_image_features(*pixels, return_dict=True))
    each = sizes_of_model(model).tower_bytes(checkpointing=False)
    print(f"\n{family}: {each} bytes a token, measured {measured / 64:.0f}")
    assert 64 * each == pytest.approx(measured, rel=0.05)
