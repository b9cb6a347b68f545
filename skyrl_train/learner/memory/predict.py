"""What passes of a model take that is not loaded, for a plan: the run's own step, traced without weights or a device.

    config.json --meta device--> learner of few layers --trace at a few numbers of rows--> bytes, section by section
    what lies there between passes, and what ranks of a sharded model exchange: from the numbers of parameters

Layers that are alike take the same: models of `_DEPTHS` layers are traced, and what many layers take follows section by
section. Numbers of rows grow by factors; what lies in between is read off the line, which is never below a peak that is
the largest of several sums. All of it is remembered on disk by the model's config, the settings that a pass depends on,
the versions of the libraries and this package's own sources, so that another plan traces nothing and imports no torch.
XLA, where `trainer.memory_probe=xla` asks it, is one more probe, of the same sizes. Both are of a CPU's kernels.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import sums_once_a_step
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory.fit import MemoryProbe, PassPeaks, fit_memory_model
from skyrl_train.model.sizes import ModelSizes, ParameterCounts, remember, remembered_file, source_stamps, text_part

if TYPE_CHECKING:
    from skyrl_train.learner.memory.probe import Probed, Prober

Phase = Literal["training", "scoring"]

_DEPTHS = (2, 3)
"""Decoder layers of the models that are traced, where layers are alike and there are more."""
_MOST_POSITIONS = 1 << 20
"""Of a size that is traced; what more would take follows from the line."""
_SOURCES = ("algorithms", "batch", "learner", "memory", "model")
"""Folders of this package whose code decides what a pass takes."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """A pass at its peak."""

    moment: str
    """Where it holds most."""
    kinds: Mapping[str, int]
    """Bytes by kind; none is 0."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """How one rank holds a model on its device."""

    num_shards: int = 1
    """Ranks over which it is spread, where it is `sharded`."""
    sequence: int = 1
    """Ranks that compute a micro-batch together, each a part of its positions (`strategy.sequence_parallel_size`)."""
    tensor_ranks: int = 1
    """Ranks with parts of the matrices: what is traced and counted is one's."""
    sharded: bool = False
    expert_ranks: int = 1
    """Ranks among which experts are divided."""
    cpu_offload: bool = False
    """Whether shards, their gradients and optimizer state are in host memory."""
    gradient_sync: Literal["auto", "step", "micro_batch"] = "micro_batch"
    device_bytes: int = 0
    """Memory of the device, by which `gradient_sync=auto` decides."""
    state_bytes: int = 8
    """Of the optimizer's state, for each parameter that is trained: AdamW's two averages."""
    state_at_once: int | None = None
    """Bytes of that state which a step has on the device at once at most, where it is in host memory between steps."""
    compute_bytes: int = 4
    """Of a number in the forward pass."""
    frozen_bytes: int = 4
    """Of a parameter that is not trained."""
    is_scored_only: bool = False
    """Whether none is."""
    in_4_bits: bool = False
    """Whether decoder layers are, where they are not trained."""
    device_type: str = "cpu"

    def resident(self, counts: ParameterCounts, *, training: bool) -> dict[str, int]:
        """Return what lies on the device whatever the micro-batch, in bytes by kind; gradients only while training."""
        own = counts.on_a_rank(self.expert_ranks)
        whole: dict[str, int] = {}
        if self.sharded and own.trained and training:
            gradients = 4 * own.trained
            once = sums_once_a_step(self.gradient_sync, gradient_bytes=gradients, device_bytes=self.device_bytes)
            whole = {"gradients": gradients} if once else {}
        if self.sharded and self.cpu_offload:
            return whole
        held, shards = self._held(counts)
        trained = 0 if self.is_scored_only else held.trained
        kinds = {
            "parameters": self._frozen(held, held.total - trained) + 4 * trained,
            "gradients": 4 * held.trained * training,
            "optimizer state": self.state_bytes * held.trained if self.state_at_once is None else 0,
        }
        return {**{kind: -(-count // shards) for kind, count in kinds.items() if count}, **whole}

    def stepping(self, counts: ParameterCounts) -> dict[str, int]:
        """Return what lies on the device while an optimizer steps whose state comes from host memory, in bytes by kind.
        Nothing where it stays on the device: passes hold more then."""
        if self.state_at_once is None:
            return {}
        summed = replace(self, gradient_sync="micro_batch")  # gradients are shards again by then
        state = min(self.state(counts), self.state_at_once)
        return summed.resident(counts, training=True) | {"optimizer state": state}

    def state(self, counts: ParameterCounts) -> int:
        """Return the bytes of a rank's optimizer state, wherever it is."""
        held, shards = self._held(counts)
        return -(-self.state_bytes * held.trained // shards)

    def _held(self, counts: ParameterCounts) -> tuple[ParameterCounts, int]:
        """What ranks hold together, and how many they are. The experts of a rank are sharded over those that have the same:
        all ranks together hold each parameter once."""
        return (counts, self.num_shards) if self.sharded else (counts.on_a_rank(self.expert_ranks), 1)

    def _frozen(self, counts: ParameterCounts, num_frozen: int) -> int:
        if not self.in_4_bits:
            return self.frozen_bytes * num_frozen
        # beside 4 bits each a scale of 8 bits for 64 of them
        return self.frozen_bytes * counts.root + int((num_frozen - counts.root) * (1 / 2 + 1 / 64))

    def exchanged(self, counts: ParameterCounts, *, training: bool) -> dict[str, int]:
        """Return what ranks of a sharded model hold of each other's parts in a pass, in bytes by kind."""
        if not self.sharded:
            return {}
        own = counts.on_a_rank(self.expert_ranks)
        return own.exchanged(compute_bytes=self.compute_bytes, num_shards=self.num_shards, training=training)

    def exchanged_heads(self, sizes: ModelSizes, *, positions: int) -> dict[str, int]:
        """Return what ranks that share a micro-batch of so many `positions` hold to exchange positions for heads around the
        attention of one layer: queries, keys and values apart, as they are sent, and as they come."""
        if self.sequence == 1:
            return {}
        # Fewer key and value heads than ranks are copied.
        kv_heads = math.lcm(sizes.num_kv_heads, self.sequence)
        features = (sizes.num_heads + 2 * kv_heads) * sizes.head_dim
        return {"exchanged heads": 3 * features * -(-positions // self.sequence) * self.compute_bytes}

    def travelling_tokens(self, numbers: int, *, positions: int) -> dict[str, int]:
        """Return what a layer holds of tokens on their way to experts of other ranks, of each position so many `numbers`: as
        they are sent, and as they come, taken to be as many."""
        if self.expert_ranks == 1:
            return {}
        return {"tokens that travel": 2 * numbers * -(-positions // self.sequence) * self.compute_bytes}


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
        training = phase == "training"
        kinds = self.share.resident(self.counts, training=training)
        kinds |= self.share.exchanged(self.counts, training=training)
        kinds |= self._beside_layers(phase, rows)
        kinds |= peaks.kinds
        moment, step = peaks.moment, self.share.stepping(self.counts) if training else {}
        if sum(step.values()) > sum(kinds.values()):
            moment, kinds = "in the optimizer's step", step
        return MemoryEstimate(moment=moment, kinds={kind: count for kind, count in kinds.items() if count})

    def fits_one_row(self, phase: Phase, limit_bytes: int) -> bool:
        """Return whether a micro-batch of one of the longest rows fits. Raises ModelError."""
        return self.estimate(phase, 1).peak_bytes <= limit_bytes

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
        training = phase == "training"
        beside = sum(self.share.exchanged(self.counts, training=training).values()) + self.resident_bytes(phase)
        beside += sum(self._beside_layers(phase, rows).values())
        return MemoryProbe(
            rows=rows,
            longest=self.longest,
            positions=rows * self.longest,
            training=training,
            peak_bytes=beside + self._at(phase, rows).peak_bytes,
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

    def _beside_layers(self, phase: Phase, rows: int) -> dict[str, int]:
        """What ranks exchange of positions, and what a vision tower keeps, of which nothing is traced. Ranks that share rows
        compute it whole."""
        positions = rows * self.longest
        heads = self.share.exchanged_heads(self.sizes, positions=positions)
        model = self.settings.model
        if phase == "training" and self.sizes.tower_layers and "vision" not in model.freeze:
            per_token = self.sizes.tower_bytes(checkpointing=model.recomputes)
            heads["vision tower"] = rows * self.image_tokens * per_token
        experts = int(text_part(self.config).get("num_experts_per_tok") or 0)
        return heads | self.share.travelling_tokens(experts * self.sizes.hidden_size, positions=positions)

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
