"""Hundreds of command lines over the same files: Hydra composes each choice of them once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.composing import presets_composed_once


@pytest.fixture(autouse=True, scope="session")
def _presets_composed_once() -> Iterator[None]:
    with presets_composed_once():
        yield
