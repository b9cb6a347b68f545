"""The engine that follows a script: its answers are known."""

from __future__ import annotations

import scripted

GUESS = "#### 0"


class Scripted(scripted.Scripted):
    """Samples of even number call the calculator and read the result, others guess."""

    def text(self, prompt, sample, turn):
        if turn:  # the number that the tool has just told, in the line before the last
            return f"#### {prompt.splitlines()[-2]}"
        question = prompt.splitlines()[-2]
        return GUESS if sample % 2 else call_of(question)


def call_of(question):
    """The call that a question `7*8=?` is answered by."""
    expression = question.removesuffix("=?")
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def expected(rollout):
    """The texts of a rollout's turns, and its reward."""
    if rollout["sample"] % 2:
        return [GUESS], 0.0
    question = rollout["prompt"][-1]["content"]
    return [call_of(question), f"#### {rollout['extras']['answer']}"], 1.0
