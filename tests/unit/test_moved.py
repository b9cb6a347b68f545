"""Modules that moved are found by their paths of before, with a warning that names today's."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from skyrl_train import MOVED


@pytest.mark.parametrize("before", MOVED)
def test_a_path_of_before_gives_the_module_of_today(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, before, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{before} is {MOVED[before]} now"):
        assert import_module(before) is import_module(MOVED[before])
