"""Supervised training on images, in the layouts of either family; and images that cannot be read, in either training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train import runs
from skyrl_train.errors import ConfigError, DataError
from tests.support import warm_python
from tests.support.command_runs import records
from tests.support.vision_runs import (
    forget_images,
    png,
    rl_config,
    rl_settings,
    save_model,
    sft_config,
    sft_settings,
    weights,
    write_rows,
)


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_images(monkeypatch)


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def unweighted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without weights: whoever reads them fails otherwise."""
    folder = tmp_path_factory.mktemp("unweighted") / "model"
    save_model(folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.mark.slow
def test_packed_rows_train_as_padded_ones_and_their_capsules_come_out_again(
    family: str, model: str, tmp_path: Path
) -> None:
    settings = sft_settings(model, write_rows(tmp_path / "rows", 6)[1]) | {
        "trainer.batch_size": 4,
        "trainer.capsules": 1,
        "trainer.ckpt_interval": 2,
    }
    runs.train_sft(sft_config(tmp_path / "padded", settings | {"trainer.layout": "padded"}))
    packed = sft_config(tmp_path / "packed", settings | {"trainer.layout": "packed"})
    if family == "gemma":
        with pytest.raises(ConfigError, match=r"trainer\.layout: must be padded for images of this model's family"):
            runs.train_sft(packed)
    else:
        runs.train_sft(packed)
        one, other = (records(tmp_path / name)[0] for name in ("padded", "packed"))
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert one["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-4)
    run = tmp_path / ("padded" if family == "gemma" else "packed")
    assert {len(file.name) for file in (run / "images").iterdir()} == {64}
    for file in (tmp_path / "rows").iterdir():
        file.unlink()
    done = warm_python.run("-m", "skyrl_train.main_capsule", "run", str(run), "--step", "2")
    assert done.returncode == 0, done.stdout
    checkpoints = [run / "checkpoints/step_000002/policy", run / "capsules/states/step_000002/policy"]
    assert weights(checkpoints[:1]) == weights(checkpoints[1:])


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize(
    ("part", "settings", "reason"),
    [
        ({"path": "none.png"}, {}, "none.png is no file"),
        ({"path": "cut.png"}, {}, "a damaged image"),
        ({"path": "wide.png"}, {"max_pixels": 100}, r"64 x 64 pixels; data\.images\.max_pixels=100"),
        ({"path": "wide.png"}, {"max_bytes": 50}, r"data\.images\.max_bytes=50"),
        ({"bytes": b"GIF89a"}, {}, "not an image|damaged"),
        ({"url": "http://127.0.0.1:9/a.png"}, {}, r"begins with none of data\.images\.urls"),
        ({"url": "http://127.0.0.1:9/a.png"}, {"urls": ["http://127.0.0.1:9"]}, "refused"),
    ],
)
def test_an_image_that_cannot_be_read_is_told_before_weights_are(
    unweighted: str, tmp_path: Path, kind: str, part: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    (tmp_path / "cut.png").write_bytes(png(1)[:-30])
    (tmp_path / "wide.png").write_bytes(png(1, 64))
    question = {"role": "user", "content": [{"type": "image", **part}, {"type": "text", "text": "a"}]}
    good = {"role": "user", "content": "a"}
    rows: list[dict[str, Any]] = []
    for each in (good, question):
        rows.append({"prompt": [each], "answer": "red"} if kind == "rl" else {"messages": [each, ANSWER]})
    if "bytes" in part:
        data, place = tmp_path / "train.parquet", "row 1"
        for row in rows:  # one type for all rows, as Parquet has it
            for message in row.get("prompt", row.get("messages")):
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), data)
    else:
        data, place = tmp_path / "train.jsonl", "line 2"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {f"data.images.{name}": value for name, value in settings.items()}
    begin: dict[str, Callable[[], Any]] = {
        "rl": lambda: runs.train(rl_config(tmp_path / "run", rl_settings(unweighted, str(data)) | changes)),
        "sft": lambda: runs.train_sft(sft_config(tmp_path / "run", sft_settings(unweighted, str(data)) | changes)),
    }
    with pytest.raises(DataError, match=rf"{data.name}, {place}: an image cannot be read: .*({reason})"):
        begin[kind]()


ANSWER = {"role": "assistant", "content": "red"}
