"""One Chromium for all tests of the page: it takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser_pages import start_chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The driver."""
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
