"""The engine that follows a script: its answers are known."""

from __future__ import annotations

import scripted

RIGHT = '<tool_call>{"name": "query", "arguments": {"sql": "select sum(price) from items"}}</tool_call>'
GUESS = "#### 0"


class Scripted(scripted.Scripted):
    """Samples of even number query and read the result, others guess."""

    def text(self, prompt, sample, turn):
        if turn:  # the number that the tool has just told, in the line before the last
            return f"#### {prompt.splitlines()[-2]}"
        return GUESS if sample % 2 else RIGHT


def expected(rollout):
    """The texts of a rollout's turns, and its reward."""
    if rollout["sample"] % 2:
        return [GUESS], 0.0
    return [RIGHT, f"#### {rollout['extras']['answer']}"], 1.0
