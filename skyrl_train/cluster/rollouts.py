"""Rollouts that are made where the engines are: what an engine's actor does of them. `group_rollouts.py` asks it.

    driver                                  actor of an engine                        disk          object store
    GroupRollouts.generate
      Part(prompts 0 to 3)  --roll_out-->   agent loops, environments, rewards
                                            put_durably(arrays of the samples)   -->  a segment --> arrays
      references and facts  <-------------  which of them, lengths, rewards

The driver sees no token. A part counts once its answer is here, and by then its arrays are in a file, too: an object is
gone with the actor that put it, and whoever reads it then reads the file. Where an engine dies before it has answered,
another one makes its part, of the same seeds, into a file of another name, so that nobody is told of two. The files of a
step are removed when a later one begins, which is when the log of rollouts has what was trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from skyrl_train.batch.plane import arrays_of, facts_in
from skyrl_train.cluster.stored import StoredArrays, put_durably
from skyrl_train.errors import EngineDeadError, SaveError
from skyrl_train.rollout import Place
from skyrl_train.types import GenerationOutput, GenerationRequest, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from skyrl_train.interfaces import InferenceEngine
    from skyrl_train.rollout import RolloutGenerator

MakesRollouts = Callable[["InferenceEngine"], "RolloutGenerator"]
"""Makes a generator of an engine; travels to the actors."""
Made = tuple[StoredArrays, Mapping[str, NDArray[Any]]] | list[Trajectory]
"""Where the arrays of a part are, and their facts; the trajectories themselves where no array of plain types holds them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some prompts of a batch, all of whose samples one engine makes."""

    prompts: tuple[Prompt, ...]
    places: tuple[Place, ...]
    n_samples_per_prompt: int
    sampling: SamplingParams
    global_step: int
    purpose: str
    weight_version: int
    """That all engines have while it is made."""
    folder: Path
    """Of its segment, on a disk that all nodes share."""

    @property
    def name(self) -> str:
        """What tells the part from all others of the run."""
        return f"{self.purpose}-{self.global_step}-{self.places[0].number:06d}"


class RolloutsBesideEngine:
    """Makes parts with the engine of this actor."""

    def __init__(self, make: MakesRollouts, answer: _Answers) -> None:
        """`answer` asks the engine on the actor's own loop, which this is called on."""
        self._own = _OwnEngine(answer, asyncio.get_running_loop())
        self._make, self._made = make, asyncio.Lock()
        self._generator: RolloutGenerator | None = None

    async def roll_out(self, part: Part, attempt: int) -> Made:
        """Return the samples of a part once its segment is on disk. Raises EngineDeadError where the engine died over it,
        SaveError, and what `RolloutGenerator.run_part` raises."""
        async with self._made:
            if self._generator is None:
                self._generator = await asyncio.to_thread(self._make, self._own)
        self._own.weight_version = part.weight_version
        running = self._generator.run_part(
            part.prompts,
            part.places,
            n_samples_per_prompt=part.n_samples_per_prompt,
            sampling=part.sampling,
            global_step=part.global_step,
            purpose=part.purpose,
        )
        made = await asyncio.wrap_future(self._generator.thread.begin(running))
        if self._own.died is not None:  # trajectories that failed over it are to be made by another one
            raise self._own.died
        return await asyncio.to_thread(_put, made, part.folder / f"{part.name}-{attempt}.safetensors")


_Answers = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationOutput]]


class _OwnEngine:
    """Implements `InferenceEngine` for the loop that rollouts run on by an engine that answers on another loop."""

    def __init__(self, answer: _Answers, loop: asyncio.AbstractEventLoop) -> None:
        self._answer, self._loop = answer, loop
        self.weight_version = -1
        self.died: EngineDeadError | None = None

    def lease(self) -> AbstractContextManager[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(request), self._loop))
        except EngineDeadError as error:
            self.died = error
            raise

    def close(self) -> None:
        """The engine belongs to the actor."""


def _put(made: Sequence[Trajectory], file: Path) -> Made:
    """Put samples into the store and into a file. Raises SaveError."""
    if any(turn.images for trajectory in made for turn in trajectory.turns):
        return list(made)
    try:
        arrays = arrays_of(made)
    except TypeError:  # metrics that JSON does not know
        return list(made)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return put_durably(arrays, file), facts_in(arrays)
    except OSError as error:
        raise SaveError(f"rollouts could not be written to {file}: {error}. Make room on that disk") from error
