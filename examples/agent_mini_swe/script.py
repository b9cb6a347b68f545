"""The engine that follows a script: its answers are known."""

from __future__ import annotations

import json

import scripted


def bash(command):
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


LOOK, FIX = bash("cat sums.py"), bash("sed -i s/-/+/ sums.py && python3 test.py")
SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


class Scripted(scripted.Scripted):
    """Samples of even number look, mend and submit; others submit what there is."""

    def text(self, prompt, sample, turn):  # noqa: ARG002 - the same for each task
        return texts_of(sample)[turn]


def texts_of(sample):
    """The texts of a sample's turns."""
    return [SUBMIT] if sample % 2 else [LOOK, FIX, SUBMIT]


def expected(rollout):
    """The texts of a rollout's turns, and its reward."""
    return texts_of(rollout["sample"]), float(rollout["sample"] % 2 == 0)
