"""How many graphs torch compiles of flex attention, with a back end that runs on a CPU what it is given."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as library

from skyrl_train.batch.layouts import Segment
from skyrl_train.errors import ModelError
from skyrl_train.model.layers import attention
from skyrl_train.model.layers.segments import Segments

pytestmark = pytest.mark.slow
SIZES = (300, 513, 700, 1111, 128, 127, 64, 640)


def attend(positions: int, *, training: bool, window: int | None = None) -> None:
    third = positions // 3
    tree = (
        Segment(0, third, positions),
        Segment(third, 2 * third, 2 * third),
        Segment(2 * third, positions, positions),
    )
    query, key, value = (torch.randn(1, heads, positions, 16, requires_grad=training) for heads in (4, 2, 2))
    with torch.set_grad_enabled(training):
        segments = Segments(tree, positions)
        found = attention.flex(query, key, value, segments, scale=0.1, window=window, compiled=True)
    expected = attention.masked_attention(query, key, value, segments, scale=0.1, window=window)
    torch.testing.assert_close(found, expected)


def test_one_graph_serves_forwards_of_all_sizes_and_one_too_many_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    flex = attention.compiled_flex(counter)
    monkeypatch.setattr(attention, "compiled_flex", lambda: flex)
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)  # which refuses a backward on a CPU
    for positions in SIZES:
        attend(positions, training=True)
    for positions in SIZES:
        attend(positions, training=False)
    assert counter.frame_count == 2
    assert config.recompile_limit >= attention.MOST_FLEX_GRAPHS
    with config.patch(recompile_limit=2), pytest.raises(ModelError, match="more than 64 compiled graphs"):
        attend(300, training=False, window=64)
