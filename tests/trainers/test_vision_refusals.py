"""What is not exact, or not there, for rows with images: refused by name before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_train import runs
from skyrl_train.errors import ConfigError, DataError, ModelError
from tests.support.vision_runs import (
    forget_images,
    rl_config,
    rl_settings,
    save_model,
    sft_config,
    sft_settings,
    write_rows,
)


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_images(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of both families without weights, so that whoever reads these fails otherwise, and rows."""
    found = tmp_path_factory.mktemp("refused")
    for family in ("qwen", "gemma"):
        save_model(found / family, family)
        (found / family / "model.safetensors").unlink()
    write_rows(found / "rows")
    return found


OF_THE_FAMILY = "for images of this model's family, whose tokens see one another"
WITH_IMAGES = "where prompts have images"


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma", {"trainer.layout": "packed"}, rf"trainer\.layout: must be padded {OF_THE_FAMILY}; got 'packed'"),
        ("gemma", {"trainer.layout": "prefix_shared"}, rf"trainer\.layout: must be padded {OF_THE_FAMILY}"),
        ("gemma", {"trainer.layout": "auto"}, rf"trainer\.layout: must be padded {OF_THE_FAMILY}; got 'auto'"),
        ("gemma", {"strategy.sequence_parallel_size": 2}, rf"sequence_parallel_size: must be 1 {OF_THE_FAMILY}; got 2"),
        ("gemma", {"generator.backend": "vllm"}, rf"generator\.backend: must be hf {OF_THE_FAMILY}; got 'vllm'"),
        ("gemma", {"generator.backend": "http"}, rf"generator\.backend: must be hf {OF_THE_FAMILY}; got 'http'"),
        ("qwen", {"generator.backend": "vllm"}, rf"generator\.backend: needs torchvision {WITH_IMAGES}.*; got 'vllm'"),
        ("qwen", {"generator.agent_loop": "agent"}, rf"generator\.agent_loop: must be multi_turn {WITH_IMAGES}"),
        ("qwen", {"critic.model.path": "builtin:tiny_qwen2"}, rf"critic\.model\.path: must be empty {WITH_IMAGES}"),
        (
            "qwen",
            {"reference.model.path": "builtin:tiny_qwen2"},
            rf"reference\.model\.path: must be the policy's model {WITH_IMAGES}",
        ),
        ("qwen", {"generator.privileged_context": "answer"}, rf"privileged_context: must be empty {WITH_IMAGES}"),
        (
            "qwen",
            {"generator.backend": "vllm", "generator.vllm.lora_sync": "adapter", "model.lora.rank": 2},
            rf"generator\.vllm\.lora_sync: must be merged {WITH_IMAGES}.*; got 'adapter'",
        ),
    ],
)
def test_a_part_that_does_not_read_images_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(
        "skyrl_train.config.rules.validate_models.find_spec", lambda _: None
    )  # as where there is no torchvision
    rows = str(folder / "rows" / "asked.jsonl")
    whole = rl_settings(str(folder / family), rows) | {"trainer.layout": "padded"} | settings
    with pytest.raises(ConfigError, match=reason):
        runs.load_data(rl_config(tmp_path / "run", whole))


@pytest.mark.parametrize("layout", ["packed", "auto"])
def test_supervised_rows_of_gemma_are_padded(folder: Path, tmp_path: Path, layout: str) -> None:
    settings = sft_settings(str(folder / "gemma"), str(folder / "rows" / "told.jsonl")) | {"trainer.layout": layout}
    with pytest.raises(ConfigError, match=rf"trainer\.layout: must be padded {OF_THE_FAMILY}; got '{layout}'"):
        runs.train_sft(sft_config(tmp_path / "run", settings))


def test_rows_with_images_are_refused_for_another_family_by_their_row(folder: Path, tmp_path: Path) -> None:
    asked, told = (str(folder / "rows" / name) for name in ("asked.jsonl", "told.jsonl"))
    with pytest.raises(DataError, match=r"asked\.jsonl, line 1: .*the model reads none"):
        runs.train(rl_config(tmp_path / "rl", rl_settings("builtin:tiny_qwen2", asked)))
    with pytest.raises(DataError, match=r"told\.jsonl, line 1: .*the model reads none"):
        runs.train_sft(sft_config(tmp_path / "sft", sft_settings("builtin:tiny_qwen2", told)))


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_a_prompt_is_as_long_as_its_images_make_it(folder: Path, tmp_path: Path, family: str) -> None:
    # Nine of text; of an image four, its beginning and its end, and Gemma's two blank lines around it, of two tokens each.
    length = 9 + 6 + (4 if family == "gemma" else 0)
    settings = rl_settings(str(folder / family), str(folder / "rows" / "asked.jsonl")) | {"trainer.layout": "padded"}
    loaded = runs.load_data(rl_config(tmp_path / "run", settings | {"data.max_prompt_length": length}))
    assert loaded.num_train == 4
    with pytest.raises(DataError, match=rf"the shortest has {length}\."):
        runs.load_data(rl_config(tmp_path / "run", settings | {"data.max_prompt_length": length - 1}))


def test_a_model_without_a_tower_has_none_to_freeze(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n' * 2)
    settings = sft_settings("builtin:tiny_qwen2", str(rows)) | {"model.freeze": ["vision"]}
    with pytest.raises(ModelError, match=r"model\.freeze=\[vision\], and Qwen2ForCausalLM reads no images"):
        runs.train_sft(sft_config(tmp_path / "run", settings))
