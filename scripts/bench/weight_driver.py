"""What a weight sync takes of the driver, with ranks and engines that are fakes: `weight_sync.py --driver 8 64 512`.

The sync is the one of a run (`WeightSync`, `broadcast`). Each fake gets its call pickled and answers pickled, as an actor
does, and what it computes itself is not counted. Ray's own work for a call, the same for every call, is not there.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.endpoints import Endpoint, Pending, Phase, method_name
from skyrl_train.weight_sync import (
    DeviceSharing,
    Receiver,
    RouteContext,
    SyncRecords,
    UpdatableEngine,
    WeightSync,
    transports,
)
from skyrl_train.weights import Box, Bucket, ModelWeights, ParameterFact, StreamPlan, WeightSender

RANKS_PER_NODE = 8


def shapes_of_7b() -> dict[str, tuple[int, ...]]:
    """Return the parameters of Qwen2.5-7B."""
    hidden, inner, keys, vocabulary = 3584, 18944, 512, 152064
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        **{f"self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"},
        **{f"self_attn.{name}_proj.bias": (keys,) for name in "kv"},
        "self_attn.o_proj.weight": (hidden, hidden),
        **{f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    layers = {f"model.layers.{index}.{name}": shape for index in range(28) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    return {**ends, **layers, "model.norm.weight": (hidden,)}


class Rank:
    """A rank of FSDP2, by what it answers."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def describe(self) -> tuple[ParameterFact, ...]:
        return tuple(ParameterFact(name=name, dtype="float32", shape=shape) for name, shape in shapes_of_7b().items())

    def boxes(self, planned: Sequence[Bucket]) -> tuple[tuple[Box, ...], ...]:
        return tuple(self._boxes(bucket) for bucket in planned)

    def _boxes(self, bucket: Bucket) -> tuple[Box, ...]:
        found: list[Box] = []
        for place, shape in enumerate(bucket.shapes):
            rows = -(-shape[0] // self._num_ranks)
            low = self._rank * rows
            if low < shape[0]:
                found.append((place, (low, *(0 for _ in shape[1:])), (min(rows, shape[0] - low), *shape[1:])))
        return tuple(found)

    def free_port(self) -> int:
        return 29500

    def stream(self, *_: Any) -> int:
        return 30_000_000


class Engine:
    """An engine, by what it answers."""

    def receivers(self) -> list[Receiver]:
        return [Receiver(device="GPU-0", dtype="bfloat16")]

    def finish_update(self, version: int, _: int) -> int:
        return version


class Answers(Pending[Any]):
    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers

    def wait(self, *others: Pending[Any]) -> list[Any]:
        for other in others:
            other.wait()
        return [pickle.loads(answer) for answer in self._answers]

    def passed_on(self, index: int = 0) -> Any:
        return self._answers[index]


class Fakes(Endpoint[Any]):
    """Fakes as an endpoint, eight to a node."""

    away_s, num_bytes, num_calls = 0.0, 0, 0
    """Of all fakes: what they computed themselves, what they were sent, and how many calls that was."""

    def __init__(self, kind: type[Any], fakes: Sequence[Any], nodes: str) -> None:
        self._kind, self._fakes = kind, fakes
        self._nodes = tuple(f"{nodes}{index // RANKS_PER_NODE}" for index in range(len(fakes)))

    def begin(self, method: Callable[..., Any], _phase: Phase, /, *args: Any, **_: Any) -> Answers:
        large = {id(each): pickle.dumps(each) for each in args if isinstance(each, StreamPlan)}  # as `stored` does
        Fakes.num_bytes += sum(map(len, large.values()))
        given = tuple(None if id(each) in large else each for each in args)
        return self._hand_over(method, [(given, args)] * len(self._fakes))

    def begin_each(self, method: Callable[..., Any], _phase: Phase, each: Sequence[Any], /) -> Answers:
        return self._hand_over(method, [((one,), (one,)) for one in each])

    def ask(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def _hand_over(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, Any]]) -> Answers:
        key, answers = method_name(self._kind, method), []
        for fake, (pickled, given) in zip(self._fakes, arguments, strict=True):
            Fakes.num_bytes += len(pickle.dumps((key, pickled)))
            Fakes.num_calls += 1
            began = time.process_time()
            answer = getattr(fake, method.__name__, lambda *_: None)(*given)
            answers.append(pickle.dumps(answer))
            Fakes.away_s += time.process_time() - began
        return Answers(answers)

    @property
    def members(self) -> tuple[object, ...]:
        return tuple(self._fakes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"fake {index}" for index in range(len(self._fakes)))

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._nodes


def measure_driver(num_ranks: int, *, syncs: int) -> list[tuple[float, int, int]]:
    """Return CPU seconds, bytes pickled and calls of each sync of so many ranks to as many engines, the meeting in the
    first."""
    engines = Fakes(UpdatableEngine, [Engine() for _ in range(num_ranks)], "engines-")
    ranks = Fakes(WeightSender, [Rank(rank, num_ranks) for rank in range(num_ranks)], "ranks-")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        settings = RouteContext(files=Path(folder), node_folder=Path(folder), timeout_s=60.0)
        sync = WeightSync(lambda: engines, transports.broadcast, settings, DeviceSharing(), SyncRecords(None))
        weights = ModelWeights(ranks, scores=lambda _: None)  # type: ignore[arg-type,return-value]
        for version in range(syncs):
            Fakes.away_s, Fakes.num_bytes, Fakes.num_calls = 0.0, 0, 0
            began = time.process_time()
            sync.sync(weights, version)
            found.append((time.process_time() - began - Fakes.away_s, Fakes.num_bytes, Fakes.num_calls))
    return found
