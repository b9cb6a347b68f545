"""What passes of a model take that is not loaded, for a plan: the run's own step, traced without weights or a device.

    config.json --meta device--> learner of few layers --trace at a few numbers of rows--> bytes, section by section
    its parameters, counted --DeviceShare--> what lies there between passes, and what ranks exchange (`share.py`)

Layers that are alike take the same: models of `_DEPTHS` layers are traced, and what many layers take follows section by
section. Numbers of rows grow by factors; what lies in between is read off the line, which is never below a peak that is
the largest of several sums. All of it is remembered on disk by the model's config, the settings that a pass depends on,
the versions of the libraries and this package's own sources, so that another plan traces nothing and imports no torch.
XLA, where `trainer.memory_probe=xla` asks it, is one more probe, of the same sizes. Both are of a CPU's kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.config.derived import LearnerSettings
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory.fit import MemoryProbe, PassPeaks, fit_memory_model
from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.model.sizes import ModelSizes, ParameterCounts, remember, remembered_file, source_stamps, text_part

if TYPE_CHECKING:
    from skyrl_train.learner.memory.probe import Probed, Prober

Phase = Literal["training", "scoring"]

_DEPTHS = (2, 3)
"""Decoder layers of the models that are traced, where layers are alike and there are more."""
_MOST_POSITIONS = 1 << 20
"""Of a size that is traced; what more would take follows from the line."""
_SOURCES = ("algorithms", "batch", "learner", "model")
"""Folders of this package whose code decides what a pass takes."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """A pass at its peak."""

    moment: str
    """The section of the pass in which it holds most, or the optimizer's step."""
    kinds: Mapping[str, int]
    """Bytes by kind; none is 0."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(kw_only=True)
class Effort:
    """What the predictions of one plan have cost so far."""

    how: Literal["traced", "compiled by XLA"] = "traced"
    num_pieces: int = 0
    seconds: float = 0.0
    announce: Callable[[str], object] = lambda _: None
    """Told of each piece before it is found, which takes a second or more."""

    def line(self) -> str:
        """Return a line to print."""
        if not self.num_pieces:
            return f"{self.how} by an earlier plan, nothing was run"
        return f"{self.how} in {self.num_pieces} pieces and {self.seconds:.1f} s, nothing was run; later plans remember them"

    @contextmanager
    def of_a_piece(self, name: str) -> Iterator[None]:
        """Take the time of one."""
        self.announce(f"{name} is {self.how} without weights, once ({self.seconds:.0f} s so far)")
        start = time.monotonic()
        yield
        self.seconds += time.monotonic() - start
        self.num_pieces += 1


@dataclass(frozen=True, kw_only=True)
class PredictedPasses:
    """Passes of one model, over rows of one length."""

    settings: LearnerSettings
    sizes: ModelSizes
    config: Mapping[str, Any]
    """The model's own, from which its sizes follow."""
    longest: int
    """Tokens of a row: the longest legal one. Ranks that compute it together have a part each."""
    share: DeviceShare
    effort: Effort
    image_tokens: int
    """Of a row at most, of a model that reads images."""
    make_learner: Callable[[int], Probed]
    """Makes the run's learner without weights, of so many layers."""
    _probers: dict[int, Prober] = field(default_factory=dict)

    @cached_property
    def counts(self) -> ParameterCounts:
        """Parameters of the model as it is trained. Raises ModelError."""

        def count(depth: int) -> dict[str, Any]:
            from skyrl_train.learner.memory.trace import count_parameters

            return asdict(count_parameters(self._tracer(depth).learner.engine))

        pieces = [self._piece(f"{depth} layers", partial(count, depth)) for depth in self._depths]
        found = [ParameterCounts(**each) for each in pieces]
        # On the line through both depths: what is outside of layers is in both, and what a layer adds is their difference.
        return found[0].with_more(found[-1], 1.0 + self._layers_beyond)

    def resident_bytes(self, phase: Phase) -> int:
        """Return what lies on the device between micro-batches. Raises ModelError."""
        return sum(self.share.resident(self.counts, training=phase == "training").values())

    @property
    def state_in_host_bytes(self) -> int:
        """What one rank keeps of the optimizer's state in host memory between steps. Raises ModelError."""
        return 0 if self.share.state_at_once is None else self.share.state(self.counts)

    def estimate(self, phase: Phase, rows: int) -> MemoryEstimate:
        """Return what a micro-batch of `rows` of the longest rows takes. Raises ModelError."""
        lower, upper = self._around(phase, lambda at, _: at >= rows) if rows > 1 else (1, 1)
        peaks = self._at(phase, lower).between(self._at(phase, upper), (rows - lower) / max(1, upper - lower))
        kinds = self._beside_activations(phase, rows) | peaks.kinds
        moment, step = peaks.moment, self.share.stepping(self.counts) if phase == "training" else {}
        if sum(step.values()) > sum(kinds.values()):
            moment, kinds = "in the optimizer's step", step
        return MemoryEstimate(moment=moment, kinds={kind: count for kind, count in kinds.items() if count})

    def token_budget(self, phase: Phase, limit_bytes: int) -> int:
        """Return the most computed positions that fit. Raises MemoryLimitError where one of the longest rows does not, and
        ModelError."""
        one_row = self.estimate(phase, 1).peak_bytes
        if one_row > limit_bytes:
            raise MemoryLimitError(
                f"one row of {self.longest} tokens takes {one_row} bytes in {phase}, of which "
                f"{self.resident_bytes(phase)} do not depend on it; {limit_bytes} bytes are there"
            )
        batching = self.settings.micro_batching
        most = 1 << 60
        if batching.sizes_itself:
            most = max(self.longest, batching.most_positions(training=phase == "training"))
        around = self._around(phase, lambda rows, peak_bytes: peak_bytes > limit_bytes or rows * self.longest >= most)
        # The plan leaves its margin free of the whole device; a second one here would count twice.
        fit = fit_memory_model([self._probe(phase, rows) for rows in around], margin=0.0)
        layouts = {"padded": (True,), "auto": (True, False)}.get(self.settings.micro_batching.layout, (False,))
        return min(most, *(fit.token_budget(limit_bytes, self.longest, padded=each) for each in layouts))

    def _around(self, phase: Phase, is_enough: Callable[[int, int], bool]) -> tuple[int, int]:
        """The first traced number of rows that `is_enough`, told it and its bytes, and the one before; the last two that
        are traced where none is."""
        # By factors of four: what lies in between is read off a line that is never below the peak, and few sizes serve
        # every question, of whatever device or number of ranks.
        before, rows = 1, 2
        while not is_enough(rows, self._probe(phase, rows).peak_bytes):
            larger = 4 if rows == 2 else 4 * rows
            if larger * self._own_length > _MOST_POSITIONS:
                break
            before, rows = rows, larger
        return before, rows

    def _probe(self, phase: Phase, rows: int) -> MemoryProbe:
        return MemoryProbe(
            rows=rows,
            longest=self.longest,
            positions=rows * self.longest,
            training=phase == "training",
            peak_bytes=sum(self._beside_activations(phase, rows).values()) + self._at(phase, rows).peak_bytes,
        )

    def _at(self, phase: Phase, rows: int) -> PassPeaks:
        """Trace it, or ask XLA."""
        training, size = phase == "training", f"{phase} of {rows} x {self._own_length} tokens"
        if self.effort.how == "compiled by XLA":
            return PassPeaks(**self._piece(size, lambda: self._compiled(rows, training=training)))

        def trace(depth: int) -> dict[str, Any]:
            return asdict(self._tracer(depth).sections(rows, self._own_length, training=training))

        pieces = [self._piece(f"{size}, {depth} layers", partial(trace, depth)) for depth in self._depths]
        found = [PassPeaks(**each) for each in pieces]
        # Each section grows with the number of layers by as much as from the first depth to the last.
        return found[0].between(found[-1], 1.0 + self._layers_beyond)

    def _compiled(self, rows: int, *, training: bool) -> dict[str, Any]:
        from skyrl_train.learner.memory.xla import CompiledModel

        recomputes = self.settings.model.recomputes
        model = CompiledModel(model=self.sizes, compute_bytes=self.share.compute_bytes, checkpointing=recomputes)
        growing = model.probe(training=training, resident_bytes=0)(rows, self._own_length).peak_bytes
        return {"sections": {"at any moment": growing}, "kept": 0}

    def _piece(self, name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found by an earlier plan, or is found now and kept at once: a plan that is cut off has not worked for
        nothing."""
        if name not in self._known:
            with self.effort.of_a_piece(f"{self.settings.model.path}: {name}"):
                self._known[name] = find()
            remember(self._file, self._known)
        found: dict[str, Any] = self._known[name]
        return found

    def _beside_activations(self, phase: Phase, rows: int) -> dict[str, int]:
        """What a trace of one rank does not see, in bytes by kind: what lies there, what ranks exchange of parameters and of
        positions, and what a vision tower keeps. Ranks that share rows compute the tower whole."""
        share, model, training, positions = self.share, self.settings.model, phase == "training", rows * self.longest
        kinds = share.resident(self.counts, training=training) | share.exchanged(self.counts, training=training)
        kinds |= share.exchanged_heads(self.sizes, positions=positions)
        if training and self.sizes.tower_layers and "vision" not in model.freeze:
            kinds["vision tower"] = rows * self.image_tokens * self.sizes.tower_bytes(checkpointing=model.recomputes)
        experts = int(text_part(self.config).get("num_experts_per_tok") or 0)
        return kinds | share.travelling_tokens(experts * self.sizes.hidden_size, positions=positions)

    @property
    def _own_length(self) -> int:
        """Tokens of a row on one rank."""
        return -(-self.longest // self.share.sequence)

    @property
    def _depths(self) -> tuple[int, ...]:
        depth = self.sizes.num_layers
        return _DEPTHS if self.sizes.layers_alike and depth > _DEPTHS[-1] else (depth,)

    @property
    def _layers_beyond(self) -> float:
        """How far the model is beyond the deepest that is traced, in units of what lies between the two."""
        first, last = self._depths[0], self._depths[-1]
        return (self.sizes.num_layers - last) / (last - first) if last > first else 0.0

    def _tracer(self, depth: int) -> Prober:
        """The learner of so many layers that is traced, made when it is first needed."""
        if depth not in self._probers:
            from skyrl_train.learner.memory.meter import CountingMeter
            from skyrl_train.learner.memory.probe import Prober
            from skyrl_train.learner.memory.trace import StepTrace

            learner = self.make_learner(depth)
            remedy = "Set plan.architecture to a model of about the same sizes"
            trace = StepTrace(engine=learner.engine, device_type=self.share.device_type, remedy=remedy)
            # The meter is never asked: a trace counts by one of its own.
            self._probers[depth] = Prober(learner=learner, meter=CountingMeter(0), trace=trace)
        return self._probers[depth]

    @cached_property
    def _file(self) -> Path:
        own = self.settings
        stamps = source_stamps(_SOURCES)
        model = {name: getattr(own.model, name) for name in ("dtype", "recomputes", "attention", "freeze")}
        batching = [own.micro_batching.layout, own.merge_turns, self._own_length, self.effort.how]
        loss = [asdict(own.algorithm), own.on_policy, own.temperature]
        share = [self.share.sharded, self.share.device_type, self.share.tensor_ranks]
        # Neither the number of ranks nor the device's size is part of it: what depends on them is counted, not traced.
        key = [self.config, own.role, model, asdict(own.model.lora), batching, loss, share, stamps]
        return remembered_file("passes", key)

    @cached_property
    def _known(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
            return found
        return {}
