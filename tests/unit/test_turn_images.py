"""Images of turns in records: names and places, to which pixels are given again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skyrl_train.images import Image, ImageSpan, as_record, from_record, with_pixels

KEY = "0a" * 32
READ = Image(key=KEY, pixels=np.ones((4, 12), np.float32), patches=(1, 2, 2), grid=(1, 1), num_tokens=3)


def test_a_record_names_images_and_their_places() -> None:
    record = as_record((ImageSpan(2, READ),))
    assert record == [[2, 3, KEY]]
    (span,) = from_record(record)
    assert (span.start, span.image.num_tokens, span.image.pixels.size) == (2, 3, 0)
    asked: list[str] = []

    def read(key: str) -> Image:
        asked.append(key)
        return READ

    (found,) = with_pixels((span,), read)
    assert found.image.grid == (1, 1)
    assert with_pixels((found,), read) == (found,)
    assert asked == [KEY]


@pytest.mark.parametrize("record", [[[0, 3]], [[0, 0, KEY]], [[-1, 3, KEY]], [[0, 3, "../x"]], [[0, True, KEY]], 3, {}])
def test_what_is_no_record_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"images must be lists \[start, tokens, SHA-256 sum\]"):
        from_record(record)


def test_an_image_of_which_a_model_makes_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 4 tokens in the record, and this model's processor makes 3"):
        with_pixels((ImageSpan(0, Image(key=KEY, num_tokens=4)),), lambda _: READ)
