"""Finds the weight, or the trajectory and token, that make a loss or a gradient of a capsule's step bad."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch, mini_batches, rows_with_loss, tokens_with_loss
from skyrl_train.config import SFTConfig
from skyrl_train.errors import ModelError, NonFiniteError, counted
from skyrl_train.learner import CriticLearner, PolicyLearner, read_tensors
from skyrl_train.model import load_tokenizer
from skyrl_train.runs.capsule import MODELS, Opened, models_of
from skyrl_train.runs.capsule_search import (
    CAUSES,
    Decode,
    first_bad,
    halve,
    largest_part,
    ninth_decile,
    non_finite_column,
    non_finite_tensors,
    place_of,
    suspects,
    with_loss_on,
)
from skyrl_train.runs.construction.parts import ppo_settings
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
    settings, refusal, batch = ppo_settings(opened.config), opened.capsule.refusal, opened.batch()
    trainer, algorithm = settings.trainer, settings.trainer.algorithm
    metadata = batch.metadata
    preparer = steps.MinibatchPreparer(learners.policy, algorithm, state.entropy_controller)
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
