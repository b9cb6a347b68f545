"""What stands before the engine and the environments of a stream, so that the journal has all that they answered.

A trajectory that a run before had begun is played again from its first turn, by the same loop. The journal answers for
the engine (`JournaledEngine`) and for the environment (`JournaledEnvironment`), which is not even made as long as it does.
At the first call that the journal has no answer to, the environment is brought to where it was, by the first of these ways
that it offers:

    state    it has `get_state` and `set_state`: made as before, it is given the state that stood beside its last answer
    replay   it says `deterministic = True`: made as before, it is given the same calls, and must answer as it did
    restart  neither, or the way failed: a new one begins with its first turn, with the reason counted

What restarts is asked from its first turn on, too; the engine's answers are those of the journal as long as the prompts are
the same. `environment.tools` have no state that is known, so that with them there is no first way.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, suppress
from typing import Any

from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.boundary.session import Broken, EnvironmentHandle, Request
from skyrl_train.rollout.journal import Call, Journal
from skyrl_train.rollout.plain_data import plain_state
from skyrl_train.rollout.token_stream import listening
from skyrl_train.types import FailureKind, GenerationOutput, GenerationRequest

DECLARED_METRICS = """
stream/resumed_{whole,state,replay} | count | Environments of a run before that came back so. | after a resumed stream
stream/restarted_<reason> | count | Those that did not, whose trajectory began anew. | after a resumed stream
"""

_ENDS = "get_metrics"
"""The last call before the environment is closed."""
_CHANGING = ("init", "step", "cut", "tools")
_ARGUMENTS = ("call", "messages", "action", "calls")
"""What tells calls of one trajectory from one another: the row is the same."""


class Restarted(Exception):
    """The environment of a trajectory cannot be brought to where it was. The trajectory is to be run once more: the journal
    has no calls of it any longer."""


class JournaledEngine:
    """Implements `InferenceEngine` by another one, whose answers are in the journal before anybody has them."""

    def __init__(self, engine: InferenceEngine, journal: Journal) -> None:
        self._engine, self._journal = engine, journal

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises as the engine does; SaveError."""
        known = self._journal.turn(request)
        if known is not None:
            return known
        with listening(None):  # nobody may act on tokens that the journal might lose
            output = await self._engine.generate(request)
        await self._journal.keep_turn(request, output)
        return output

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class JournaledEnvironment:
    """Implements `EnvironmentHandle` by another one, whose answers are written to the journal."""

    def __init__(self, handle: EnvironmentHandle, journal: Journal, trajectory: str) -> None:
        """`trajectory` is the name that its calls have in the journal."""
        self._handle, self._journal, self._trajectory = handle, journal, trajectory
        self._known = journal.calls(trajectory)
        if self._known and self._way() == "":
            had_response = len(self._known) > 2  # its construction and the first messages
            journal.restart(trajectory, "no_state" if had_response else "")
            self._known = ()
        self._asked: list[Request] = []
        """Those that the journal has answered."""
        self._is_live = not self._known

    async def ask(self, request: Request) -> object:
        """Raises Broken as the environment does; Restarted."""
        call = request["call"]
        if call == "close":
            return await self._handle.ask(request) if self._is_live else {"value": None}
        of = _digest(request)
        if len(self._asked) < len(self._known):
            known = self._known[len(self._asked)]
            if known.of != of:
                raise self._restarted("asked_otherwise")
            self._asked.append(request)
            return {"value": known.value}
        if not self._is_live:
            await self._bring_back()
        answer = await self._handle.ask({**request, "keeps": True} if call in _CHANGING else request)
        if not isinstance(answer, dict) or "value" not in answer:
            return answer
        try:
            resume = _checked(answer.pop("resume", {}))
        except ValueError as error:
            return {"failure": FailureKind.ENVIRONMENT_ERROR.value, "message": f"{call} and get_state: {error}"}
        self._journal.keep_call(self._trajectory, Call(of=of, value=answer["value"], resume=resume))
        return answer

    def release(self) -> None:
        """Forget the environment."""
        self._handle.release()

    def _way(self) -> str:
        """Return how the environment comes back to where the journal ends; empty where it cannot."""
        last = self._known[-1]
        if last.of == _digest({"call": _ENDS}):
            return "whole"
        return next((way for way in ("state", "replay") if way in last.resume), "")

    async def _bring_back(self) -> None:
        way, construction = self._way(), self._asked[0]
        self._is_live = True
        if way == "state":
            state = {"call": "set_state", "state": self._known[-1].resume["state"]}
            is_back = await self._repeat(construction) and await self._repeat(state)
        else:
            is_back = True
            for request, known in zip(self._asked, self._known):
                is_back = is_back and await self._repeat(request, known)
        if not is_back:
            raise self._restarted("state_refused" if way == "state" else "replay_differs")
        self._journal.resumed(way)

    async def _repeat(self, request: Request, known: Call | None = None) -> bool:
        """Return whether the environment answers, and as it did where that is `known`; it is closed where it does not."""
        try:
            answer = await self._handle.ask(request)
        except Broken:
            return False
        if isinstance(answer, dict) and "value" in answer and (known is None or answer["value"] == known.value):
            return True
        with suppress(Broken):
            await self._handle.ask({"call": "close"})
        return False

    def _restarted(self, reason: str) -> Restarted:
        self._journal.restart(self._trajectory, reason)
        return Restarted(f"{self._trajectory}: {reason}")


def _checked(resume: object) -> dict[str, Any]:
    """Return how to resume, which a worker process may have sent. Raises ValueError."""
    if isinstance(resume, dict) and set(resume) == {"state"}:
        return {"state": plain_state(resume["state"])}
    return {"replay": True} if resume == {"replay": True} else {}


def _digest(request: Request) -> str:
    told = {name: request[name] for name in _ARGUMENTS if name in request}
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
