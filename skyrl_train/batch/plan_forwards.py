"""The forwards of one rank's rows from their lengths and from what they share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_train.batch.forwards import LAYOUT_CHOICES, Forward, ForwardCost, forward_of_rows, split_tree
from skyrl_train.batch.microbatch import ByLength, make_micro_batch_strategy
from skyrl_train.batch.planner import CustomPlanner, RowFacts
from skyrl_train.batch.prefix_tree import PrefixOrder
from skyrl_train.batch.sharing import CommonPrefixes
from skyrl_train.batch.token_budget import DUMMY_ROW_LENGTH, Rows
from skyrl_train.config.rules import LayoutName
from skyrl_train.config.schema import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """One rank's pass."""

    layout: LayoutName
    positions: tuple[int, ...]
    """Computed by each forward."""


def pass_of_rank(
    trainer: TrainerConfig, common: CommonPrefixes, places: Rows, *, merge_turns: bool, training: bool
) -> RankPass:
    """The rows at `places`; those past the last row are dummy rows. For `auto`, the layout that is predicted to be
    cheapest; under a custom planner, the one of its first forward.
    """
    rows = _RankRows(common, places, merge_turns=merge_turns)
    strategy = make_micro_batch_strategy(trainer, merge_turns=merge_turns)
    if isinstance(strategy, CustomPlanner):
        facts = rows.facts(strategy, training=training)
        forwards = strategy.forwards_of(facts)
        return RankPass(
            layout=forwards[0].layout or facts.default_layout,
            positions=tuple(facts.positions(each.rows, each.layout) for each in forwards),
        )
    choices = LAYOUT_CHOICES if trainer.layout == "auto" else (trainer.layout,)
    found = {name: rows.split(strategy, name, training=training) for name in choices}
    layout = min(found, key=lambda name: ForwardCost().of(found[name]))
    return RankPass(layout=layout, positions=tuple(forward.positions for forward in found[layout]))


class _RankRows:
    """Rows of one rank, in the order in which neighbours share."""

    def __init__(self, common: CommonPrefixes, places: Rows, *, merge_turns: bool) -> None:
        real = places[places < len(common.rows)]
        num_dummies = len(places) - len(real)
        follows = np.diff(real, prepend=-2) == 1
        extends = common.extends[real] & follows & merge_turns
        none = np.zeros(num_dummies, dtype=np.int64)
        self.lengths = np.concatenate([common.lengths[real], none + DUMMY_ROW_LENGTH])
        self.shared = np.concatenate([common.on_one_rank(real), none])
        self.groups = np.concatenate([common.groups[real], -1 - np.arange(num_dummies)]).astype(np.int32)
        self.is_host = np.concatenate([~np.append(extends[1:], False)[: len(real)], none == 0])
        """Rows that no row after them goes on from."""
        goes_on = np.concatenate([common.extends[real] & follows, none > 0])
        self.trajectories = np.cumsum(~goes_on)
        """Counted from 1: a row that goes on where the one before it ends is of the same."""

    def split(self, strategy: ByLength, layout: LayoutName, *, training: bool) -> list[Forward]:
        """The forwards of a pass."""
        planner = strategy.planners()[layout]
        if layout == "prefix_shared":
            order = PrefixOrder(
                rows=list(range(len(self.lengths))), lengths=self.lengths.tolist(), shared=self.shared.tolist()
            )
            return split_tree(order, self.groups, planner, training=training)
        hosts = np.flatnonzero(self.is_host)
        return [
            forward_of_rows(hosts[part], self.lengths[hosts[part]], padded=layout == "padded")
            for part in planner.split_lengths(self.lengths[hosts], training=training)
        ]

    def facts(self, planner: CustomPlanner, *, training: bool) -> RowFacts:
        """What a custom planner is told of these rows."""
        numbers, hosts = np.arange(len(self.lengths)), np.flatnonzero(self.is_host)
        shares = planner.layout in ("prefix_shared", "auto")
        return planner.make_facts(
            training=training,
            lengths=self.lengths,
            loss_tokens=self.lengths - 1,
            prompts=self.groups.astype(np.int64),
            trajectories=self.trajectories,
            order=numbers,
            shared=self.shared if shares else np.zeros_like(self.shared),
            hosts=hosts[np.searchsorted(hosts, numbers)],
        )
