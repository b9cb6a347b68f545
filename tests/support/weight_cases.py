"""Weights on their way to an engine, for tests."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from skyrl_train.weights import Bucket, stored_weights


def in_buckets(weights: Iterable[tuple[str, Tensor]]) -> list[Bucket]:
    """All of them, as a weight sync hands them to an engine of this process."""
    stored = stored_weights(dict(weights))
    return [pending.passed_on() for pending in stored.handed_over(stored.buckets())]
