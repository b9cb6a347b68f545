"""Images of data rows: where they may come from, and what is refused by its row."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from skyrl_train.config.data import ImagesConfig
from skyrl_train.data.prompts import load_prompts
from skyrl_train.data.rows import Row
from skyrl_train.data.sources.images import REFERENCE, ImageStore, references_in, with_references
from skyrl_train.errors import DataError

NO_SETTINGS = ImagesConfig()


def png(width: int = 8, colour: tuple[int, int, int] = (200, 10, 10)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, 8), colour).save(out, format="PNG")
    return out.getvalue()


def row(tmp_path: Path, **values: Any) -> Row:
    return Row(source="train", index=2, place=f"{tmp_path}/train.jsonl, line 3", values=values)


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]


def test_all_forms_of_one_image_have_one_reference(tmp_path: Path) -> None:
    store, data = ImageStore(), png()
    (tmp_path / "a.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts: list[dict[str, Any]] = [
        {"type": "image", "path": "a.png"},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image", "bytes": data},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    found = [with_references(row(tmp_path, prompt=asked(part)), NO_SETTINGS, store) for part in parts]
    references = [references_in(each.values["prompt"])[0] for each in found]
    assert len(set(references)) == 1
    assert references[0].startswith(REFERENCE)
    assert store.read(references[0]) == data


def test_images_of_a_column_go_to_the_parts_that_have_none_or_before_the_text(tmp_path: Path) -> None:
    store, images = ImageStore(), [{"bytes": png(colour=(9, 9, each)), "path": None} for each in (1, 2)]
    in_parts = row(tmp_path, images=images[:1], prompt=asked({"type": "image"}))
    assert len(references_in(with_references(in_parts, NO_SETTINGS, store).values["prompt"])) == 1
    before = with_references(row(tmp_path, images=images, prompt="what?"), NO_SETTINGS, store).values["prompt"]
    assert [part["type"] for part in before[0]["content"]] == ["image", "image", "text"]


def test_rows_without_images_stay_as_they_are(tmp_path: Path) -> None:
    plain = row(tmp_path, prompt=[{"role": "user", "content": "hi"}], images="of what", image=3)
    assert with_references(plain, NO_SETTINGS, ImageStore()) is plain


@pytest.mark.parametrize(
    ("part", "settings", "problem"),
    [
        ({"type": "image", "path": "none.png"}, {}, "is no file"),
        ({"type": "image", "bytes": b"GIF89a and no more"}, {}, "not an image|damaged"),
        ({"type": "image", "bytes": png()[:-30]}, {}, "damaged"),
        ({"type": "image", "bytes": png(400)}, {"max_pixels": 100}, "400 x 8 pixels; data.images.max_pixels=100"),
        ({"type": "image", "bytes": png()}, {"max_bytes": 10}, "data.images.max_bytes=10"),
        ({"type": "image", "url": "https://a.b/c.png"}, {}, "begins with none of data.images.urls"),
        ({"type": "image"}, {}, "data.images.column"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_row(
    tmp_path: Path, part: dict[str, Any], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"train.jsonl, line 3.*({problem})"):
        with_references(row(tmp_path, prompt=asked(part)), ImagesConfig(**settings), ImageStore())


def test_images_beside_a_file_are_found_whatever_its_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "cats, dogs"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    found = with_references(row(folder, prompt=asked({"type": "image", "path": "a.png"})), NO_SETTINGS, ImageStore())
    assert found.values["prompt"][0]["content"][0]["image"].startswith(REFERENCE)


def test_as_many_images_as_places_for_them(tmp_path: Path) -> None:
    images = [{"bytes": png(), "path": None}] * 2
    with pytest.raises(DataError, match=r"2 images in 'images', and parts .* for 1 of them"):
        with_references(row(tmp_path, images=images, prompt=asked({"type": "image"})), NO_SETTINGS, ImageStore())


def test_a_file_that_was_changed_is_told(tmp_path: Path) -> None:
    store, file = ImageStore(), tmp_path / "a.png"
    file.write_bytes(png())
    found = with_references(row(tmp_path, prompt=asked({"type": "image", "path": "a.png"})), NO_SETTINGS, store)
    file.write_bytes(png(16))
    with pytest.raises(DataError, match="was changed"):
        store.read(references_in(found.values["prompt"])[0])


def test_prompts_of_a_parquet_file_with_encoded_images(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    struct = [{"bytes": png(), "path": "a.png"}]
    table = pa.Table.from_pylist([{"prompt": "what?", "answer": "red", "images": struct}])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    (prompt,) = load_prompts([str(tmp_path / "train.parquet")])
    assert len(references_in(prompt.messages)) == 1
    assert prompt.extras["images"] == references_in(prompt.messages)
    assert np.array_equal(prompt.messages[0]["content"][1]["text"], "what?")


def test_images_of_another_run_are_found_by_their_sums_and_kept(tmp_path: Path) -> None:
    store, data = ImageStore(), png()
    reference = store.add(data)
    store.keep([reference.removeprefix(REFERENCE)], tmp_path / "theirs")
    other = ImageStore()
    other.folder = tmp_path / "own"
    with pytest.raises(DataError, match=rf"{reference} is not in {tmp_path}/own\. Put it back"):
        other.read(reference)
    other.recorded.append(tmp_path / "theirs")
    assert other.read(reference) == data
    assert (tmp_path / "own" / reference.removeprefix(REFERENCE)).read_bytes() == data


def test_what_is_on_disk_does_not_stay_in_memory(tmp_path: Path) -> None:
    store = ImageStore()
    store.folder = tmp_path
    reference = store.add(png())
    assert store.read(reference) == png()
    (tmp_path / reference.removeprefix(REFERENCE)).write_bytes(png(16))
    with pytest.raises(DataError, match="was changed"):
        store.read(reference)
