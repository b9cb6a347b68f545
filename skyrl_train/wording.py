"""Counts and sizes as people write them: one form for one thing, and no powers of ten where digits are as short."""

from __future__ import annotations


def counted(count: int, name: str, spec: str = "") -> str:
    """Return `1 step`, `3 steps`, `2 batches`, `4 trajectories`. `spec` is the count's format, `,` say.

    Example:
        >>> counted(1, "held-out prompt"), counted(2048, "batch", ",")
        ('1 held-out prompt', '2,048 batches')
    """
    if count != 1:
        name = name[:-1] + "ies" if name.endswith("ry") else name + ("es" if name.endswith("ch") else "s")
    return f"{count:{spec}} {name}"


def every(count: int, name: str) -> str:
    """Return `every step`, `every 3 steps`."""
    return f"every {name}" if count == 1 else f"every {counted(count, name)}"


def three_digits(value: float) -> str:
    """Return a number with three digits that count, and whole ones in full: `0.0123`, `1.89`, `15.6`, `1,024`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def byte_size(count: float) -> str:
    """Return `512 B`, `1.89 kB`, `3.93 MB`, up to TB, of powers of 1000."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while power < len(units) - 1 and abs(count) >= (1000 if power == 0 else 999.5):
        count, power = count / 1000, power + 1
    return f"{three_digits(count)} {units[power]}"
