"""Finds the weight, or the trajectory and token, that make a loss or a gradient of a capsule's step bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch, mini_batches, rows_with_loss, tokens_with_loss
from skyrl_train.config import SFTConfig
from skyrl_train.errors import ModelError, NonFiniteError, counted
from skyrl_train.learner import CriticLearner, PolicyLearner, read_tensors
from skyrl_train.model import load_tokenizer
from skyrl_train.runs.capsule import MODELS, Opened, models_of
from skyrl_train.runs.construction.parts import trainer_of
from skyrl_train.trainers import steps
from skyrl_train.trainers.checkpoints import TrainerState

OUTLIER = 10.0
"""A trajectory's gradient norm is out of range from so many times what nine of ten others in its mini-batch have at most."""
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One of a training step."""

    label: str
    learner: PolicyLearner | CriticLearner
    mini_batch: MiniBatch

    def norm_of(self, rows: TrainingInputBatch) -> float:
        """The norm of the gradient of these rows' share of the loss; NaN where it, or the loss, is not finite."""
        with self._gradients(rows) as gradients:
            norm = float(self.learner.engine.strategy.total_norm(gradients)) if gradients else 0.0
            return norm if math.isfinite(norm) and not self.learner.engine.non_finite_loss else math.nan

    def gradient_of(self, rows: TrainingInputBatch) -> Tensor:
        """The gradient of these rows' share of the loss, flat."""
        with self._gradients(rows) as gradients:
            return torch.cat([each.flatten() for each in gradients]) if gradients else torch.zeros(1)

    @contextmanager
    def _gradients(self, rows: TrainingInputBatch) -> Iterator[list[Tensor]]:
        engine = self.learner.engine
        self.learner.forward_backward(replace(self.mini_batch, batch=rows))
        try:
            yield [each.grad for each in engine.parameters.values() if each.grad is not None]
        finally:
            engine.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    is_found: bool
    lines: tuple[str, ...]


def bisect(opened: Opened, *, outlier: bool) -> Found:
    """Look at the rollouts, the weights and the batch first, then compute: for what is not finite, or with `outlier` for the
    trajectory whose gradient is much larger than those of the others."""
    if lines := _of_rollouts(opened) or _of_weights(opened):
        return Found(is_found=True, lines=tuple(lines))
    decode = _decoder(opened)
    if lines := _of_columns(opened.batch(), decode):
        return Found(is_found=True, lines=tuple(lines))
    with models_of(opened) as (learners, state):
        found = optimizer_steps(opened, learners, state)
        return _outlier(found, decode) if outlier else _non_finite(found, decode)


def _of_rollouts(opened: Opened) -> list[str]:
    bad = opened.capsule.bad_inputs
    if not bad:
        return []
    first = bad[0]
    token = "" if first.column == "reward" else f", response token {first.token}"
    return [
        f"a rollout has a number that is not finite ({len(bad)} found): {first.column} is {first.value}",
        f"  trajectory {first.uid}/{first.sample}, turn {first.turn}{token}:",
        f"    {first.text}",
    ]


def _of_weights(opened: Opened) -> list[str]:
    lines = []
    for name in MODELS:
        folder = opened.before / name
        for what in ("model", "optimizer") if folder.is_dir() else ():
            tensors = read_tensors(folder, "model" if what == "model" else "optimizer")
            for parameter, (count, first) in non_finite_tensors(tensors).items():
                place = [int(index) for index in torch.unravel_index(torch.tensor(first), tensors[parameter].shape)]
                lines.append(f"  {name} {what}: {parameter}, {count} of {tensors[parameter].numel()}, first at {place}")
    if lines:
        lines.insert(0, "a weight itself is not finite, so that whatever row passes through it is not, either:")
    return lines


def _of_columns(batch: TrainingInputBatch, decode: Decode | None) -> list[str]:
    bad = non_finite_column(batch)
    if bad is None:
        return []
    place = place_of(batch, bad.row, bad.position, decode)
    return [
        f"the batch has numbers that are not finite: {bad.name} of {counted(bad.count, 'token')}, first {bad.value}:",
        f"  {place}",
        f"  {_numbers(batch, bad.row, bad.position)}",
    ]


def optimizer_steps(opened: Opened, learners: steps.Learners, state: TrainerState) -> Iterator[OptimizerStep]:
    """Yield the optimizer steps of the training step, each with the models as they were; of a refused step, that which was
    refused alone. Each is taken when the next one is asked for."""
    if isinstance(opened.config, SFTConfig):
        policy = cast("PolicyLearner", learners.policy)
        yield OptimizerStep(label="policy, the step's one optimizer step", learner=policy, mini_batch=opened.closed())
        return
    trainer, refusal, batch = trainer_of(opened.config), opened.capsule.refusal, opened.batch()
    algorithm, metadata = trainer.algorithm, batch.metadata
    preparer = steps.MiniBatchPreparer(learners.policy, algorithm, state.entropy_controller)
    named = (
        ("critic", learners.critic, metadata.critic_mini_batch_boundaries),
        ("policy", learners.policy, metadata.policy_mini_batch_boundaries),
    )
    for name, learner, boundaries in named:
        is_other = refusal is not None and refusal.learner not in ("", name)
        is_warmed = name == "critic" or learners.critic is None or metadata.global_step > algorithm.critic_warmup_steps
        if learner is None or boundaries is None or is_other or not is_warmed:
            continue
        model = cast("PolicyLearner | CriticLearner", learner)
        total = trainer.update_epochs_per_batch * len(boundaries)
        for number in range(refusal.optimizer_steps if refusal else 0, total):
            closed = next(
                mini_batches(
                    batch,
                    [boundaries[number % len(boundaries)]],
                    loss_reduction=algorithm.loss_reduction,
                    max_sequence_length_for_norm=algorithm.max_sequence_length_for_norm,
                    normalize_advantages=algorithm.normalize_advantages,
                )
            )
            ready = preparer.prepare(closed)[0] if name == "policy" else closed
            yield OptimizerStep(
                label=f"{name}, optimizer step {number + 1} of {total}", learner=model, mini_batch=ready
            )
            if refusal is not None:
                return
            found = {**model.forward_backward(ready), **model.optim_step()}
            if name == "policy":
                preparer.observe(found)


def refuse_again(opened: Opened) -> str:
    """Take the optimizer step that was refused, and return why it is refused here; empty where it is not."""
    with models_of(opened) as (learners, state):
        refused = next(optimizer_steps(opened, learners, state))
        try:
            refused.learner.forward_backward(refused.mini_batch)
            refused.learner.optim_step()
        except NonFiniteError as error:
            return str(error)
    return ""


def _non_finite(found: Iterator[OptimizerStep], decode: Decode | None) -> Found:
    count = 0
    for step in found:
        count += 1
        parts = _by_trajectory(step.mini_batch.batch)
        rows = step.mini_batch.batch

        def is_bad(some: Sequence[Tensor], step: OptimizerStep = step, rows: TrainingInputBatch = rows) -> bool:
            return not math.isfinite(step.norm_of(rows.take(torch.cat(list(some)))))

        if parts and is_bad(parts):
            return Found(is_found=True, lines=tuple(_first_token(step, halve(parts, is_bad), decode)))
    said = f"nothing is found in {counted(count, 'optimizer step')}: loss and gradient are finite here"
    return Found(is_found=False, lines=(said,))


def _first_token(step: OptimizerStep, parts: Sequence[Tensor], decode: Decode | None) -> list[str]:
    rows = step.mini_batch.batch
    if len(parts) > 1:
        uids = [rows.metadata.uids[int(part[0])] for part in parts]
        return [
            f"{step.label}: the gradient is not finite, though that of each half of these {len(parts)} trajectories is: "
            "they overflow together",
            f"  {', '.join(uids)}",
        ]
    bad = rows.take(parts[0])
    tokens = tokens_with_loss(bad).nonzero().squeeze(1)

    def is_bad(count: int) -> bool:
        return not math.isfinite(step.norm_of(with_loss_on(bad, _marked(bad, tokens[:count]))))

    token = int(tokens[first_bad(len(tokens), is_bad)])
    head = f"{step.label}: loss or gradient is not finite from this token on:"
    return [head, *_described(rows, parts[0], bad, token, decode)]


def _outlier(found: Iterator[OptimizerStep], decode: Decode | None) -> Found:
    best, lines, ranked = 0.0, list[str](), list[tuple[float, str]]()
    for step in found:
        rows = step.mini_batch.batch
        parts = _by_trajectory(rows)
        norms = _largest_norms(step, rows, parts)
        for index, norm in norms.items():
            name = str(place_of(rows, int(parts[index][0]), 0, None)).partition(",")[0]
            ranked.append((norm, f"{name} ({step.label})"))
        top = max(norms, key=norms.__getitem__, default=-1)
        others = ninth_decile([norm for index, norm in norms.items() if norm and index != top])
        ratio = norms[top] / others if others > 0 else 0.0
        if ratio <= best:
            continue
        best = ratio
        lines = [
            f"{step.label}: a gradient norm of {norms[top]:.4g}, {ratio:.3g} times what nine of ten others have at most, of "
            f"{counted(len(norms) - 1, 'other')} that were looked at by themselves"
        ]
        if ratio >= OUTLIER:
            told, alone = _largest_token(step, rows, parts[top], decode)
            lines = [f"{lines[0]}; this token alone has {alone:.4g}:", *told]
    listed = [f"  {norm:<12.4g}{name}" for norm, name in sorted(ranked, reverse=True)[:_SHOWN]]
    head = "" if best >= OUTLIER else f"no gradient is {OUTLIER:g} times what the others have; the largest: "
    return Found(is_found=best >= OUTLIER, lines=(head + "".join(lines[:1]), *lines[1:], "largest norms:", *listed))


def _largest_norms(step: OptimizerStep, rows: TrainingInputBatch, parts: Sequence[Tensor]) -> dict[int, float]:
    """The norms of the gradients of those trajectories, by index, that may be the largest."""

    def norm(some: Sequence[int]) -> float:
        return step.norm_of(rows.take(torch.cat([parts[index] for index in some])))

    return suspects(len(parts), norm)


def _largest_token(
    step: OptimizerStep, rows: TrainingInputBatch, part: Tensor, decode: Decode | None
) -> tuple[list[str], float]:
    """The token of a trajectory whose gradient is the largest, described, and that gradient's norm."""
    bad = rows.take(part)
    token, alone = largest_part(
        tokens_with_loss(bad).nonzero().squeeze(1).tolist(),
        lambda some: step.gradient_of(with_loss_on(bad, _marked(bad, torch.tensor(some)))),
    )
    return _described(rows, part, bad, token, decode), alone


def _by_trajectory(batch: TrainingInputBatch) -> list[Tensor]:
    """Return the rows with loss of each trajectory, in order."""
    rows = rows_with_loss(batch)
    numbers = batch["trajectory_index"][rows]
    return [rows[numbers == number] for number in dict.fromkeys(numbers.tolist())]


def _marked(batch: TrainingInputBatch, tokens: Tensor) -> Tensor:
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[tokens] = True
    return mask


def _described(
    rows: TrainingInputBatch, part: Tensor, taken: TrainingInputBatch, token: int, decode: Decode | None
) -> list[str]:
    """Describe a token of what was `taken` of the rows: of the `part` of them that is one trajectory."""
    of_part = int(torch.searchsorted(taken.row_offsets, token, right=True)) - 1
    row, position = int(part[of_part]), token - int(taken.row_offsets[of_part])
    return [f"  {place_of(rows, row, position, decode)}", f"  {_numbers(rows, row, position)}"]


def _numbers(batch: TrainingInputBatch, row: int, position: int) -> str:
    """What the batch says of a token."""
    token = int(batch.row_offsets[row]) + position
    return ", ".join(f"{name} {float(batch[name][token]):.4g}" for name in CAUSES if name in batch)


def _decoder(opened: Opened) -> Decode | None:
    """Return what makes text of token ids; None where the tokenizer is not on this machine."""
    try:
        tokenizer = load_tokenizer(opened.config.model)
    except ModelError:
        return None
    return lambda ids: str(tokenizer.decode(ids))


T = TypeVar("T")
Decode = Callable[[list[int]], str]
"""Gives the text of token ids, special tokens included."""
CAUSES = ("rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "advantages")
"""Columns of a batch, each of which may be made of those before it."""
_GROUPS = 2
"""That are looked at item by item."""
_BEFORE, _BEHIND = 24, 8
"""Tokens that are shown around one."""


@dataclass(frozen=True, kw_only=True)
class TokenPlace:
    """One token of a batch, as a reader of rollouts knows it."""

    uid: str
    sample: int
    turn: int
    position: int
    """Of the token in its row, from 0."""
    token_id: int
    text: str
    """The token and what is around it, with the token between `>>` and `<<`; ids where there is no tokenizer."""

    def __str__(self) -> str:
        return (
            f"trajectory {self.uid}/{self.sample}, turn {self.turn}, position {self.position}, token {self.token_id}:"
            f"\n    {self.text}"
        )


def place_of(batch: TrainingInputBatch, row: int, position: int, decode: Decode | None) -> TokenPlace:
    """Describe the token at `position` of a row."""
    start, stop = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
    ids = batch["input_ids"][start:stop].tolist()
    prompts = batch["prompt_index"]
    numbers = batch["trajectory_index"][prompts == prompts[row]]
    first = numbers[numbers >= 0].min()
    return TokenPlace(
        uid=batch.metadata.uids[row],
        sample=int(batch["trajectory_index"][row] - first),
        turn=int(batch["step_index"][row]) + _turns_before(batch, start, start + position),
        position=position,
        token_id=ids[position],
        text=in_context(ids, position, decode),
    )


def _turns_before(batch: TrainingInputBatch, start: int, token: int) -> int:
    """Return how many responses of the row ended before this token."""
    mask = batch["response_mask"] if "response_mask" in batch else batch["loss_mask"]
    seen = mask[start : token + 1].int()
    begins = int(((seen[1:] == 1) & (seen[:-1] == 0)).sum()) + int(seen[0])
    return max(0, begins - 1) if int(seen[-1]) else begins


def in_context(ids: Sequence[int], position: int, decode: Decode | None) -> str:
    """Return the token with what is around it."""
    parts = (
        ids[max(0, position - _BEFORE) : position],
        ids[position : position + 1],
        ids[position + 1 : position + 1 + _BEHIND],
    )
    shown = [str(list(part)) if decode is None else decode(list(part)) for part in parts]
    return f"{shown[0]}>>{shown[1]}<<{shown[2]}"


def non_finite_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return, for each tensor with numbers that are not finite, how many, and its first index among the flat ones."""
    found = {}
    for name, tensor in tensors.items():
        bad = ~tensor.flatten().isfinite() if tensor.is_floating_point() else None
        if bad is not None and bool(bad.any()):
            found[name] = int(bad.sum()), int(bad.nonzero()[0])
    return found


@dataclass(frozen=True, kw_only=True)
class BadColumn:
    """A column of a batch with numbers that are not finite."""

    name: str
    count: int
    row: int
    position: int
    """Of the first such number in its row, from 0."""
    value: float


def non_finite_column(batch: TrainingInputBatch) -> BadColumn | None:
    """Return the first column, in the order in which they are made of one another, that is not finite where it counts."""
    padding = torch.repeat_interleave(batch["is_padding"], batch.lengths)
    for name in CAUSES:
        if name not in batch:
            continue
        column = batch[name]
        bad = ~column.isfinite() & ~padding & (batch["loss_mask"] | torch.tensor(name == "rewards"))
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
            position = token - int(batch.row_offsets[row])
            return BadColumn(name=name, count=int(bad.sum()), row=row, position=position, value=float(column[token]))
    return None


def halve(items: Sequence[T], is_bad: Callable[[Sequence[T]], bool]) -> list[T]:
    """Halve `items`, which are bad together, to one that is bad by itself, or to the fewest found that only are together."""
    left = list(items)
    while len(left) > 1:
        middle = len(left) // 2
        if is_bad(left[:middle]):
            left = left[:middle]
        elif is_bad(left[middle:]):
            left = left[middle:]
        else:
            break
    return left


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int:
    """Return the index of the first of `count` items with which those from the first on become bad: the least n with
    `is_bad(n + 1)`, which all of them are."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return high - 1


def suspects(count: int, size: Callable[[Sequence[int]], float]) -> dict[int, float]:
    """Return the sizes of those of `count` items that are worth a look, by index: all of the two groups that are largest as
    a whole.

    Sizes are those of sums of vectors. One that is ten times the others stands out of a group of the square root of all,
    unless they all point against it; so about three times that many are computed in place of all.
    """
    width = max(1, math.isqrt(count))
    groups = [range(start, min(start + width, count)) for start in range(0, count, width)]
    found = sorted(groups, key=lambda group: -size(group))[:_GROUPS]
    return {index: size([index]) for group in found for index in group}


def largest_part(items: Sequence[T], vector: Callable[[Sequence[T]], Tensor]) -> tuple[T, float]:
    """Halve `items` to one, each time into the half whose vector is longer; the item, and its vector's length.

    Vectors add up: that of the second half is what the first leaves of that of both, so that half of them are computed.
    """
    left, whole = list(items), vector(items)
    while len(left) > 1:
        middle = len(left) // 2
        first = vector(left[:middle])
        rest = whole - first
        left, whole = (left[:middle], first) if first.norm() >= rest.norm() else (left[middle:], rest)
    return left[0], float(whole.norm())


def with_loss_on(batch: TrainingInputBatch, tokens: Tensor) -> TrainingInputBatch:
    """The batch with loss on these tokens alone, `[num_tokens]` bool; what they read stays."""
    changed = {"loss_mask": batch["loss_mask"] & tokens}
    if "response_mask" not in batch:
        changed["response_mask"] = batch["loss_mask"]
    if "loss_weights" in batch:
        changed["loss_weights"] = torch.where(tokens, batch["loss_weights"], 0.0)
    return batch.with_columns(**changed)


def ninth_decile(values: Sequence[float]) -> float:
    """Return the value that nine of ten do not exceed: what is large among them, where most may be near 0; NaN where there
    is none."""
    ranked = sorted(values)
    return ranked[int(0.9 * (len(ranked) - 1))] if ranked else math.nan
