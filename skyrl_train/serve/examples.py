"""From a client's examples to the rows of a pass, and from what the pass found back to the examples.

An example has tokens `a b c` and at each of them a target, or several. Where the targets are the next tokens, as they are in
nearly all, the example is one row, `a b c` and the last target. Any other target is a row of its own that ends with it,
`a b x`: the pass computes common beginnings once where its layout shares them, and no loss needs to know.

    tokens  a b c     targets  b c d    ->  rows  a b c d
    tokens  a b c     targets  b x d    ->  rows  a b c d,  a b x        (of the first, c carries no loss)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_train.batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.learner import TokenLosses
from skyrl_train.registry import TARGET
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import Datum, ForwardBackward
from skyrl_train.system.files import shown

_MAX_ROW_TOKENS = 1 << 22
"""Of all rows of one request."""
_OF_RL = ("logprobs", "advantages")
_LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": _OF_RL,
    "ppo": _OF_RL,
    "cispo": _OF_RL,
    "dro": _OF_RL,
}
"""What each loss reads beside `target_tokens` and `weights`."""
_REFUSED = {
    "stable_reinforce": "it has no public formula. Take importance_sampling",
    "gspo": "it has no public formula of this API. Take importance_sampling or ppo",
    "custom": "nothing that a client sends is executed here. TrainingClient.forward_backward_custom computes on your side",
}


def loss_of(name: str, config: Mapping[str, float | str]) -> AlgorithmConfig:
    """Return the registered loss of that name, with its arguments.

    Formulas and defaults are those of tinker-docs.thinkingmachines.ai/tinker/losses: `ppo` clips ratios to 0.8 and 1.2,
    `cispo` to 0 and 4, and losses of tokens are added up. Raises Refused for another name or argument.
    """
    if name in _REFUSED or name not in _LOSSES:
        why = _REFUSED.get(name, f"it is none of {', '.join(_LOSSES)}")
        raise Refused(f"loss_fn={name[:40]!r} is not served: {why}")
    taken = {"ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, "dro": {"beta": 0.05}}
    taken["cispo"] = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    values = dict(taken.get(name, {}))
    for key, value in config.items():
        if key not in values or isinstance(value, str) or not 0 <= value < float("inf"):
            names = ", ".join(values) or "nothing"
            raise Refused(f"loss_fn_config.{key[:40]}={shown(value)}: {name} takes {names}, as numbers from 0 on")
        values[key] = float(value)
    if name == "dro":
        return AlgorithmConfig(policy_loss={TARGET: "dro", **values})
    if "clip_low_threshold" not in values:
        return AlgorithmConfig(policy_loss=name)
    low, high = values["clip_low_threshold"], values["clip_high_threshold"]
    if not low <= 1 <= high:
        raise Refused(
            f"loss_fn_config: clip_low_threshold {low:g} must be at most 1, clip_high_threshold {high:g} at least 1"
        )
    return AlgorithmConfig(policy_loss={"ppo": "regular"}.get(name, name), eps_clip_low=1 - low, eps_clip_high=high - 1)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples as rows."""

    batch: TrainingInputBatch | None
    """None where no example has any target."""
    places: NDArray[np.int64]
    """`[number of targets that are computed]`: where each is among the batch's tokens."""
    targets: NDArray[np.int64]
    """`[the same]`: and among all targets of all examples, one example after the other."""
    shapes: Sequence[tuple[int, ...]]
    """Of the targets of each example: `[n]` or `[n, k]`."""

    def outputs(self, found: TokenLosses | None) -> list[dict[str, NDArray[np.float32]]]:
        """Return what a pass over the batch found, for each example; 0 at targets that are not computed."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        columns = {"logprobs": np.zeros(sum(sizes), np.float32), "elementwise_loss": np.zeros(sum(sizes), np.float32)}
        if found is not None:
            columns["logprobs"][self.targets] = found.logprobs.numpy()[self.places]
            columns["elementwise_loss"][self.targets] = found.losses.numpy()[self.places]
        ends = np.cumsum([0, *sizes])
        return [
            {name: column[ends[i] : ends[i + 1]].reshape(shape) for name, column in columns.items()}
            for i, shape in enumerate(self.shapes)
        ]


class _Rows:
    """Rows as they are collected."""

    def __init__(self) -> None:
        self.tokens: list[NDArray[np.int64]] = []
        self.num_tokens = 0
        self.places: list[NDArray[np.int64]] = []
        self.targets: list[NDArray[np.int64]] = []

    def add(self, tokens: NDArray[np.int64], places: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """A row with targets at these places of it."""
        self.places.append(places + self.num_tokens)
        self.targets.append(targets)
        self.tokens.append(tokens)
        self.num_tokens += len(tokens)
        if self.num_tokens > _MAX_ROW_TOKENS:
            raise Refused(f"the examples become more than {_MAX_ROW_TOKENS} tokens; send fewer at once", status=413)


def rows_of(request: ForwardBackward, *, vocabulary: int, max_length: int) -> Examples:
    """Return the rows of a pass. Raises Refused naming the example and what is wrong with it."""
    rows = _Rows()
    columns: dict[str, list[NDArray[np.float32]]] = {"weights": [], "logprobs": [], "advantages": []}
    shapes: list[tuple[int, ...]] = []
    before = 0
    for number, datum in enumerate(request.data):
        try:
            targets, inputs = _checked(datum, request.loss, vocabulary=vocabulary, max_length=max_length)
        except Refused as error:
            raise Refused(f"example {number}: {error}") from None
        for name, column in columns.items():
            column.append(inputs.get(name, np.zeros_like(targets, dtype=np.float32)).reshape(-1))
        _add_rows(rows, datum.tokens, targets, inputs["weights"], before)
        shapes.append(targets.shape)
        before += targets.size
    places, chosen = _cat(rows.places), _cat(rows.targets)
    if not len(places):
        return Examples(batch=None, places=places, targets=chosen, shapes=shapes)
    flat = {name: np.concatenate(column)[chosen] for name, column in columns.items()}
    return Examples(batch=_batch(rows, places, flat), places=places, targets=chosen, shapes=shapes)


def _add_rows(
    rows: _Rows, tokens: NDArray[np.int64], targets: NDArray[np.int64], weights: NDArray[np.float32], before: int
) -> None:
    """The rows of one example, whose first target is number `before` of all."""
    if not targets.size:
        return
    if targets.ndim == 1:
        is_next = np.append(targets[:-1] == tokens[1:], True)
        main = np.flatnonzero(is_next)
        rows.add(np.append(tokens, targets[-1]), main + 1, before + main)
        others = np.argwhere(~is_next)
    else:  # several at a position, most of which a sparse tensor leaves out
        others = np.argwhere(weights != 0)
    for cell in others:
        at = int(cell[0])
        number = at if targets.ndim == 1 else at * targets.shape[1] + int(cell[1])
        row = np.append(tokens[: at + 1], targets[tuple(cell)])
        rows.add(row, np.array([at + 1]), np.array([before + number]))


def _checked(
    datum: Datum, loss: str, *, vocabulary: int, max_length: int
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]:
    """Return the targets, and the other inputs in their shape. Raises Refused."""
    reads = _LOSSES[loss]
    unknown = [name for name in datum.inputs if name not in ("target_tokens", "weights", *reads)]
    missing = [name for name in ("target_tokens", *reads) if name not in datum.inputs]
    if unknown or missing:
        what = f"does not read {unknown[0][:40]!r}" if unknown else f"needs {missing[0]!r}"
        raise Refused(f"loss_fn={loss!r} {what} in loss_fn_inputs")
    size = len(datum.tokens)
    if size + 1 > max_length:
        raise Refused(f"{size} tokens and a target are more than the context length of {max_length}")
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i" or targets.shape[:1] != (size,):
        raise Refused(f"target_tokens must be whole numbers, one for each of {size} tokens; got {list(targets.shape)}")
    for name, ids in (("token", datum.tokens), ("target", targets)):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise Refused(f"a {name} is {ids.min()} or {ids.max()}; token ids are from 0 to {vocabulary - 1}")
    inputs = {"weights": np.ones(targets.shape, np.float32)}
    for name in ("weights", *reads):
        if name in datum.inputs:
            given = datum.inputs[name]
            if given.shape != targets.shape:
                raise Refused(f"{name} has the shape {list(given.shape)}, target_tokens {list(targets.shape)}")
            if not np.isfinite(given).all():
                raise Refused(f"{name} has a value that is not finite")
            inputs[name] = given.astype(np.float32)
    return targets.astype(np.int64), inputs


def _batch(rows: _Rows, places: NDArray[np.int64], flat: Mapping[str, NDArray[np.float32]]) -> TrainingInputBatch:
    at = torch.from_numpy(places)

    def column(values: torch.Tensor | bool, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.zeros(rows.num_tokens, dtype=dtype)
        whole[at] = values if isinstance(values, bool) else values.to(dtype)
        return whole

    return batch_of_lengths([len(each) for each in rows.tokens]).with_columns(
        input_ids=torch.from_numpy(np.concatenate(rows.tokens)).to(torch.int32),
        loss_mask=column(True, torch.bool),
        old_logprobs=column(torch.from_numpy(flat["logprobs"]), torch.float32),
        advantages=column(torch.from_numpy(flat["advantages"]), torch.float32),
        loss_weights=column(torch.from_numpy(flat["weights"]), torch.float64),
    )


def _cat(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts])
