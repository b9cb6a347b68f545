"""What stands before an inference engine, and what a recording or a custom agent loop hands in, checked before it is used.

Whichever engine answers (Hugging Face, vLLM, a server, a custom one), `CheckedEngine` stands before it, so that no other
code has to doubt an answer. What is refused fails the one trajectory that asked, with the reason.

Tokens of an answer that is on its way are told to whoever listens while an engine is asked:

    with listening(take):                 take(token ids) is called as they are sampled, on whichever thread that is
        await engine.generate(request)

An engine that can says them (`listener()`); others say nothing until the whole answer is there, which is what counts.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import EngineError, SkyrlTrainError, counted
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.rollout.boundary import describe
from skyrl_train.rollout.journal import Journal
from skyrl_train.system.files import shown
from skyrl_train.telemetry import Activity
from skyrl_train.types import (
    Failure,
    FailureKind,
    GenerationOutput,
    GenerationRequest,
    Outcome,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    routing_column,
)

Listener = Callable[[Sequence[int]], object]

_LISTENER: ContextVar[Listener | None] = ContextVar("token_listener", default=None)


def listener() -> Listener | None:
    """Return who listens to the answer that is being asked for."""
    return _LISTENER.get(None)


@contextmanager
def listening(take: Listener | None) -> Iterator[None]:
    """Have `take` told of the answer that is asked for inside; None where nobody may be."""
    token = _LISTENER.set(take)
    try:
        yield
    finally:
        _LISTENER.reset(token)


logger = logging.getLogger(__name__)

_MAX_REASONS = 5
"""Lines about failed trajectories in one message."""
FIRST_FEW = 8
"""Trajectories that begin first: where they fail alike before any has succeeded, the others would, too."""
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*(?:'|$)|"(?:\\.|[^"\\])*(?:"|$))""", re.DOTALL)
"""As Python writes texts, or the beginning of one where a message was cut off; no apostrophe in a word."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class CheckedEngine:
    """Implements `InferenceEngine` by another one, of which it trusts nothing."""

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        vocabulary_size: int,
        activity: Activity | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`vocabulary_size`: rows of the policy's embedding, one for each token id that it can be given. `activity` is told
        of requests. Answers are in the `journal` before anybody has them, or taken from there."""
        self._engine, self._activity, self._journal = engine, activity or Activity(), journal
        self._vocabulary_size = vocabulary_size

    def with_journal(self, journal: Journal) -> CheckedEngine:
        """Return the same with a journal, for one trajectory."""
        size, activity = self._vocabulary_size, self._activity
        return CheckedEngine(self._engine, vocabulary_size=size, activity=activity, journal=journal)

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory to the engine, which may wait for it."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return a checked answer. Raises EngineError where the engine breaks or its answer is refused, DeadlineError where
        it is late, SaveError."""
        if self._journal is not None and (known := self._journal.turn(request)) is not None:
            return known
        check_prompt(request.prompt_token_ids, vocabulary_size=self._vocabulary_size)
        oldest = self._engine.weight_version
        # Nobody may act on tokens that the journal might lose.
        heard = listener() if self._journal is None else None
        try:
            with self._activity.request(), listening(heard):
                answer = await self._engine.generate(request)
        except SkyrlTrainError:
            raise
        except Exception as error:  # a custom engine may raise anything; whoever wrote it needs to see where
            logger.warning("the engine broke over request %s", request.request_id, exc_info=error)
            raise EngineError(f"the engine broke over request {request.request_id}: {describe(error)}") from error
        versions = (oldest, self._engine.weight_version)
        output = check_answer(answer, request, vocabulary_size=self._vocabulary_size, versions=versions)
        if self._journal is not None:
            await self._journal.keep_turn(request, output)
        return output

    def close(self) -> None:
        """Close the engine behind it."""
        self._engine.close()


def check_prompt(token_ids: Sequence[int], *, vocabulary_size: int) -> None:
    """Raise EngineError for a prompt with a token that the model has no embedding of, which would break a whole batch."""
    largest = max(token_ids, default=0)
    if largest >= vocabulary_size:
        raise EngineError(
            f"the prompt has the token id {largest}, and the model knows those from 0 to {vocabulary_size - 1}. Is the "
            "tokenizer that of another model? Set model.tokenizer_path"
        )


def check_answer(
    answer: object,
    request: GenerationRequest,
    *,
    vocabulary_size: int,
    versions: tuple[int, int],
) -> GenerationOutput:
    """Return the answer with plain numbers, or raise EngineError saying what is wrong with it.

    Args:
        answer: Whatever the engine gave.
        request: What it was asked; no more tokens may come than that.
        vocabulary_size: Token ids are from 0 to below this.
        versions: Oldest and newest version of the weights that the engine had while it answered.
    """
    if not isinstance(answer, GenerationOutput):
        raise EngineError(f"the engine returned {shown(answer)}; must be a GenerationOutput")
    if not isinstance(answer.stop_reason, StopReason):
        raise EngineError(f"the engine returned the stop reason {shown(answer.stop_reason)}; must be a StopReason")
    token_ids = _plain(answer.token_ids, "token id", "a whole number", (int, np.integer), int)
    if answer.stop_reason is StopReason.ABORT:
        raise EngineError(f"the engine aborted the request after {counted(len(token_ids), 'token')}")
    if not token_ids:
        raise EngineError("the engine returned no tokens")
    most = request.sampling.max_generate_length
    if len(token_ids) > most:
        raise EngineError(f"the engine returned {counted(len(token_ids), 'token')}, and {most} were asked for")
    if (wrong := _first_outside(token_ids, vocabulary_size)) is not None:
        raise EngineError(
            f"the engine returned the token id {shown(token_ids[wrong])} (token {wrong} of the answer); must be from 0 to "
            f"{vocabulary_size - 1}"
        )
    logprobs = _plain(answer.logprobs, "log-probability", "a number", (float, int, np.floating, np.integer), float)
    if len(logprobs) != len(token_ids):
        raise EngineError(
            f"the engine returned {len(logprobs)} log-probabilities for {counted(len(token_ids), 'token')}"
        )
    if (wrong := _first_not_logprob(logprobs)) is not None:
        raise EngineError(
            f"the engine returned the log-probability {logprobs[wrong]!r} (token {wrong} of the answer); must be finite and "
            "at most 0. It is one that is not finite or not of a probability"
        )
    runs = _version_runs(answer.weight_versions, len(token_ids), versions)
    routed = _routing(answer.routed_experts, len(request.prompt_token_ids) + len(token_ids) - 1)
    same = token_ids is answer.token_ids and logprobs is answer.logprobs and runs is answer.weight_versions
    if same and routed is answer.routed_experts:
        return answer
    return replace(answer, token_ids=token_ids, logprobs=logprobs, weight_versions=runs, routed_experts=routed)


def checked_trajectory(trajectory: Trajectory, *, vocabulary_size: int, max_context_length: int) -> Trajectory:
    """Return the trajectory, or a failed one with the turns before the first that cannot be trained on.

    Args:
        trajectory: Recorded, or made by a custom agent loop.
        vocabulary_size: Token ids are from 0 to below this.
        max_context_length: Most tokens of a prompt and its response together.
    """
    for index, (turn, prompt_length) in enumerate(zip(trajectory.turns, trajectory.prompt_lengths())):
        kind, reason = FailureKind.ENGINE_ERROR, ""
        length = prompt_length + len(turn.response_token_ids)
        largest = max(int(column.max(initial=0)) for column in (turn.added_token_ids, turn.response_token_ids))
        with np.errstate(over="ignore"):
            is_float32 = bool(np.isfinite(np.float32(turn.reward)))
        if not is_float32:
            kind, reason = FailureKind.INVALID_REWARD, f"the reward {turn.reward!r} is not finite in float32"
        elif length > max_context_length:
            most_tokens = f"generator.max_context_length={max_context_length}"
            reason = f"{counted(length, 'token')} of prompt and response, more than {most_tokens}"
        elif largest >= vocabulary_size:
            reason = f"the token id {largest}, and the model knows those from 0 to {vocabulary_size - 1}"
        elif (wrong := _first_not_logprob(turn.response_logprobs)) is not None:
            reason = f"the log-probability {turn.response_logprobs[wrong]!r}, which must be finite and at most 0"
        if reason:
            return _failed(trajectory, index, kind, reason)
    return trajectory


def check_failures(done: Sequence[Trajectory], total: int, *, limit: float, none_succeeded: bool = False) -> None:
    """Raise SkyrlTrainError, of the engine where it is what fails, where more than `limit` of `total` trajectories failed;
    where `none_succeeded` since the run began, already where as many as `FIRST_FEW` failed alike in its own code.

    `limit` is `environment.max_failed_fraction`; the message counts the reasons, with an example of each.
    """
    failed = [trajectory for trajectory in done if trajectory.failure is not None]
    failures = [trajectory.failure for trajectory in failed if trajectory.failure is not None]
    alike = none_succeeded and limit < 1 and FIRST_FEW <= len(failures) == len(done) and _is_one_of_own_code(failures)
    if len(failures) <= limit * total and not alike:
        return
    lines = _counted([f"{failure.kind.value}: {failure.message}" for failure in failures])
    of_engine = (FailureKind.ENGINE_ERROR, FailureKind.ENGINE_TIMEOUT)
    error = EngineError if all(failure.kind in of_engine for failure in failures) else SkyrlTrainError
    remedy = "set environment.max_failed_fraction=1" if alike else "raise environment.max_failed_fraction"
    raise error(
        (
            f"{len(failures)} of {total} trajectories failed, more than environment.max_failed_fraction={limit:g}:\n"
            if len(failures) > limit * total
            else f"each of the first {counted(len(failures), 'trajectory')} failed alike ({total} were to be made):\n"
        )
        + "\n".join(lines)
        + f"\nThe first is trajectory {failed[0].prompt_uid}/{failed[0].sample_index}, turn {failures[0].turn_index}. "
        f"Fix the cause, or {remedy} to carry on without them."
    )


def _is_one_of_own_code(failures: Sequence[Failure]) -> bool:
    """Whether all of them are one error, of an environment, a tool or a reward."""
    kinds = {failure.kind for failure in failures}
    reasons = {": ".join(_folded(failure.message).split(": ")[:3]) for failure in failures}
    return len(reasons) == 1 and kinds <= {FailureKind.ENVIRONMENT_ERROR, FailureKind.REWARD_ERROR}


def _folded(reason: str) -> str:
    return _NUMBER.sub("N", _QUOTED.sub("'...'", reason))


def _counted(reasons: Sequence[str]) -> list[str]:
    """Return a line for each reason, the most frequent first, with an example where it stands for several texts.

    What differs between replies alone is one reason: quoted parts and numbers do not count, and where that still leaves
    many, neither does what follows the kind, the part and the type of the error.
    """
    folded = [_folded(reason) for reason in reasons]
    if len(set(folded)) > _MAX_REASONS:
        folded = [": ".join(reason.split(": ")[:3]) for reason in folded]
    examples = dict(zip(reversed(folded), reversed(reasons)))  # the first of each
    most = Counter(folded).most_common()
    lines = []
    for reason, count in most[:_MAX_REASONS]:
        lines.append(f"  {count} x {reason}")
        if examples[reason] != reason:
            lines.append(f"      e.g. {' '.join(examples[reason].split())[:500]}")
    others = sum(count for _, count in most[_MAX_REASONS:])
    return [*lines, *([f"  {others} for {counted(len(most) - _MAX_REASONS, 'other reason')}"] if others else [])]


def _failed(trajectory: Trajectory, turn_index: int, kind: FailureKind, reason: str) -> Trajectory:
    if trajectory.failure is not None:  # it is no less failed, and its bad turns are of no use
        return replace(trajectory, turns=trajectory.turns[:turn_index])
    failure = Failure(kind=kind, message=f"turn {turn_index} has {reason}", turn_index=turn_index)
    turns: tuple[Turn, ...] = trajectory.turns[:turn_index]
    return replace(trajectory, turns=turns, outcome=Outcome.FAILED, failure=failure)


def _plain(values: object, name: str, rule: str, kinds: tuple[type, ...], make: type) -> tuple[Any, ...]:
    """Return the values as a tuple of Python's own numbers; the tuple itself where it is one. True and False are none."""
    column = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values
    if not isinstance(column, (tuple, list)):
        raise EngineError(f"the engine returned {shown(values)} in place of a {name} for each token")
    given = set(map(type, column))
    for kind in given:
        if kind is bool or not (kind in kinds or (issubclass(kind, np.generic) and issubclass(kind, kinds))):
            wrong = next(index for index, value in enumerate(column) if type(value) is kind)
            raise EngineError(
                f"the engine returned the {name} {shown(column[wrong])} (token {wrong} of the answer); must be {rule}"
            )
    if given <= {make} and isinstance(column, tuple):
        return column
    try:
        return tuple(map(make, column))
    except OverflowError:
        raise EngineError(f"the engine returned a {name} that is too large") from None


def _routing(routed: Any, num_computed: int) -> NDArray[np.int16]:
    """Return the experts of an answer whose tokens, with the prompt's, were `num_computed`, or raise EngineError."""
    try:
        column: NDArray[np.int16] = routing_column(routed)
    except ValueError as error:
        raise EngineError(f"the engine returned routed_experts that are none: {error}") from None
    if len(column) > num_computed:
        raise EngineError(f"the engine returned experts of {len(column)} tokens, and computed {num_computed}")
    return column


def _version_runs(runs: object, num_tokens: int, versions: tuple[int, int]) -> tuple[VersionRun, ...]:
    """Return the runs of an answer of so many tokens, or raise EngineError: they must cover them from the first on, with
    versions that never fall and that the engine had while it answered."""
    pairs = list(runs) if isinstance(runs, (tuple, list)) else []
    if not pairs or not all(isinstance(run, (tuple, list)) and len(run) == 2 for run in pairs):
        raise EngineError(f"the engine returned {shown(runs)} as weight_versions; must be runs (start, version)")
    known = " to ".join(map(str, sorted(set(versions))))
    for _, version in pairs:
        if type(version) is not int or not versions[0] <= version <= versions[1]:
            raise EngineError(f"the engine answered with weights {shown(version)}, and has those of {known}")
    starts, found = [run[0] for run in pairs], [run[1] for run in pairs]
    in_order = all(type(start) is int for start in starts) and starts == sorted(set(starts)) and found == sorted(found)
    if not in_order or starts[0] != 0 or starts[-1] >= num_tokens:
        raise EngineError(
            f"the engine returned the weight_versions {shown(pairs)} for {counted(num_tokens, 'token')}; runs "
            "(start, version) must begin at token 0, come in order and within the answer, and their versions must never fall"
        )
    return (
        runs if isinstance(runs, tuple) and set(map(type, pairs)) == {VersionRun} else tuple(starmap(VersionRun, pairs))
    )


def _first_outside(token_ids: Sequence[int], vocabulary_size: int) -> int | None:
    """Return the index of the first token id that there is none of. Python's own comparison: an id may have any size."""
    if min(token_ids) >= 0 and max(token_ids) < vocabulary_size:
        return None
    return next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocabulary_size)


def _first_not_logprob(values: Any) -> int | None:
    """Return the index of the first value that is above 0 or, in float32, not finite; None where there is none."""
    with np.errstate(over="ignore"):
        column = np.asarray(values, dtype=np.float32)
    good = np.isfinite(column) & (np.asarray(values, dtype=np.float64) <= 0.0)
    return None if good.all() else int(np.argmin(good))
