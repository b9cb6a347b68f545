"""What a session sampled, in the order in which it was asked for, as the turns of a trajectory: a tree, depth first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_train.types import ChatMessage, GenerationOutput, TokenIds, Turn, find_parent, new_routing


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """One answer and what it answers."""

    messages: tuple[ChatMessage, ...]
    prompt: TokenIds
    output: GenerationOutput
    text: str
    """Of the whole response."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """That were read in it, as its message has them."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What became of a session."""

    turns: tuple[Turn, ...]
    first_messages: tuple[ChatMessage, ...]
    """Of the first turn's prompt."""
    metrics: Mapping[str, float]


def tree_of(sampled: Sequence[Sampled]) -> Kept:
    """Return the turns, each below the one whose prompt and response its prompt begins with, token by token.

    Of two branches the one that was asked last comes last, so that the last turn is the one that was asked last. Counted are
    `turns`; `roots`; `unmatched`, roots with answers of the model, beside the first; and `rewritten`, others that add some:
    answers that were not given here, or are not as they were.
    """
    turns: list[Turn] = []
    children: list[list[int]] = []
    num_new_answers: list[int] = []
    for each in sampled:
        parent, added = find_parent(turns, each.prompt)
        turns.append(_turn(each, parent, added))
        children.append([])
        known = 0 if parent is None else _num_answers(sampled[parent]) + 1
        num_new_answers.append(_num_answers(each) - known)
        if parent is not None:
            children[parent].append(len(turns) - 1)
    order = _depth_first([turn.parent for turn in turns], children)
    places: dict[int | None, int | None] = {None: None, **{index: place for place, index in enumerate(order)}}
    is_root = [turn.parent is None for turn in turns]
    return Kept(
        turns=tuple(
            replace(turns[index], parent=places[turns[index].parent], observations=_said_to(sampled, index, children))
            for index in order
        ),
        first_messages=sampled[order[0]].messages if order else (),
        metrics={
            "turns": len(turns),
            "roots": sum(is_root),
            "unmatched": sum(root and new > 0 for root, new in zip(is_root[1:], num_new_answers[1:])),
            "rewritten": sum(not root and new > 0 for root, new in zip(is_root, num_new_answers)),
        },
    )


def _turn(sampled: Sampled, parent: int | None, added: TokenIds) -> Turn:
    """Return a turn with the reward 0, until there is one."""
    output = sampled.output
    return Turn(
        parent=parent,
        added_token_ids=added,
        response_token_ids=np.array(output.token_ids, dtype=np.int32),
        response_logprobs=np.array(output.logprobs, dtype=np.float32),
        response_text=sampled.text,
        reward=0.0,
        tool_calls=sampled.calls,
        stop_reason=output.stop_reason,
        weight_versions=output.weight_versions,
        routed_experts=new_routing(output.routed_experts, parent, added, len(output.token_ids)),
    )


def _said_to(sampled: Sequence[Sampled], index: int, children: Sequence[Sequence[int]]) -> tuple[ChatMessage, ...]:
    """Return the messages that the first turn below one adds to it."""
    if not children[index]:
        return ()
    return sampled[children[index][0]].messages[len(sampled[index].messages) + 1 :]


def _depth_first(parents: Sequence[int | None], children: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices, each before those below it, and of two branches the one with the newest turn last."""
    newest = list(range(len(parents)))
    for index in reversed(range(len(parents))):
        parent = parents[index]
        if parent is not None:
            newest[parent] = max(newest[parent], newest[index])

    def newest_first(indices: Sequence[int]) -> list[int]:
        return sorted(indices, key=lambda index: -newest[index])

    order: list[int] = []
    stack = newest_first([index for index, parent in enumerate(parents) if parent is None])
    while stack:
        order.append(stack.pop())
        stack += newest_first(children[order[-1]])
    return order


def _num_answers(sampled: Sampled) -> int:
    return sum(message["role"] == "assistant" for message in sampled.messages)
