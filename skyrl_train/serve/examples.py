"""What a client's examples and the name of a loss mean to the learner; what is wrong with them is told by the example."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skyrl_train.batch.steps import TargetRows, Targets, rows_of_targets
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.images import precedes_image
from skyrl_train.registry import TARGET
from skyrl_train.serve.images import PlacedTokens, RequestImages
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import Datum, ForwardBackward
from skyrl_train.system.files import shown

_OF_RL = ("logprobs", "advantages")
_READS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": _OF_RL,
    "ppo": _OF_RL,
    "cispo": _OF_RL,
    "dro": _OF_RL,
}
"""What each loss needs beside `target_tokens`; the others take `weights`, too."""
_ARGUMENTS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
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
    if name not in _READS:
        why = _REFUSED.get(name, f"it is none of {', '.join(_READS)}")
        raise Refused(f"loss_fn={name[:40]!r} is not served: {why}")
    values = dict(_ARGUMENTS.get(name, {}))
    for key, value in config.items():
        if key not in values or isinstance(value, str) or not 0 <= value < float("inf"):
            names = ", ".join(values) or "nothing"
            raise Refused(f"loss_fn_config.{key[:40]}={shown(value)}: {name} takes {names}, as numbers from 0 on")
        values[key] = float(value)
    if name == "dro":
        return AlgorithmConfig(policy_loss={TARGET: "dro", **values})
    low, high = values.get("clip_low_threshold", 1.0), values.get("clip_high_threshold", 1.0)
    if not low <= 1 <= high:
        raise Refused(
            f"clip_low_threshold must be at most 1, and clip_high_threshold at least 1; got {low:g} and {high:g}"
        )
    registered = {"ppo": "regular"}.get(name, name)
    return AlgorithmConfig(policy_loss=registered, eps_clip_low=1 - low, eps_clip_high=high - 1)


def rows_of(
    request: ForwardBackward, *, vocabulary: int, max_length: int, images: RequestImages | None = None
) -> TargetRows:
    """Return the rows of a pass; `images` decodes those that it has, if any are taken. Raises Refused naming the example and
    what is wrong with it, BatchError for too many."""
    if not request.data:
        raise Refused("there is no example in the pass; send at least one")
    found, images = [], images or RequestImages(None)
    for number, datum in enumerate(request.data):
        try:
            placed = images.placed(datum.tokens, datum.images)
            found.append(_checked(datum, placed, request.loss, vocabulary=vocabulary, max_length=max_length))
        except Refused as error:
            raise Refused(f"example {number}: {error}") from None
    return rows_of_targets(found)


def _checked(datum: Datum, placed: PlacedTokens, loss: str, *, vocabulary: int, max_length: int) -> Targets:
    reads = _READS[loss]
    unknown = [name for name in datum.inputs if name not in ("target_tokens", "weights", *reads)]
    missing = [name for name in ("target_tokens", *reads) if name not in datum.inputs]
    if unknown or missing:
        what = f"does not read {unknown[0][:40]!r}" if unknown else f"needs {missing[0]!r}"
        raise Refused(f"loss_fn={loss!r} {what} in loss_fn_inputs")
    tokens, images = placed
    size = len(tokens)
    if size + 1 > max_length:
        raise Refused(f"{size} tokens and a target are more than the context length of {max_length}")
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i" or targets.shape[:1] != (size,):
        raise Refused(f"target_tokens must be whole numbers, one for each of {size} tokens; got {list(targets.shape)}")
    for name, ids in (("token", tokens), ("target", targets)):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise Refused(f"a {name} is {ids.min()} or {ids.max()}; token ids are from 0 to {vocabulary - 1}")
    zeros = np.zeros(targets.shape, np.float32)
    inputs = {"weights": zeros + 1, "logprobs": zeros, "advantages": zeros}
    for name in {"weights", *reads}:
        given = datum.inputs.get(name, inputs[name])
        if given.shape != targets.shape:
            raise Refused(f"{name} has the shape {list(given.shape)}, target_tokens {list(targets.shape)}")
        if not np.isfinite(given).all():
            raise Refused(f"{name} has a value that is not finite")
        inputs[name] = given.astype(np.float32)
    counts = inputs["weights"] * (inputs["advantages"] if "advantages" in reads else 1)
    places = np.argwhere(counts)[:, 0]
    if (ahead := places[precedes_image(size, images)[places]]).size:
        what = "advantages" if "advantages" in reads else "weights"
        raise Refused(f"{what} must be 0 at position {ahead[0]}: the next token is of an image, which nothing predicts")
    return Targets(
        token_ids=tokens,
        targets=targets.astype(np.int64),
        weights=inputs["weights"],
        old_logprobs=inputs["logprobs"],
        advantages=inputs["advantages"],
        images=images,
    )
