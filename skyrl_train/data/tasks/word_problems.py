"""Grade-school word problems from a seed: the bundled task of the quickstart.

Six templates of one to four operations, with names and units, small enough for a model of a million parameters. Each
problem carries its worked solution, so that demonstrations can be written from it:

    Cara has 7 cards. Cara buys 4 more. Cara loses 2. How many cards does Cara have now?
    7+4=11
    11-2=9
    #### 9

A question belongs to one split by a hash of its text, so the splits never share a question, whatever the seeds and
counts they were made with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl_train.types import ChatMessage

ENV_CLASS = "word_problems"
ANSWER_MARK = "#### "
RETRY_MESSAGE = "Wrong. Try again."

NAMES = ("Ana", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jack", "Kira", "Leo")
ITEMS = ("apples", "books", "cards", "coins", "cookies", "marbles", "pens", "shells", "stamps", "stickers")
UNITS = ("km", "miles", "pages", "laps")

LARGEST_GUESS = 60
"""Wrong answers of demonstrations are drawn from 1 to this."""

_VALIDATION_SHARE = 5
"""One question in so many belongs to the validation split."""


class Split(str, Enum):
    TRAIN = "train"
    VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class WordProblem:
    """One problem. `solution_lines` are equations such as `7+4=11`, in order, the last one ending in `answer`."""

    question: str
    solution_lines: tuple[str, ...]
    answer: int
    template: str

    @property
    def num_operations(self) -> int:
        return len(self.solution_lines)

    @property
    def solution(self) -> str:
        """The worked solution in the format that the environment reads."""
        return "\n".join([*self.solution_lines, f"{ANSWER_MARK}{self.answer}"])

    @property
    def split(self) -> Split:
        digest = hashlib.blake2b(self.question.encode(), digest_size=8).digest()
        return Split.VALIDATION if int.from_bytes(digest, "big") % _VALIDATION_SHARE == 0 else Split.TRAIN


class _Working:
    """Collects the equations of a solution while a template tells its story."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, left: int, right: int) -> int:
        return self._note(left, "+", right, left + right)

    def subtract(self, left: int, right: int) -> int:
        return self._note(left, "-", right, left - right)

    def multiply(self, left: int, right: int) -> int:
        return self._note(left, "*", right, left * right)

    def _note(self, left: int, operator: str, right: int, result: int) -> int:
        self.lines.append(f"{left}{operator}{right}={result}")
        return result

    def finish(self, template: str, answer: int, *sentences: str) -> WordProblem:
        return WordProblem(
            question=" ".join(sentences), solution_lines=tuple(self.lines), answer=answer, template=template
        )


def _collection(rng: random.Random) -> WordProblem:
    """One to three gains and losses in a row."""
    working, name, item = _Working(), rng.choice(NAMES), rng.choice(ITEMS)
    total = rng.randint(3, 15)
    sentences = [f"{name} has {total} {item}."]
    for _ in range(rng.randint(1, 3)):
        amount = rng.randint(1, 7)
        if total > amount and rng.random() < 0.5:
            sentences.append(f"{name} {rng.choice(('loses', 'sells'))} {amount}.")
            total = working.subtract(total, amount)
        else:
            sentences.append(f"{name} {rng.choice(('buys', 'finds'))} {amount} more.")
            total = working.add(total, amount)
    return working.finish("collection", total, *sentences, f"How many {item} does {name} have now?")


def _boxes(rng: random.Random) -> WordProblem:
    """Boxes of a number each, then perhaps one gift."""
    working, name, item = _Working(), rng.choice(NAMES), rng.choice(ITEMS)
    num_boxes, per_box = rng.randint(2, 5), rng.randint(2, 6)
    sentences = [f"{name} has {num_boxes} boxes of {per_box} {item}."]
    total = working.multiply(num_boxes, per_box)
    if rng.random() < 0.6:
        amount = rng.randint(1, min(9, total - 1))
        sentences.append(f"{name} gives away {amount}.")
        total = working.subtract(total, amount)
    return working.finish("boxes", total, *sentences, f"How many {item} does {name} have now?")


def _shopping(rng: random.Random) -> WordProblem:
    """Two prices, two counts, one bill; sometimes a discount."""
    working, name, (first, second) = _Working(), rng.choice(NAMES), rng.sample(("hat", "map", "cup", "toy"), 2)
    prices = rng.randint(2, 6), rng.randint(2, 6)
    counts = rng.randint(2, 5), rng.randint(2, 5)
    sentences = [f"A {first} costs {prices[0]} dollars. A {second} costs {prices[1]} dollars."]
    bill = working.add(working.multiply(counts[0], prices[0]), working.multiply(counts[1], prices[1]))
    purchase = f"{name} buys {counts[0]} {first}s and {counts[1]} {second}s"
    ending = f"How many dollars does {name} pay?"
    if rng.random() < 0.5:
        return working.finish("shopping", bill, *sentences, f"{purchase}. {ending}")
    discount = rng.randint(1, 6)
    bill = working.subtract(bill, discount)
    return working.finish("shopping", bill, *sentences, f"{purchase} with {discount} dollars off. {ending}")


def _compared(rng: random.Random) -> WordProblem:
    """One has so many times as many as the other: how many together, or how many more."""
    working, item, (first, second) = _Working(), rng.choice(ITEMS), rng.sample(NAMES, 2)
    owned, times = rng.randint(2, 9), rng.randint(2, 5)
    sentences = [f"{first} has {owned} {item}. {second} has {times} times as many."]
    other = working.multiply(owned, times)
    kind = rng.randrange(3)
    if kind == 0:
        return working.finish("compared", other, *sentences, f"How many {item} does {second} have?")
    if kind == 1:
        difference = working.subtract(other, owned)
        return working.finish("compared", difference, *sentences, f"How many more {item} does {second} have?")
    together = working.add(owned, other)
    return working.finish("compared", together, *sentences, f"How many {item} do they have together?")


def _journey(rng: random.Random) -> WordProblem:
    """So much a day for some days, and some more, in a unit."""
    working, name, unit = _Working(), rng.choice(NAMES), rng.choice(UNITS)
    per_day, days = rng.randint(2, 9), rng.randint(2, 5)
    sentences = [f"{name} does {per_day} {unit} a day for {days} days."]
    total = working.multiply(per_day, days)
    if rng.random() < 0.6:
        extra = rng.randint(1, 9)
        sentences.append(f"Then {name} does {extra} more.")
        total = working.add(total, extra)
    return working.finish("journey", total, *sentences, f"How many {unit} is that?")


def _wages(rng: random.Random) -> WordProblem:
    """Wages for some hours, less what was spent, twice."""
    working, name = _Working(), rng.choice(NAMES)
    wage, hours = rng.randint(3, 9), rng.randint(2, 6)
    sentences = [f"{name} earns {wage} dollars an hour and works {hours} hours."]
    left = working.multiply(wage, hours)
    for thing in rng.sample(("lunch", "a ticket", "a gift"), rng.randint(1, 2)):
        cost = rng.randint(1, min(9, left // 2))
        sentences.append(f"{name} pays {cost} for {thing}.")
        left = working.subtract(left, cost)
    return working.finish("wages", left, *sentences, "How many dollars are left?")


_TEMPLATES: tuple[Callable[[random.Random], WordProblem], ...] = (
    _collection,
    _collection,
    _boxes,
    _shopping,
    _compared,
    _journey,
    _wages,
)
"""Drawn uniformly; the chain of gains and losses counts twice because it alone has three lengths."""


def draw_problem(rng: random.Random) -> WordProblem:
    """The next problem of a generator, of either split."""
    return rng.choice(_TEMPLATES)(rng)


def generate_problems(split: Split, count: int, seed: int) -> tuple[WordProblem, ...]:
    """`count` distinct problems of one split. The same arguments give the same problems, on every platform."""
    rng = random.Random(seed)
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        problem = draw_problem(rng)
        if problem.split is split:
            found.setdefault(problem.question, problem)
    return tuple(found.values())


def to_row(problem: WordProblem, split: Split, index: int, max_turns: int = 2) -> Mapping[str, Any]:
    """One row of a data file in the ecosystem's format (`prompt`, `env_class`, `reward_spec`, `extra_info`)."""
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "env_class": ENV_CLASS,
        "reward_spec": {"method": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": split.value,
            "index": index,
            "template": problem.template,
            "num_operations": problem.num_operations,
            "max_turns": max_turns,
            "answer": problem.solution,
        },
    }


def write_demonstration(problem: WordProblem, worked_share: float, rng: random.Random) -> tuple[ChatMessage, ...]:
    """A conversation of mixed style, for a supervised warm start.

    Each of at most two answers is worked step by step, and right, with probability `worked_share`; otherwise it blurts
    a wrong number, is told so, and tries again. A model that learns this mostly guesses, and reinforcement learning can
    discover that working pays.
    """
    messages: list[ChatMessage] = [{"role": "user", "content": problem.question}]
    for turn in range(2):
        if turn > 0:
            messages.append({"role": "user", "content": RETRY_MESSAGE})
        if rng.random() < worked_share:
            messages.append({"role": "assistant", "content": problem.solution})
            break
        guess = rng.randrange(1, LARGEST_GUESS)
        guess += guess >= problem.answer
        messages.append({"role": "assistant", "content": f"{ANSWER_MARK}{guess}"})
    return tuple(messages)
