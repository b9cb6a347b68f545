"""A package `reasoning_gym` of six tasks, made in a folder: what the real one looks like from outside, and how tasks fail.

Like the real one it imports all tasks at once, and one of them needs a module that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.data.tasks import reasoning_tasks

_FACTORY = '''
import dataclasses, random, time
from fractions import Fraction
import absent_solver

@dataclasses.dataclass
class Config:
    largest: int = 9
    seed: int = 0
    size: int = 500
    def validate(self):
        assert self.largest > 0, "largest must be positive"

class Sums:
    """Sums of two numbers; one that is off by one is worth a half."""
    def __init__(self, config):
        self.config = config
    def __getitem__(self, index):
        drawn = random.Random(self.config.seed + index)
        a, b = drawn.randint(1, self.config.largest), drawn.randint(1, self.config.largest)
        return {"question": f"{a}+{b}?", "answer": str(a + b), "metadata": {"pair": (a, b), "share": self.share(a)}}
    def share(self, a):
        return a
    def score_answer(self, answer, entry):
        if answer is None:
            return 0.0
        return {0: 1.0, 1: 0.5}.get(abs(int(answer) - sum(entry["metadata"]["pair"])), 0.0)

class MoreSums(Sums):
    pass
class Shares(Sums):
    def share(self, a):
        return Fraction(a, 10)
class NeedsSolver(Sums):
    def __getitem__(self, index):
        return absent_solver.solve(index)
class NotANumber(Sums):
    def score_answer(self, answer, entry):
        return float("nan")
class Hangs(Sums):
    def __getitem__(self, index):
        if index == 2:
            time.sleep(60)
        return super().__getitem__(index)

DATASETS = {"sums": (Sums, Config), "more_sums": (MoreSums, Config), "shares": (Shares, Config),
            "needs_solver": (NeedsSolver, Config), "not_a_number": (NotANumber, Config), "hangs": (Hangs, Config)}

def create_dataset(name, **arguments):
    made, settings = DATASETS[name]
    config = settings(**arguments)
    config.validate()
    return made(config)
'''


def install_fake(folder: Path, version: str = "0.0.1") -> None:
    """Put the package and its record into a folder of `sys.path`."""
    (folder / "reasoning_gym").mkdir(parents=True, exist_ok=True)
    (folder / "reasoning_gym" / "factory.py").write_text(_FACTORY)
    (folder / "reasoning_gym" / "__init__.py").write_text("from .factory import create_dataset\n")
    record = folder / "reasoning_gym-0.0.1.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: reasoning-gym\nVersion: {version}\n")


def forget_package() -> None:
    """Have the package be looked for again."""
    reasoning_tasks.package.cache_clear()
    reasoning_tasks._dataset.cache_clear()
    reasoning_tasks._made.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the package lies in, first on `sys.path`."""
    forget_package()
    folder = tmp_path / "packages"
    install_fake(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget_package()
