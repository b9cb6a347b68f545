"""The other end of a weight sync: what an engine does with buckets of weights, and what it says of where they go."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.parts import Arrivals
from skyrl_train.weights import Bucket, StreamPlan, Update, carried_bytes

if TYPE_CHECKING:
    from skyrl_train.endpoints import Rendezvous
    from skyrl_train.types import GenerationOutput, GenerationRequest

_NO_BROADCAST = "this engine takes no broadcast of weights. Set generator.weight_transport=shared_memory"
Generate = Callable[["GenerationRequest"], Coroutine[Any, Any, "GenerationOutput"]]
LoadWeights = Callable[[Iterable[tuple[str, Tensor]], int], None]


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """One worker of an engine, as far as weights on their way to it are concerned."""

    device: str = ""
    """Where it computes (`device_name` of `weight_sync/cuda_ipc.py`); empty where it does not say."""
    dtype: str = ""
    """Type of all its matrices, e.g. `bfloat16`; empty where they differ, as where some are quantized."""
    reads_files: bool = False
    """Whether it takes weights from files alone, as a server does."""


def wire_dtype(receivers: Iterable[Receiver]) -> str:
    """The type that matrices travel in: `bfloat16` or `float16` where all receivers keep theirs in it, which would
    round them on arrival just the same; else empty, for that of each parameter."""
    # One receiver of another type, or of mixed ones, is enough: it
    # would get rounded weights in place of what it keeps in full.
    found = {receiver.dtype for receiver in receivers}
    return found.pop() if found in ({"bfloat16"}, {"float16"}) else ""


class UpdatableEngine:
    """What an engine is asked by others than who generates, between requests. Methods block, and raise EngineError.

    An engine that takes weights bucket by bucket, or that can leave its devices, derives from this class; any other is
    wrapped into a `WholeWeights`.
    """

    @property
    def suspended(self) -> bool:
        """Whether a process of it is stopped by a signal, so that no answer can come."""
        return False

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory, as of `InferenceEngine`: requests join and leave a running batch, so nobody waits."""
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the tokens that one request samples, and their log-probabilities."""
        raise NotImplementedError

    def receivers(self) -> list[Receiver]:
        """Return its workers, one per device, by rank."""
        return [Receiver()]

    def take_plan(self, plan: StreamPlan) -> None:  # noqa: ARG002
        """Keep what the syncs are that follow the next `meet`."""
        raise EngineError(_NO_BROADCAST)

    def meet(self, rendezvous: Rendezvous) -> None:  # noqa: ARG002
        """Join a trainer that broadcasts its weights, by the plan; `rendezvous.rank` is that of the first worker."""
        raise EngineError(_NO_BROADCAST)

    def receive(self, version: int, update: Update) -> None:  # noqa: ARG002
        """Take all that the plan says, of a sync to `version`."""
        raise EngineError(_NO_BROADCAST)

    def can_import(self, bucket: Bucket) -> bool:  # noqa: ARG002
        """Return whether all its workers can read the memory that a bucket's owner exports."""
        return False

    def begin_update(self) -> None:
        """Compute nothing from here on until `finish_update`; new requests wait."""
        raise NotImplementedError

    def update(self, bucket: Bucket) -> None:
        """Take some of the weights."""
        raise NotImplementedError

    def update_parts(self, bucket: Bucket, *parts: Bucket) -> None:
        """Take some of the weights, of which each rank sent a part."""
        self.update(replace(bucket, parts=parts))

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serve with the new weights, `num_tensors` in all, under `version`, and return the version that serves."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free the device for others; called where the engine is wholly awake."""
        raise EngineError("this engine cannot leave its device. Set placement.colocate_all=false")

    def sleep_without_weights(self) -> None:
        """As `sleep`, but no weights need be kept: all of them are sent before the next request."""
        self.sleep()

    def wake_up(self, tag: str) -> None:
        """Take the device again, for `weights` or for the `kv_cache`."""
        raise EngineError(f"this engine cannot leave its device, and so not come back to it for {tag}")


class WholeWeights(UpdatableEngine):
    """An engine that takes all weights at once: buckets are kept until the last has come."""

    def __init__(self, generate: Generate, load_weights: LoadWeights) -> None:
        """Both are methods of the engine: `InferenceEngine.generate`, and `load_weights(weights, version)`, which takes all
        weights or none."""
        self._generate, self._load_weights = generate, load_weights
        self._arrived: dict[str, Tensor] = {}
        self._arrivals = Arrivals()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the engine's answer."""
        return await self._generate(request)

    def begin_update(self) -> None:
        """Forget what an update that failed has left."""
        self._arrived = {}
        self._arrivals.begin()

    def update(self, bucket: Bucket) -> None:
        """Keep the parameters. Raises EngineError for damaged bytes."""
        # Held back until the end, since `load_weights` takes all weights or none.
        self._arrived |= dict(self._arrivals.take(bucket, carried_bytes))

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Hand over what has come. Raises EngineError where that is not all, or not what the engine's model has."""
        # Let go first: a second copy of the weights would stay where loading them fails.
        arrived, self._arrived = self._arrived, {}
        if len(arrived) != num_tensors:
            raise EngineError(f"{len(arrived)} of {num_tensors} parameters arrived")
        self._load_weights(arrived.items(), version)
        return version


def updatable(engine: Any) -> UpdatableEngine:
    """Return an inference engine as a weight sync calls it: one that derives from `UpdatableEngine`, or that has
    `load_weights(weights, version)`."""
    return engine if isinstance(engine, UpdatableEngine) else WholeWeights(engine.generate, engine.load_weights)
