"""Dynamic sampling: train on prompts whose trajectories have differing rewards, since the others teach nothing.

DAPO, arXiv:2503.14476, section 3.2. Works on rollouts, by whole prompts, before assembly. Pure: state and one generated
batch in, the next state and perhaps a full training batch out; the state goes into a checkpoint as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.algorithms.filters import differing_prompts
from skyrl_train.config.algorithm import FilterConfig
from skyrl_train.errors import CheckpointError, DataError, counted
from skyrl_train.telemetry.records import decode_trajectory, encode_trajectory
from skyrl_train.types import Prompt, RolloutBatch, Trajectory

DECLARED_METRICS = """
sampling/batches | count | Batches of prompts sampled for the step. | with `filters.dynamic_sampling` | verl
    `train/num_gen_batches`
sampling/prompts_seen | count | Their prompts. | with `filters.dynamic_sampling`
sampling/prompts_differing_fraction | share | Prompts whose samples differ in reward. | with `filters.dynamic_sampling`
"""


@dataclass(frozen=True, kw_only=True)
class SamplingState:
    """What was kept for the training batch that is being collected. Empty between training batches."""

    kept: RolloutBatch | None = None
    num_batches: int = 0
    """Generated for this training batch so far."""
    num_prompts_seen: int = 0

    def to_json(self) -> dict[str, Any]:
        kept = self.kept
        pairs = (
            []
            if kept is None
            else zip((p for p in kept.prompts for _ in range(kept.n_samples_per_prompt)), kept.trajectories)
        )
        return {
            "num_batches": self.num_batches,
            "num_prompts_seen": self.num_prompts_seen,
            "n_samples_per_prompt": 0 if kept is None else kept.n_samples_per_prompt,
            "kept": [encode_trajectory(prompt, trajectory) for prompt, trajectory in pairs],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> SamplingState:
        """Read the exact inverse of `to_json`, where prompts hold JSON values. Raises CheckpointError."""
        try:
            n_samples = int(content["n_samples_per_prompt"])
            decoded = [decode_trajectory(record) for record in content["kept"]]
            kept = None
            if decoded:
                prompts = tuple(prompt for prompt, _ in decoded[::n_samples])
                trajectories = tuple(trajectory for _, trajectory in decoded)
                kept = RolloutBatch(prompts=prompts, trajectories=trajectories, n_samples_per_prompt=n_samples)
            return SamplingState(
                kept=kept, num_batches=int(content["num_batches"]), num_prompts_seen=int(content["num_prompts_seen"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"dynamic sampling's state is damaged ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, kw_only=True)
class Sampled:
    state: SamplingState
    """For the next generated batch."""
    rollouts: RolloutBatch | None
    """A full training batch, or None: generate another batch of prompts."""
    metrics: Mapping[str, float]
    """`sampling/...`, of the training batch so far."""


def sample_dynamically(
    state: SamplingState, generated: RolloutBatch, *, num_prompts: int, config: FilterConfig
) -> Sampled:
    """Adds one generated batch (rewards already shaped) towards a training batch of `num_prompts` prompts.

    none: the generated batch is the training batch. filter: prompts with differing rewards are collected until there
    are `num_prompts`; what is over is dropped, so that no training batch holds rollouts of older weights. replace: if
    at least `replace_min_share` of the prompts differ, the others are replaced by copies of those in turn, under uids
    of their own (`uid#copy1`); else the batch is dropped. Failed trajectories have no reward to compare.

    Raises DataError after `dynamic_sampling_max_batches` batches without a full training batch.
    """
    if config.dynamic_sampling == "none":
        return Sampled(state=SamplingState(), rollouts=generated, metrics={})
    differing = differing_prompts(generated)
    seen = state.num_prompts_seen + len(generated.prompts)
    num_batches = state.num_batches + 1
    kept: RolloutBatch | None
    if config.dynamic_sampling == "filter":
        kept = _joined(state.kept, _select(generated, [index for index, differs in enumerate(differing) if differs]))
        full = len(kept.prompts) >= num_prompts
        rollouts = _select(kept, range(num_prompts)) if full else None
    else:
        kept = None
        enough = any(differing) and sum(differing) >= config.replace_min_share * len(differing)
        rollouts = _replaced(generated, differing) if enough else None
    num_kept = len(kept.prompts) if kept is not None else sum(differing)
    metrics = {
        "sampling/batches": float(num_batches),
        "sampling/prompts_seen": float(seen),
        "sampling/prompts_differing_fraction": num_kept / seen if kept is not None else num_kept / len(differing),
    }
    if rollouts is not None:
        return Sampled(state=SamplingState(), rollouts=rollouts, metrics=metrics)
    if num_batches >= config.dynamic_sampling_max_batches:
        found = (
            f" gave {counted(num_kept, 'prompt')} whose trajectories differ in reward, where {num_prompts} are needed"
        )
        if kept is None:
            least = f"trainer.algorithm.filters.replace_min_share={config.replace_min_share:g}"
            found = f", in none of which {least} of the prompts have trajectories that differ in reward"
        raise DataError(
            f"dynamic sampling: {counted(num_batches, 'generated batch')} ({counted(seen, 'prompt')}){found}. "
            "The task is too easy or too hard for the model, or generator.n_samples_per_prompt is too small; to go on "
            "without, set trainer.algorithm.filters.dynamic_sampling=none"
        )
    return Sampled(
        state=replace(state, kept=kept, num_batches=num_batches, num_prompts_seen=seen), rollouts=None, metrics=metrics
    )


def _group(rollouts: RolloutBatch, index: int) -> tuple[Trajectory, ...]:
    start = index * rollouts.n_samples_per_prompt
    return rollouts.trajectories[start : start + rollouts.n_samples_per_prompt]


def _select(rollouts: RolloutBatch, indices: Iterable[int]) -> RolloutBatch:
    chosen = list(indices)
    return replace(
        rollouts,
        prompts=tuple(rollouts.prompts[index] for index in chosen),
        trajectories=tuple(trajectory for index in chosen for trajectory in _group(rollouts, index)),
    )


def _joined(first: RolloutBatch | None, second: RolloutBatch) -> RolloutBatch:
    """Join two; a prompt that is in both keeps its earlier group: a batch may hold a prompt once."""
    if first is None:
        return second
    known = {prompt.uid for prompt in first.prompts}
    second = _select(second, [index for index, prompt in enumerate(second.prompts) if prompt.uid not in known])
    return replace(first, prompts=first.prompts + second.prompts, trajectories=first.trajectories + second.trajectories)


def _replaced(rollouts: RolloutBatch, differing: tuple[bool, ...]) -> RolloutBatch:
    sources = [index for index, differs in enumerate(differing) if differs]
    prompts: list[Prompt] = []
    trajectories: list[Trajectory] = []
    num_copies = 0
    for index, differs in enumerate(differing):
        source = index
        uid = rollouts.prompts[index].uid
        if not differs:
            source = sources[num_copies % len(sources)]
            uid = f"{rollouts.prompts[source].uid}#copy{num_copies // len(sources) + 1}"
            num_copies += 1
        prompts.append(replace(rollouts.prompts[source], uid=uid))
        trajectories += [replace(trajectory, prompt_uid=uid) for trajectory in _group(rollouts, source)]
    return replace(rollouts, prompts=tuple(prompts), trajectories=tuple(trajectories))
