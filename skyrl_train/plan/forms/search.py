"""Forms that a run on GPUs may have, and the seconds of a step in each, on paper: what `placement=auto` ranks. No torch.

    GPUs               --allocations-->  which GPUs train and which generate, shared or apart
    ranks, a model     --layouts-->      shards, replicas, parts of matrices, rows and experts, host memory
    layout             --update_on-->    seconds of an update, at the micro-batch that fits
    GPUs of an engine  --rollout_s-->    seconds of the rollouts

Serially a step is rollouts, moves between device and host where they share, updates and the weight sync. With
`trainer.max_staleness` engines and learner compute at once (`plan/time.py`, for rollouts that take equally long).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.derived import old_logprobs_scored
from skyrl_train.config.models import GeneratorConfig, StrategyConfig, mesh_sizes
from skyrl_train.config.rules import divisors
from skyrl_train.plan.estimate import assumed_lengths, sampled_lengths
from skyrl_train.plan.forms.scale import (
    Device,
    Rollouts,
    ScaledModel,
    Update,
    Work,
    engine_rates,
    rollout_s,
    streamed_sync,
    update_on,
)

LAYOUT_SETTINGS = (
    "fsdp_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "sequence_parallel_size",
    "cpu_offload",
)
"""Settings of `strategy` that are searched."""
_OFFLOADS: tuple[Literal["optimizer", True, False], ...] = (False, "optimizer", True)
"""Values of `strategy.cpu_offload`, the plainest first, which `auto` stands for."""
_FORWARD = 0.25
"""Of an update with recomputed layers, what a forward alone computes."""
_CHANGE, _CUTS = 0.01, {"tensor_parallel_size": 0.15, "sequence_parallel_size": 0.15}
"""Share by which a step has to be shorter for each setting that is not the plainest: rates are stated, not measured. More
where ranks wait for one another in each layer."""
_ENGINE_CHANGE = 0.25
"""The same of engines over more GPUs than they need: how long the longest rollouts are, which gain by it, is a guess."""
_SPLITS = 8
"""Shares of the nodes between which those apart are divided."""
_MOST_ROWS = 64
"""Of the longest rows in a micro-batch that is tried."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Which GPUs train and which generate."""

    nodes: int
    """Those that the policy's ranks lie on."""
    ranks_per_node: int
    engine_nodes: int
    """Nodes with engines, of `engine_gpus_per_node` GPUs for them."""
    engine_gpus_per_node: int
    shares: bool

    has_own_nodes: bool = False
    """Whether engines are alone on theirs."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a training batch asks of learner and engines."""

    update: Work
    """Of one optimizer step."""
    num_updates: float
    """Optimizer steps of all models, and what they score in units of one."""
    micro_batches: tuple[int, ...]
    """Positions that a micro-batch may have, the fewest first."""
    rollouts: Rollouts | None = None
    max_staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to lay a run out."""

    allocation: Allocation
    strategy: StrategyConfig
    recomputed: bool
    engine_size: int
    """0 where there are no engines."""
    num_engines: int
    seconds: Mapping[str, float]
    """By phase of a step."""
    step_s: float
    num_changes: int
    """In how many settings it is not the plainest."""
    least_gain: float
    """Share by which it has to be shorter for these."""
    update: Update
    has_plain_engines: bool = True

    @property
    def score(self) -> float:
        """What forms are ranked by: its seconds, and what it has to be shorter by for what it changes."""
        changes = self.least_gain + _ENGINE_CHANGE * (not self.has_plain_engines)
        # Sums that are equal on paper differ in their last bits.
        return round(self.step_s * (1 + changes), 6)

    @property
    def text(self) -> str:
        """What is said of it in one line."""
        strategy, allocation = self.strategy, self.allocation
        mesh = mesh_sizes(strategy, allocation.ranks)
        replicas = f" x {mesh.replicate} replicas" if mesh.replicate > 1 else ""
        parts = [f"fsdp_size {mesh.shard}{replicas}"]
        parts += [
            f"{name} {size}"
            for name, size in (("TP", mesh.tensor), ("EP", mesh.expert), ("SP", mesh.sequence))
            if size > 1
        ]
        parts += ["offload"] if strategy.offloads_all else []
        parts += ["optimizer state in the host"] if strategy.offloads_state else []
        parts += [] if self.recomputed else ["no checkpointing"]
        if self.engine_size:
            engines = f"engines TP {self.engine_size}"
            parts += [engines, "shared"] if allocation.shares else [f"{self.num_engines} {engines} apart"]
        return ", ".join(parts)


def allocations(nodes: int, per_node: int, *, shares: bool, apart: bool, num_models: int = 1) -> Iterator[Allocation]:
    """Yield the ways to divide the GPUs, shared first. `num_models`: the models that have devices of their own."""
    if shares:
        yield Allocation(
            nodes=nodes, ranks_per_node=per_node, engine_nodes=nodes, engine_gpus_per_node=per_node, shares=True
        )
    for ranks in range(1, per_node // num_models + 1) if apart else ():
        if (rest := per_node - num_models * ranks) > 0:
            yield Allocation(
                nodes=nodes, ranks_per_node=ranks, engine_nodes=nodes, engine_gpus_per_node=rest, shares=False
            )
    splits = {max(1, nodes * part // _SPLITS) for part in range(1, _SPLITS)} if apart and nodes > 1 else set()
    for training in sorted(splits) if per_node % num_models == 0 else ():
        yield Allocation(
            nodes=training,
            ranks_per_node=per_node // num_models,
            engine_nodes=nodes - training,
            engine_gpus_per_node=per_node,
            shares=False,
            has_own_nodes=True,
        )


def layouts(
    model: ScaledModel, allocation: Allocation, stated: StrategyConfig, free: Collection[str]
) -> Iterator[StrategyConfig]:
    """Yield the strategies with which the ranks can hold the model, the plainest first. What is not `free` stays as it is
    `stated`."""
    ranks, per_node = allocation.ranks, allocation.ranks_per_node
    within = [size for size in divisors(per_node) if size & (size - 1) == 0]  # powers of 2, as engines and kernels like

    def options(name: str, sizes: Sequence[int]) -> Sequence[int]:
        return sizes if name in free else [getattr(stated, name)]

    is_cut = [n for n in within if n == 1 or not (model.experts or model.heads % n or model.kv_heads % n or n == ranks)]
    for tensor in options("tensor_parallel_size", is_cut):
        shares_rows = [n for n in within if n == 1 or (tensor == 1 and model.heads % n == 0)]
        divides = [n for n in within if n == 1 or (model.experts and model.experts % n == 0)]
        for sequence in options("sequence_parallel_size", shares_rows):
            for expert in options("expert_parallel_size", divides):
                whole, on_a_node = max(1, ranks // tensor), max(1, per_node // tensor)
                groups = [
                    n
                    for n in divisors(whole)
                    if 1 < n < whole and not (n % sequence or n % expert or (on_a_node % n and n % on_a_node))
                ]
                for size in options("fsdp_size", [0, *groups]):
                    for offloaded in _OFFLOADS if "cpu_offload" in free else (stated.cpu_offload,):
                        yield replace(
                            stated,
                            fsdp_size=size,
                            tensor_parallel_size=tensor,
                            sequence_parallel_size=sequence,
                            expert_parallel_size=expert,
                            cpu_offload=offloaded,
                        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The sizes and the number of engines that a form may have."""

    sizes: Mapping[int, bool]
    """GPUs that one engine may have, and whether that is the plainest number."""
    num_engines: int = 0
    """Where they are stated."""
    max_seqs: int = 1024
    share: float = 0.8
    """Of a GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class _Engines:
    """Engines of one size, and the seconds of a batch's rollouts: in all, and in which they are busy."""

    size: int = 0
    count: int = 0
    rollouts_s: float = 0.0
    busy_s: float = 0.0
    is_plain: bool = True


def rank_forms(
    model: ScaledModel,
    work: StepWork,
    device: Device,
    places: Iterable[Allocation],
    stated: StrategyConfig,
    free: Collection[str],
    *,
    engines: EngineOptions | None = None,
    recomputed: Sequence[bool] = (True,),
) -> list[Form]:
    """Return all forms by their score, the best first.

    Args:
        free: The settings of `strategy` that may be others than the `stated` ones.
        engines: None where none take GPUs.
        recomputed: Values of `model.gradient_checkpointing`.
    """
    found: list[Form] = []
    plain = replace(stated, cpu_offload=_OFFLOADS[0]) if stated.cpu_offload == "auto" else stated
    for place in places:
        here = replace(device, node_size=place.ranks_per_node)
        made = [*_engines(model, work, device, place, engines)] if engines else [_Engines()]
        for strategy in layouts(model, place, stated, free) if made else ():
            for recomputes in recomputed:
                update = best_update(model, strategy, place.ranks, work, here, recomputed=recomputes)
                if update is None:
                    continue
                changed = [name for name in LAYOUT_SETTINGS if getattr(strategy, name) != getattr(plain, name)]
                changed += [] if place.shares else ["placement.colocate_all"]
                for each in made:
                    seconds = _phases(model, work, here, place, update, each)
                    found.append(
                        Form(
                            allocation=place,
                            strategy=strategy,
                            recomputed=recomputes,
                            update=update,
                            engine_size=each.size,
                            num_engines=each.count,
                            seconds=seconds,
                            step_s=_step_s(seconds, each.busy_s, work.max_staleness),
                            num_changes=len(changed),
                            least_gain=sum(_CUTS.get(name, _CHANGE) for name in changed),
                            has_plain_engines=each.is_plain,
                        )
                    )
    return sorted(found, key=lambda form: (form.score, form.num_changes))


def _engines(
    model: ScaledModel, work: StepWork, device: Device, place: Allocation, options: EngineOptions
) -> Iterator[_Engines]:
    """Yield those that the allocation has GPUs for."""
    for size, is_plain in options.sizes.items():
        count = options.num_engines or place.engine_nodes * (place.engine_gpus_per_node // size)
        if not count or size > place.engine_gpus_per_node:
            continue
        mean_length = work.update.mean_length
        rates = engine_rates(
            model, size, device, mean_length=mean_length, max_seqs=options.max_seqs, share=options.share
        )
        whole, busy = rollout_s(rates, work.rollouts, count) if work.rollouts else (0.0, 0.0)
        yield _Engines(size=size, count=count, rollouts_s=whole, busy_s=busy, is_plain=is_plain)


def best_update(
    model: ScaledModel,
    strategy: StrategyConfig,
    num_ranks: int,
    work: StepWork,
    device: Device,
    *,
    recomputed: bool = True,
) -> Update | None:
    """Return the update with the micro-batch of those that fit by which it is quickest, then smallest; None where the
    fewest positions take more than all of the device."""
    mesh = mesh_sizes(strategy, num_ranks)
    best: Update | None = None
    for size in work.micro_batches:
        found = update_on(
            model,
            mesh,
            work.update,
            device,
            micro_batch=size,
            offloaded=strategy.offloads_all,
            state_in_host=strategy.offloads_state,
            recomputed=recomputed,
        )
        # On paper it holds less than it will; whether it does fit is for a trace to say.
        if best is None and found.memory_bytes > device.memory_bytes:
            return None
        if best is not None and not found.fits(device):
            break
        if best is None or round(found.step_s, 6) < round(best.step_s, 6):
            best = found
        if found.micro_batches == 1:
            break
    return best


def _phases(
    model: ScaledModel,
    work: StepWork,
    device: Device,
    place: Allocation,
    update: Update,
    engines: _Engines,
) -> dict[str, float]:
    weights = model.engine_bytes * model.counts.total
    # Shared, what a model keeps leaves its device and comes back, and so do an engine's weights.
    kept = sum(update.memory.get(kind, 0) for kind in ("parameters", "optimizer state"))
    moves = 2 * (kept + weights / engines.size) / device.host_rate if place.shares and engines.size else 0.0
    if place.shares or not engines.size:  # each rank gathers all weights, and an engine copies them on the device
        sync = update.seconds["weight sync"] + (weights / device.node_rate if engines.size else 0.0)
    else:
        sync = streamed_sync(
            int(weights),
            update.mesh,
            device,
            ranks_per_node=place.ranks_per_node,
            workers=engines.size * engines.count,
            workers_per_node=place.engine_gpus_per_node,
            together=not place.has_own_nodes,
        ).seconds
    return {
        "rollouts": engines.rollouts_s,
        "moves": moves,
        "update": work.num_updates * update.step_s,
        "sync": sync,
    }


def _step_s(seconds: Mapping[str, float], busy: float, max_staleness: int) -> float:
    if not max_staleness:
        return sum(seconds.values())
    own = seconds["update"] + seconds["sync"]
    return max(own, busy + seconds["sync"], (seconds["rollouts"] + own) / (1 + max_staleness))


def micro_batch_sizes(longest: int, most: int) -> tuple[int, ...]:
    """Return positions of one, two, four and more of the longest rows, up to the most of a micro-batch."""
    rows = [1 << power for power in range(_MOST_ROWS.bit_length())]
    return tuple(longest * each for each in rows if each == 1 or longest * each <= most)


def step_work(
    generator: GeneratorConfig, trainer: TrainerConfig, *, seed: int, max_prompt_length: int, has_critic: bool
) -> StepWork:
    """Return the work of a training batch, of lengths that are assumed by the settings."""
    lengths = assumed_lengths(generator, seed=seed, max_prompt_length=max_prompt_length)
    rows = lengths.all_rows.astype(float)
    prompts, responses = sampled_lengths(lengths)
    samples = trainer.train_batch_size * generator.n_samples_per_prompt
    per_step = samples * len(rows) / len(lengths.trajectories)
    minis = max(1.0, trainer.train_batch_size / max(1, trainer.policy_mini_batch_size))
    steps = minis * trainer.update_epochs_per_batch
    longest = generator.max_context_length
    micro: tuple[int, ...] = (max(longest, trainer.max_tokens_per_microbatch),)
    if trainer.sizes_itself:
        micro = micro_batch_sizes(longest, trainer.most_positions(training=True))
    elif trainer.micro_batching == "fixed":
        micro = (int(trainer.micro_train_batch_size_per_gpu * rows.mean()),)
    of_policy = {"none": 0.0, "later": 1 - 1 / minis, "all": 1.0}[old_logprobs_scored(trainer)]
    scored = of_policy + needs_reference(trainer.algorithm) + has_critic
    return StepWork(
        update=Work(
            tokens=per_step * float(rows.mean()) / minis,
            mean_length=float((rows * rows).sum() / rows.sum()),
            longest=longest,
        ),
        num_updates=steps * (1 + has_critic) + _FORWARD * minis * scored,
        micro_batches=micro,
        rollouts=Rollouts(
            samples=samples,
            response_tokens=float(responses.mean()),
            longest_response=float(responses.max()),
            prompt_tokens=float(prompts.mean()) / generator.n_samples_per_prompt,
            context_tokens=float((responses * (prompts + responses / 2)).mean()),
        ),
        max_staleness=trainer.max_staleness,
    )
