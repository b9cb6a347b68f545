"""The engine that follows a script: its answers are known."""

from __future__ import annotations

import re

import scripted

GUESS = "I guess 1"


class Scripted(scripted.Scripted):
    """Samples of even number add up what the task's prompt asks for; others guess, in more words."""

    def text(self, prompt, sample, turn):  # noqa: ARG002 - the same in each turn
        return GUESS if sample % 2 else total(prompt)


class SecondThoughts(scripted.Scripted):
    """Everybody guesses first; samples of even number then add up."""

    def text(self, prompt, sample, turn):
        return GUESS if sample % 2 or turn == 0 else total(prompt)


def total(text):
    """The sum that a prompt asks for."""
    (numbers,) = re.findall(r"(\d+) \+ (\d+)", text)
    return str(sum(map(int, numbers)))
