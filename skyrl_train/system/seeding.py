"""Randomness is derived, not carried: each seed is a pure function of what it is for.

A run that is killed and resumed draws the same numbers, because nothing about them has to be saved.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `(seed, purpose, indices)`, e.g. `derive_seed(1, "sample", step, prompt, sample, turn)`.

    BLAKE2b over the decimal text, so that it is the same on every platform and Python version.
    """
    text = ":".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
