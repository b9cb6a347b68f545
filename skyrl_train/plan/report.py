"""The plan as a person or a script reads it: sizes, padding, learning rates, storage, violations, notes. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil

from skyrl_train.batch.planner import TokenBudgets
from skyrl_train.batch.steps import learning_rate
from skyrl_train.config import TrainerConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.errors import Violation, byte_size, counted
from skyrl_train.plan.batch_plan import BatchPlan, ceil_div, optimizer_state_bytes, span
from skyrl_train.plan.estimate import PassEstimate, RowLengths
from skyrl_train.plan.memory.device import DeviceMemory, gigabytes, memory_lines
from skyrl_train.plan.notes import PlanNote, percent
from skyrl_train.plan.time import SHOWN, RunTime, time_lines, tokens_of_rollout
from skyrl_train.registry import part_name

TOKEN_BYTES = {
    "input_ids": 4,
    "loss_mask": 1,
    "rewards": 4,
    "rollout_logprobs": 4,
    "old_logprobs": 4,
    "advantages": 4,
    "returns": 4,
}
"""Bytes of a training batch's columns, per token; a test keeps them equal to the schema's."""
WEIGHT_BYTES = 8
"""`loss_weights`, which a closed mini-batch adds."""
SCORE_BYTES = 4
"""One log-probability or value."""


_ROLLOUT_BYTES = 50
"""What a token of the rollouts takes in the controller's memory at most, writer included (`bench/rollout_store.py`)."""


@dataclass(frozen=True, kw_only=True)
class RatePoint:
    """The learning rate of one optimizer step, counted from 0."""

    role: str
    step: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Something that is kept or moved."""

    what: str
    kind: str
    """`kept` or `moved`."""
    num_bytes: int
    when: str


@dataclass(frozen=True, kw_only=True)
class BundleGroup:
    """Devices that are reserved together, and what computes on them."""

    name: str
    num_bundles: int
    gpus_per_bundle: int
    num_nodes: int
    """Nodes that it is bound to; 0 is any node with room."""
    slots: tuple[tuple[str, int], ...]
    """Role to the number of its ranks or engines in the group."""


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """What a run reserves, beside what there is."""

    backend: str
    strategy: str
    gpus_needed: int
    gpus_found: int
    found_in: str
    """Where the GPUs that were found were looked for; empty where they were not."""
    shares_devices: bool
    """Whether models and engines share devices, one of them computing at a time."""
    groups: tuple[BundleGroup, ...]
    """None without Ray."""
    engines: str
    """What makes rollouts, in words."""
    training: str
    """Layout and micro-batches, in words."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that `skyrl_train.plan` prints."""

    plan: BatchPlan | None
    """None where there are violations, which is then all there is."""
    num_train_prompts: int
    micro_batching: str
    """What bounds a micro-batch, in words."""
    lengths_source: str = ""
    estimates: tuple[PassEstimate, ...] = ()
    learning_rates: tuple[RatePoint, ...] = ()
    storage: tuple[Storage, ...] = ()
    violations: tuple[Violation, ...] = ()
    notes: tuple[PlanNote, ...] = ()
    memory: DeviceMemory | None = None
    """Where `plan.device_memory_gb` asks for it, or the placement was chosen by it."""
    placement: PlacementReport | None = None
    """None where none could be chosen."""
    time: RunTime | None = None
    """None where no rates are known."""
    disk: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the run leaves, by what they are."""


def to_json(report: PlanReport) -> str:
    """The report as JSON, keys as the dataclasses name them."""
    data = asdict(report)
    for estimate, record in zip(report.estimates, data["estimates"]):
        record["padding"] = estimate.padding
    if report.time is not None:
        time = report.time
        data["time"] |= {"step_s": time.step_s, "device_hours": time.device_hours}
        by_staleness = {each: time.pipeline.step_s(each, takes_turns=time.takes_turns) for each in SHOWN}
        data["time"]["pipeline"] |= {
            "step_s": by_staleness,
            "best_staleness": time.pipeline.best_staleness(takes_turns=time.takes_turns),
        }
    return json.dumps(data, indent=2)


def render_text(report: PlanReport) -> str:
    """The report for a terminal, at most 120 columns where values allow."""
    placement = [("Placement", list(placement_lines(report.placement)))] if report.placement else []
    if report.plan is None:
        lines = [f"{counted(len(report.violations), 'problem')}, no plan:"]
        lines += [f"  - {violation}" for violation in report.violations]
        if report.memory is not None:
            lines += ["", _memory_title(report.memory), *(f"  {line}" for line in memory_lines(report.memory))]
        lines += [text for title, own in placement for text in ["", title, *(f"  {line}" for line in own)]]
        return "\n".join(lines)
    sections = [
        *placement,
        ("Batch plan", _size_lines(report.plan, report)),
        ("Each model", _learner_lines(report)),
        (f"One pass, with lengths {report.lengths_source}", _estimate_lines(report)),
        ("Learning rate", [f"{p.role:<10} step {p.step:>8,}  {p.rate:.3g}" for p in report.learning_rates]),
        (
            "Kept and moved",
            [f"{item.kind:<6} {byte_size(item.num_bytes):>9}  {item.what} ({item.when})" for item in report.storage],
        ),
        ("Time and disk", list(time_lines(report.time, report.disk))),
        *([(_memory_title(report.memory), list(memory_lines(report.memory)))] if report.memory else []),
        ("Notes", [str(note) for note in report.notes] or ["none"]),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections)


def placement_lines(report: PlacementReport) -> Iterator[str]:
    """Yield the lines of a terminal on placement."""
    if report.gpus_needed or report.gpus_found:
        found = f", {report.gpus_found} found ({report.found_in})" if report.found_in else ""
        yield f"{'GPUs':<10} {report.gpus_needed} needed{found}"
    yield f"{'backend':<10} {report.backend}, strategy {report.strategy}"
    for group in report.groups:
        each = f"{counted(group.gpus_per_bundle, 'GPU')}" if group.gpus_per_bundle else "1 CPU"
        where = f" on {counted(group.num_nodes, 'node')}" if group.num_nodes else ""
        slots = ", ".join(f"{count} {role}" for role, count in group.slots)
        shared = ", one at a time" if report.shares_devices else ""
        bundles = f"{counted(group.num_bundles, 'bundle')} of {each}"
        yield f"{group.name:<10} {bundles}{where}: {slots}{shared}"
    yield f"{'rollouts':<10} {report.engines}"
    yield f"{'training':<10} {report.training}"


def _memory_title(memory: DeviceMemory) -> str:
    return (
        f"Memory of a device of {gigabytes(memory.device_bytes)}, {gigabytes(memory.margin_bytes)} of it left free "
        f"(predicted)"
    )


def micro_batching_text(trainer: TrainerConfig, budgets: Mapping[str, TokenBudgets] | None = None) -> str:
    """What bounds a micro-batch, in words. `budgets`: by role, of those that size themselves, where they are known."""
    if trainer.micro_batching == "fixed":
        rows, forward = trainer.micro_train_batch_size_per_gpu, trainer.micro_forward_batch_size_per_gpu
        return f"fixed: {counted(rows, 'row')} in training, {forward} in scoring"
    if trainer.micro_batching == "token_budget":
        tokens, forward = trainer.max_tokens_per_microbatch, trainer.max_tokens_per_forward_microbatch
        return f"token_budget: {tokens} computed tokens in training, {forward} in scoring, layout {trainer.layout}"
    name = part_name(trainer.micro_batching)
    if not trainer.sizes_itself:
        return name
    if not budgets:
        return (
            f"{name}: what fits the memory; counted below under trainer.max_tokens_per_microbatch="
            f"{trainer.max_tokens_per_microbatch}, since plan.device_memory_gb is not stated"
        )
    parts = [f"{role} {each.training:,} in training, {each.forward:,} in scoring" for role, each in budgets.items()]
    return f"{name}: as many computed tokens as fit the memory: {'; '.join(parts)}"


def optimizer_steps_text(plan: BatchPlan) -> str:
    """Announced as a range where steps are closed by documents, whose number in a step depends on the micro-batches."""
    each = f"{counted(plan.num_prompts_per_step, 'prompt')} each"
    if plan.docs_per_step:
        each = f"{span(plan.num_samples_per_step, plan.most_samples_per_step)} rollouts each"
    a_batch = span(plan.fewest_optimizer_steps_per_batch, plan.optimizer_steps_per_batch)
    return (
        f"{a_batch} {'optimizer step' if a_batch == '1' else 'optimizer steps'} a batch ({each}), "
        f"{span(plan.fewest_total_optimizer_steps, plan.total_optimizer_steps)} in all"
    )


def _size_lines(plan: BatchPlan, report: PlanReport) -> list[str]:
    documents = f" (each closed at {counted(plan.docs_per_step, 'document')} or more)" if plan.docs_per_step else ""
    rows = [
        ("training prompts", f"{report.num_train_prompts:,}: {counted(plan.batches_per_epoch, 'batch', ',')} an epoch"),
        ("training batches", f"{plan.total_steps:,} in the run"),
        ("prompts per batch", f"{plan.num_prompts_per_batch:,}"),
        ("samples per batch", f"{plan.num_samples_per_batch:,}"),
        ("samples per optimizer step", span(plan.num_samples_per_step, plan.most_samples_per_step)),
        (
            "optimizer steps per batch",
            f"{span(plan.fewest_optimizer_steps_per_batch, plan.optimizer_steps_per_batch)}{documents}",
        ),
        ("optimizer steps in all", span(plan.fewest_total_optimizer_steps, plan.total_optimizer_steps)),
        ("micro-batches", report.micro_batching),
    ]
    if plan.critic_total_optimizer_steps:
        steps = f"{plan.critic_optimizer_steps_per_batch:,} per batch, {plan.critic_total_optimizer_steps:,} in all"
        rows.insert(-1, ("critic's optimizer steps", steps))
    return [f"{name:<28}{value}" for name, value in rows]


def _learner_lines(report: PlanReport) -> Iterator[str]:
    for learner in report.plan.learners if report.plan else ():
        trained = learner.role != "reference"
        count = learner.train_micro_batches if trained else learner.forward_micro_batches
        forwards = (
            "as many micro-batches as lengths and turns make" if count is None else counted(count, "micro-batch", ",")
        )
        together, _ = divmod(learner.num_ranks, learner.data_parallel_size)
        each = "each" if together == 1 else f"for each {together} that compute together"
        rows = counted(learner.rows_per_rank, "row", ",")
        sequences = counted(learner.sequences_per_pass, "sequence", ",")
        yield (
            f"{learner.role:<10} {counted(learner.num_ranks, 'rank')}, {rows} {each} "
            f"({sequences}, {counted(learner.dummy_rows_per_pass, 'dummy row')}), "
            f"{'accumulates' if trained else 'scores in'} {forwards}"
        )


def _estimate_lines(report: PlanReport) -> Iterator[str]:
    for estimate in report.estimates:
        rows = counted(estimate.num_rows, "row", ",")
        yield (
            f"{estimate.role:<10} {rows}, {counted(estimate.num_tokens, 'token', ',')}, computed "
            f"{estimate.computed_tokens:,}: padding {percent(estimate.padding)} (fixed rows in order of arrival: "
            f"{percent(estimate.first_come_padding)})"
        )
        if estimate.distinct_tokens < estimate.num_tokens:
            yield (
                f"{'':<10} layout {estimate.layout} computes {percent(estimate.computed_tokens / estimate.num_tokens)} "
                f"of the tokens; {estimate.distinct_tokens:,} are distinct"
            )
        yield (
            f"{'':<10} {counted(estimate.micro_batches_per_rank, 'micro-batch', ',')} on the fullest rank, the largest of "
            f"{estimate.largest_micro_batch_tokens:,} tokens; busiest rank {estimate.load_max_over_mean:.3f} x the mean"
        )
        if steps := estimate.document_steps:
            documents = _span(step.num_documents for step in steps)
            yield (
                f"{'':<10} documents close {counted(len(steps), 'step')} a batch, of {documents} "
                f"over {_span(step.num_rounds for step in steps)} rounds of micro-batches, up to "
                f"{max(step.overshoot for step in steps)} beyond the target"
            )


def _span(counts: Iterable[int]) -> str:
    """`3`, or `3 to 5`."""
    found = sorted(counts)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def rate_points(role: str, optimizer: OptimizerConfig, total: float) -> Iterator[RatePoint]:
    """The learning rate at the first step, the end of the warm-up, the quarters and the last step; steps have the target's
    size where documents close them."""
    last = ceil(total) - 1
    quarters = [int(total * quarter // 4) for quarter in range(5)]
    for step in sorted({0, optimizer.warmup_steps - 1, *quarters, last}):
        if 0 <= step < total:
            yield RatePoint(role=role, step=step, rate=learning_rate(step, optimizer, total))


def storage_items(
    trainer: TrainerConfig,
    model: ModelConfig,
    plan: BatchPlan,
    lengths: RowLengths,
    *,
    num_parameters: int | None,
    num_shards: int,
) -> Iterator[Storage]:
    """What a training batch keeps and moves, and, where the number of the policy's parameters is known, what those do, over
    `num_shards` ranks that have a part of each."""
    tokens_per_sample = float(lengths.all_rows.sum()) / len(lengths.trajectories)
    tokens = round(plan.num_samples_per_batch * tokens_per_sample)
    models = len(plan.learners) - 1
    per_token = sum(TOKEN_BYTES.values()) + SCORE_BYTES * models
    yield Storage(
        what="training batch on the controller", kind="kept", num_bytes=tokens * per_token, when=f"{tokens:,} tokens"
    )
    yield Storage(
        what="rollouts on the controller",
        kind="kept",
        num_bytes=round(plan.num_samples_per_batch * tokens_of_rollout(lengths) * _ROLLOUT_BYTES),
        when="while they are written to disk" if trainer.dump_rollouts else "until the update",
    )
    policy = plan.learners[0]
    step_tokens = round(plan.num_samples_per_step * tokens_per_sample / policy.data_parallel_size)
    moved = step_tokens * (per_token + WEIGHT_BYTES)
    yield Storage(what="shard to each policy rank", kind="moved", num_bytes=moved, when="every optimizer step")
    yield Storage(
        what="scores back from the models",
        kind="moved",
        num_bytes=tokens * SCORE_BYTES * (1 + models),
        when="every batch",
    )
    if num_parameters is not None:
        state = num_parameters * (4 + optimizer_state_bytes(trainer.policy.optimizer))
        yield Storage(
            what="weights to the inference engine",
            kind="moved",
            num_bytes=num_parameters * (2 if model.dtype == "bfloat16" else 4),
            when="every batch",
        )
        yield Storage(
            what="policy's weights, gradients and optimizer state of each rank",
            kind="kept",
            num_bytes=ceil_div(state + 4 * num_parameters, num_shards),
            when="all the time; activations come on top",
        )
        if trainer.background_checkpoints:
            yield Storage(
                what="copy of the policy in the host's memory, of each rank",
                kind="kept",
                num_bytes=ceil_div(state, num_shards),
                when="from the first checkpoint on, which is written from it",
            )
        kept = trainer.max_ckpts_to_keep
        yield Storage(what="checkpoints of the policy", kind="kept", num_bytes=kept * state, when=f"{kept} on disk")
