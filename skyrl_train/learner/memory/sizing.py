"""How large a model's micro-batches are: probed, fitted, agreed on by all ranks, and remembered.

    probes (a rank's own) --fit--> peak = base + a * positions + b * positions * longest --limit--> C of this rank
    C of the run = the least over ranks, tried out at every probed length before it is used

Probes are measured, traced or compiled by XLA (`trainer.memory_probe`); what follows from them is the same. `memory.json` in
the run's folder holds what was probed, fitted and chosen for each model and rank; a run that is resumed reads it, and takes
the same budgets where they hold for what is there.

All ranks of a model call these functions in step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from skyrl_train.batch.planner import TokenBudgets
from skyrl_train.config import MicroBatchConfig
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory.fit import MemoryModel, MemoryProbe, fit_memory_model, near_the_limit
from skyrl_train.learner.memory.meter import GIB, CountingMeter, CudaMeter, MemoryMeter
from skyrl_train.learner.memory.oom_retry import SizedEngine
from skyrl_train.learner.memory.probe import Probed, Prober, lengths_to_probe
from skyrl_train.learner.memory.trace import StepTrace
from skyrl_train.model.layers import beyond_index, index_limit, widest_activation
from skyrl_train.model.sizes import sizes_of_model

SHRINK = 0.9
"""Of a budget that did not hold when it was tried out, so much is tried next."""
WORTH_A_TRIAL = 1.02
"""A budget that has held is replaced by one that is larger by this factor at least."""
_SHARE_UNITS = 1_000_000
"""Ranks agree on whole numbers: a share is stated in millionths."""
_TRIALS = 8
"""Budgets that are tried out before it is given up."""


@dataclass(frozen=True, kw_only=True)
class SizingLimits:
    """What micro-batches may take, and how large rows and passes come."""

    longest: int
    """Tokens of the longest legal row."""
    max_rows: int
    """Rows of one rank's largest pass: more are never in one micro-batch."""
    limit_bytes: int
    """Of one process; 0 is what the device has."""
    margin: float
    retries: int
    source: Literal["measure", "trace", "xla", "both"] = "measure"
    """`trainer.memory_probe`."""
    max_positions: int = 1 << 40
    """`trainer.max_positions`: of a forward and backward; a forward alone has twice as many."""

    def most_positions(self, *, training: bool) -> int:
        """Return the most positions of one micro-batch, whatever memory there is: two rows or the largest pass within the
        cap, or one row."""
        cap = self.max_positions * (1 if training else 2)  # as `MicroBatchConfig.most_positions`
        return max(self.longest, min(max(2, self.max_rows) * self.longest, cap))


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of one model on one rank."""

    tokens: int
    """The budget, of all ranks."""
    own_tokens: int
    """What this rank's memory would allow."""
    limit_bytes: int
    cell_share: float
    """Of all ranks; 0 where rows are padded (`TokenBudgets.cell_shares`)."""
    model: MemoryModel
    probes: tuple[MemoryProbe, ...]
    predicted_tokens: int = 0
    """The budget by prediction; 0 where none was made."""


@dataclass(frozen=True, kw_only=True)
class SizingReport:
    """One model on one rank."""

    name: str
    facts: Mapping[str, str]
    """What the budgets hold for: model, lengths, layout, device, memory."""
    is_reused: bool
    forward: PhaseReport
    training: PhaseReport | None
    """None for a model that is only scored."""

    @property
    def budgets(self) -> TokenBudgets:
        training = self.training or self.forward
        return TokenBudgets(
            training=training.tokens,
            forward=self.forward.tokens,
            cell_shares=(training.cell_share, self.forward.cell_share),
        )

    def line(self) -> str:
        """Return a line for the run's first lines."""
        named = {"training": self.training, "forward": self.forward}
        phases = {name: phase for name, phase in named.items() if phase is not None}
        parts = [f"{name} {phase.tokens} positions" for name, phase in phases.items()]
        probes = sum(len(phase.probes) for phase in phases.values())
        fit = max(phase.model.largest_relative_error for phase in phases.values())
        source = "of the run that is resumed" if self.is_reused else f"{probes} probes, fitted within {fit:.1%}"
        if probes == 0:
            how = "compiled by XLA" if self.facts["source"] == "xla" else "traced"
            source = f"{how}, nothing was run"
        elif any(phase.predicted_tokens for phase in phases.values()):
            beside = (
                f"{name} {phase.predicted_tokens} ({phase.predicted_tokens / phase.tokens - 1:+.1%})"
                for name, phase in phases.items()
            )
            source = f"{source}; predicted: {', '.join(beside)}"
        return (
            f"{self.name:<11} {', '.join(parts)} a micro-batch in {self.forward.limit_bytes / GIB:.3g} GiB ({source})"
        )


def size_run(
    trainer: MicroBatchConfig, learners: Sequence[Any], file: Path, *, longest: int, max_rows: int
) -> list[str]:
    """Size the micro-batches of a run's `learners` (those of this process, or on Ray), before its first step or as in the
    run that it resumes, and write `file`. Returns lines to print; does nothing where micro-batches are of stated sizes.

    `longest`: tokens of the longest legal row. `max_rows`: of the largest pass. Raises MemoryLimitError.
    """
    if not trainer.sizes_itself:
        return []
    limits = SizingLimits(
        longest=longest,
        max_rows=max_rows,
        limit_bytes=round(trainer.memory_budget_gb * GIB),
        margin=trainer.memory_margin,
        retries=trainer.memory_retries,
        source=trainer.memory_probe,
        max_positions=trainer.max_positions,
    )
    stored = read_reports(file)
    # a reference that is the policy without its adapter has no model of its own, and runs under the policy's budget
    apart = [learner for learner in learners if hasattr(learner, "size_micro_batches")]
    if apart:
        sized = [learner.size_micro_batches(limits, stored) for learner in apart]
        reports = {ranks[0].name: tuple(ranks) for ranks in sized}
    else:
        own = [learner for learner in learners if hasattr(learner, "engine")]
        alone = {name: ranks[0] for name, ranks in stored.items() if len(ranks) == 1}
        reports = {name: (report,) for name, report in size_all(own, limits, alone).items()}
    write_reports(file, reports)
    return [ranks[0].line() for ranks in reports.values()]


def make_meter(device: torch.device, limits: SizingLimits) -> MemoryMeter:
    """Return what counts the memory of this process."""
    if device.type == "cuda":
        return CudaMeter(device, limit_bytes=limits.limit_bytes)
    return CountingMeter(limits.limit_bytes)


def size_all(
    learners: Sequence[Probed], limits: SizingLimits, stored: Mapping[str, SizingReport]
) -> dict[str, SizingReport]:
    """Size the models of one process, which share its memory: all that lies there between passes is there before the first
    probe. Returns reports by name."""
    if not learners:
        return {}
    meter = make_meter(learners[0].engine.passes.device, limits)
    for learner in learners:
        hold_everything(learner.engine, meter)
    return {
        learner.engine.name: size_micro_batches(learner, meter, limits, stored=stored.get(learner.engine.name))
        for learner in learners
    }


def hold_everything(engine: SizedEngine, meter: MemoryMeter) -> None:
    """Make the optimizer's state now rather than in the first step, and count all that lies there between passes."""
    engine.allocate_state()
    meter.adopt(engine.held_tensors())


def size_micro_batches(
    learner: Probed, meter: MemoryMeter, limits: SizingLimits, *, stored: SizingReport | None = None
) -> SizingReport:
    """Find the budgets, or take those of `stored` where all ranks find that they hold for what is here, and have the
    engine's passes run under them from now on. Raises MemoryLimitError where the longest row does not fit."""
    engine, strategy = learner.engine, learner.engine.passes.micro_batching
    hold_everything(engine, meter)
    # The least of all ranks, so that a file written by one of them is true of every one.
    limit = -engine.strategy.agree(-meter.limit_bytes)
    facts = _facts(engine, limits, limit)
    differs = stored is None or dict(stored.facts) != facts
    # All ranks probe or none does: a rank whose report still holds would not be there for the others' collectives.
    if engine.strategy.agree(int(differs)) or stored is None:
        sizing = _Sizing(prober=Prober(learner=learner, meter=meter), limits=limits)
        is_trained = any(parameter.requires_grad for parameter in engine.parameters.values())
        report = SizingReport(
            name=engine.name,
            facts=facts,
            is_reused=False,
            training=replace(sizing, training=True).run() if is_trained else None,
            forward=sizing.run(),
        )
    else:
        report = replace(stored, is_reused=True)
    batches = strategy.under(report.budgets)
    engine.oom_retry.begin(meter, batches, retries=limits.retries, resident=engine.held_tensors)
    return report


@dataclass(frozen=True, kw_only=True)
class _Sizing:
    """Finds the budget of one phase of one model, in step with the other ranks."""

    prober: Prober
    limits: SizingLimits
    training: bool = False

    @property
    def engine(self) -> SizedEngine:
        return self.prober.learner.engine

    @property
    def _most_positions(self) -> int:
        """Of one micro-batch, whatever memory there is. Raises MemoryLimitError for rows longer than can be indexed."""
        width, strategy = widest_activation(self.engine.model), self.engine.strategy
        ranks = strategy.tensor_ranks * (1 if strategy.group is None else strategy.group.size)
        if reason := beyond_index(self.limits.longest, width, ranks=ranks):
            raise MemoryLimitError(
                f"{self.engine.name}: for one row of {self.limits.longest} tokens, the longest legal one, {reason}. Set a "
                "lower generator.max_context_length (data.max_length), or a higher strategy.sequence_parallel_size"
            )
        return min(index_limit.MOST_ELEMENTS * ranks // width, self.limits.most_positions(training=self.training))

    def run(self) -> PhaseReport:
        """Find the budget from what the limits name: passes that are measured, traced or compiled, or first one and then the
        other. Raises MemoryLimitError."""
        source, longest = self.limits.source, self.limits.longest
        if source == "measure":
            return self._find()
        foreseen = replace(self, prober=self._predicting())._find()
        if source != "both":  # nothing was run that a resumed run could rely on
            return replace(foreseen, probes=(), predicted_tokens=foreseen.tokens)
        # The prediction may be too high: half of it leaves room, and two sizes give the fit its slope.
        found = self._find(first_rows=max(1, foreseen.tokens // longest // 4))
        return replace(found, predicted_tokens=foreseen.tokens)

    def _predicting(self) -> Prober:
        """The prober that runs nothing. Raises ModelError."""
        engine, training = self.engine, self.training
        trace = StepTrace(engine=engine, held_bytes=self.prober.meter.in_use_bytes())
        if self.limits.source != "xla":
            return replace(self.prober, trace=trace)
        from skyrl_train.learner.memory.xla import CompiledModel  # and with it JAX

        model = CompiledModel(
            model=sizes_of_model(engine.model),
            compute_bytes=engine.passes.dtype.itemsize,
            checkpointing=bool(getattr(engine.model, "is_gradient_checkpointing", False)),
        )
        resident_bytes = trace.resident_bytes(training=training)
        return replace(self.prober, compiled=model.probe(training=training, resident_bytes=resident_bytes))

    def _find(self, *, first_rows: int = 1) -> PhaseReport:
        """Grow, fit, and try the budget out at every length: what a fit cannot know shows there.

        Raises MemoryLimitError.
        """
        limits, agree, prober = self.limits, self.engine.strategy.agree, self.prober
        lengths, most = lengths_to_probe(limits.longest), self._most_positions
        probes = prober.grow(lengths, max_positions=most, training=self.training, first_rows=first_rows)
        if prober.predicts:  # no memory runs out: whether one row fits is for its bytes to say
            over = probes[0].peak_bytes > prober.meter.limit_bytes
            if agree(int(over)):
                raise self._too_long(f"{probes[0].peak_bytes} bytes by prediction" if over else "on another rank")
        # None where one row ran out of memory; and by one size alone no slope can be fitted.
        if len({probe.positions for probe in probes}) < 2:
            raise self._too_long()
        cap, held = most, 0
        for _ in range(_TRIALS):
            model = fit_memory_model(near_the_limit(probes), margin=limits.margin)
            own = min(cap, self._budget(model))
            tokens = -agree(-own)
            # Trials add probes near the limit, from which the next fit may allow more: worth another trial, or done.
            if tokens <= held * WORTH_A_TRIAL:
                tokens = min(tokens, held)
                return PhaseReport(
                    tokens=tokens,
                    own_tokens=own,
                    limit_bytes=prober.meter.limit_bytes,
                    cell_share=self._cell_share(model, tokens),
                    model=model,
                    probes=tuple(probes),
                )
            if self._holds(tokens, lengths, probes):
                held = tokens
            else:
                # The trial that failed is no probe where memory ran out, so that the next fit might allow as much again.
                cap = int(tokens * SHRINK)
        raise MemoryLimitError(
            f"{self.engine.name}: no token budget held in {_TRIALS} trials, the last of {tokens} positions; does "
            "something else use the device? Set trainer.memory_budget_gb, or trainer.memory_margin higher"
        )

    def _holds(self, tokens: int, lengths: Sequence[int], probes: list[MemoryProbe]) -> bool:
        """Try the budget out at the longest and the shortest length; the trials are added to `probes`."""
        tried = [
            self.prober.probe(max(1, tokens // length), length, training=self.training)
            # Sets of small whole numbers have the same order in every process, and ranks probe in step.
            for length in {lengths[0], lengths[-1]}
        ]
        probes += [trial for trial in tried if trial is not None]
        over = any(trial is None or trial.peak_bytes > self.prober.meter.limit_bytes for trial in tried)
        return not self.engine.strategy.agree(int(over))

    def _cell_share(self, model: MemoryModel, tokens: int) -> float:
        """What a cell of `[rows, longest]` that the model does not compute takes on any rank, in positions: those that only
        losses pad, and tokens that rows have in common. A peak is convex in cells, so that the share found near the limit
        holds below it; where nothing could be probed, a cell is a position, which all probes had."""
        limits, layout = self.limits, self.engine.passes.micro_batching.layout
        if layout == "padded" or (limits.max_rows < 2 and self.prober.compiled is None):
            return 0.0
        if self.prober.compiled is not None:  # XLA is asked of padded rows alone: other cells take less than a position
            return 1 + limits.margin
        grow = [self.prober.grow_uneven]
        if layout in ("prefix_shared", "auto"):
            grow.append(self.prober.grow_trees)
        found = [
            probe
            for each in grow
            for probe in each(limits.longest, max_positions=tokens, max_rows=limits.max_rows, training=self.training)
        ]
        share = max((model.cell_share(probe) for probe in found), default=1.0)
        return self.engine.strategy.agree(math.ceil((1 + limits.margin) * share * _SHARE_UNITS)) / _SHARE_UNITS

    def _budget(self, model: MemoryModel) -> int:
        """This rank's budget, for the layouts that its passes may choose. Raises MemoryLimitError."""
        padded = {"padded": [True], "auto": [True, False]}.get(self.engine.passes.micro_batching.layout, [False])
        limit, longest = self.prober.meter.limit_bytes, self.limits.longest
        try:
            return min(model.token_budget(limit, longest, padded=each) for each in padded)
        except MemoryLimitError as error:
            # The longest row was probed and did fit, but not with the margin.
            if self.engine.strategy.num_ranks == 1:
                raise self._too_long(str(error)) from error
            # Others would wait in the next agreement for a rank that
            # raised: this one goes on, and the trials refuse it on all.
            return longest

    def _too_long(self, reason: str = "") -> MemoryLimitError:
        meter = self.prober.meter
        return MemoryLimitError(
            f"{self.engine.name}: {'training' if self.training else 'scoring'} one row of {self.limits.longest} tokens, "
            f"the longest legal one, does not fit {meter.limit_bytes / GIB:.3g} GiB, of which "
            f"{meter.in_use_bytes() / GIB:.3g} GiB hold the model and its like{f' ({reason})' if reason else ''}. Set a "
            "lower generator.max_context_length (data.max_length), model.gradient_checkpointing=true, "
            "strategy.cpu_offload=optimizer, more ranks with strategy=fsdp2, or a larger trainer.memory_budget_gb"
        )


def _facts(engine: SizedEngine, limits: SizingLimits, limit_bytes: int) -> dict[str, str]:
    """What the budgets hold for."""
    shapes = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in engine.parameters.items()]
    passes, device, batching = engine.passes, engine.passes.device, engine.passes.micro_batching
    return {
        "model": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "parameters": str(sum(parameter.numel() for parameter in engine.model.parameters())),
        "type": str(passes.dtype).removeprefix("torch."),
        "recomputes": str(bool(getattr(engine.model, "is_gradient_checkpointing", False))),
        "longest": str(limits.longest),
        "max_rows": str(limits.max_rows),
        "max_positions": str(limits.max_positions),
        "layout": f"{batching.layout}{', merged turns' if batching.merge_turns else ''}",
        "strategy": f"{type(engine.strategy).__name__} over {engine.strategy.num_ranks}"
        + (f" in {engine.strategy.num_shards} shards" if engine.strategy.sharded else "")
        + (f", experts over {engine.strategy.expert_ranks}" if engine.strategy.expert_ranks > 1 else "")
        + (", whole gradients" if engine.strategy.keeps_whole_gradients else "")
        + (", state in the host" if engine.state_in_host else ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "limit_bytes": str(limit_bytes),
        "margin": str(limits.margin),
        "source": limits.source,
        "torch": torch.__version__,
    }


def read_reports(file: Path) -> dict[str, tuple[SizingReport, ...]]:
    """Return reports by model, then by rank; none where there is no such file, or one that cannot be read: it can be made
    again."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: tuple(_report(report) for report in ranks) for name, ranks in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_reports(file: Path, reports: Mapping[str, Sequence[SizingReport]]) -> None:
    """Write the reports of each model's ranks, by its name, as `read_reports` reads them."""
    content = {name: [asdict(report) for report in ranks] for name, ranks in reports.items()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _report(content: Mapping[str, Any]) -> SizingReport:
    """Raises KeyError, TypeError for what is no report."""
    training = content["training"]
    return SizingReport(
        **{
            **content,
            "forward": _phase(content["forward"]),
            "training": None if training is None else _phase(training),
        }
    )


def _phase(found: Mapping[str, Any]) -> PhaseReport:
    probes = tuple(MemoryProbe(**probe) for probe in found["probes"])
    return PhaseReport(**{**found, "model": MemoryModel(**found["model"]), "probes": probes})
