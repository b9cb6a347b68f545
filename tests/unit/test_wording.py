from __future__ import annotations

import pytest

from skyrl_train.wording import byte_size, counted, every, three_digits


@pytest.mark.parametrize(
    ("count", "name", "shown"),
    [(1, "step", "1 step"), (0, "step", "0 steps"), (2, "batch", "2 batches"), (3, "trajectory", "3 trajectories")],
)
def test_one_thing_has_another_form_than_several(count: int, name: str, shown: str) -> None:
    assert counted(count, name) == shown
    assert (every(1, "step"), every(4, "step")) == ("every step", "every 4 steps")


def test_no_size_is_written_with_a_power_of_ten() -> None:
    sizes = (512, 999, 1000, 999_499, 999_500, 999_999, 1_000_000, 3_930_000, 5 * 10**15)
    shown = ["512 B", "999 B", "1 kB", "999 kB", "1 MB", "1 MB", "1 MB", "3.93 MB", "5,000 TB"]
    assert [byte_size(size) for size in sizes] == shown
    assert [three_digits(value) for value in (0.0123, 999.4, 999.5, 1024.4)] == ["0.0123", "999", "1,000", "1,024"]
