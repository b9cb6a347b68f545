"""What a rank of several holds beside a traced pass: residency and exchange, counted from numbers of parameters. No torch.

This is the one table that is kept by hand, and it stands alone. A trace runs one rank's pass on whole parameters: it knows
neither how many ranks there are nor what they send one another, and must not, since one trace serves every number of ranks
and every device. `placement=auto` asks of hundreds of forms, of models that are too large to be traced for each, before
torch is imported. So a plan, that search and the trace at the start of a run all read these functions, and tests hold them
against what the counting meter sees of real ranks (`tests/equivalence/test_budgets_on_ranks.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from skyrl_train.config.models import sums_once_a_step
from skyrl_train.model.sizes import ModelSizes, ParameterCounts


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
    """Whether no parameter is trained, as of a reference."""
    in_4_bits: bool = False
    """Whether decoder layers are, where they are not trained."""
    device_type: str = "cpu"

    def resident(self, counts: ParameterCounts, *, training: bool) -> dict[str, int]:
        """Return what lies on the device whatever the micro-batch, in bytes by kind; gradients only while training."""
        own = counts.on_a_rank(self.expert_ranks)
        whole: dict[str, int] = {}
        if self.sharded and own.trained and training:
            # Gradients are summed in float32, whatever type the passes compute in.
            gradients = 4 * own.trained
            once = sums_once_a_step(self.gradient_sync, gradient_bytes=gradients, device_bytes=self.device_bytes)
            whole = {"gradients": gradients} if once else {}
        # Shards, their gradients and the state lie in the host; whole gradients, where there are any, on the device.
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
        # What is outside of layers stays gathered; of layers the one at work and the next, which is gathered ahead.
        found = {"gathered parameters": self.compute_bytes * (own.root + 2 * own.block)}
        if training and own.trained == own.total:
            # The gradient of the layer before, in float32 as it is summed over ranks, with its shard of the sum.
            found["gradients in flight"] = 4 * own.block + 4 * -(-own.block // self.num_shards)
        return found

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
