"""An engine that is cheap to have in actors: it makes answers up, and dies where it is told."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.declarations import reads
from skyrl_train.errors import EngineError
from skyrl_train.inference import EngineSettings
from skyrl_train.types import GenerationOutput, GenerationRequest, RolloutBatch, StopReason, Tokenizer, VersionRun
from skyrl_train.weight_sync import UpdatableEngine

BEFORE_FIRST_SYNC = -1


@reads(own_devices=True)
class MadeUp(UpdatableEngine):
    """Draws answers by the seeds of requests. A file in the run's folder tells one engine when to die: `answer` over a
    request, `before` or `after` it has put the samples of a part; or each to `refuse` every request."""

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer) -> None:
        self._folder, self._size = settings.output_dir, len(tokenizer)
        rollouts: Any = importlib.import_module("skyrl_train.cluster.rollouts")  # of this actor, which is to die in it
        rollouts.put_durably = self._around(rollouts.put_durably)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self._die_if_told("answer")
        if (self._folder / "refuse").exists():
            raise EngineError("refused, as it was told")
        draw = np.random.default_rng(request.seed)
        length = int(draw.integers(1, request.sampling.max_generate_length + 1))
        return GenerationOutput(
            token_ids=tuple(draw.integers(0, self._size, length).tolist()),
            logprobs=tuple((-draw.random(length)).tolist()),
            stop_reason=StopReason.LENGTH,
            weight_versions=(VersionRun(0, BEFORE_FIRST_SYNC),),
        )

    def close(self) -> None:
        pass

    def _around(self, put: Callable[..., Any]) -> Callable[..., Any]:
        def put_and_die(*args: Any) -> Any:
            self._die_if_told("before")
            found = put(*args)
            self._die_if_told("after")
            return found

        return put_and_die

    def _die_if_told(self, when: str) -> None:
        try:
            (self._folder / when).unlink()  # which one process can
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def tell(folder: Path, when: str) -> None:
    """Have an engine of the run die then."""
    (folder / when).touch()


def texts_of(rollouts: RolloutBatch) -> list[str]:
    """What was answered, for who reads it elsewhere: functions travel by the names of their modules."""
    return [turn.response_text for each in rollouts.trajectories for turn in each.turns]
