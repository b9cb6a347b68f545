"""The engine that follows a script: its answers are known."""

from __future__ import annotations

import json
import re

import scripted

GUESS = "#### 0"


class Scripted(scripted.Scripted):
    """Samples of even number ask for all prices at once, then add them up, then answer; others guess."""

    def text(self, prompt, sample, turn):
        if sample % 2:
            return GUESS
        if turn == 0:
            return "".join(call("price", item=item) for item in re.findall(r"item \d", prompt.splitlines()[-2]))
        told = re.findall(r"^tool\n(\d+)$", prompt, flags=re.MULTILINE)
        return call("add", numbers=[int(number) for number in told]) if turn == 1 else f"#### {told[-1]}"


def call(name, **arguments):
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def expected(rollout):
    """The texts of a rollout's turns, and its reward."""
    if rollout["sample"] % 2:
        return [GUESS], 0.0
    prices = rollout["extras"]["prices"]
    asked = "".join(call("price", item=item) for item in prices)
    return [asked, call("add", numbers=list(prices.values())), f"#### {sum(prices.values())}"], 1.0
