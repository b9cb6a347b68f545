"""What the loader of another tree, e.g. of the commit before, says of drawn settings, beside what this one says.

    git worktree add /tmp/before HEAD~1
    python -m scripts.studies.fuzz_settings --against /tmp/before

5,000 times one setting and 1,000 times two get a value that suits their type, or another one. Of each kind of difference an
example is printed. The exit status is 1 where one side accepts what the other refuses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.door import read_root
from skyrl_train.config.fields import SchemaField, seam_of, strip, walk

ROOTS: dict[str, Any] = {"Config": Config, "SFTConfig": SFTConfig}
NUMBERS = (0, 1, -1, 2, 3, 64, 10**10, 10**14, 0.0, 0.5, 1.0, 3.0, 4.5, -2.5, 1e9, 1e-6, float("nan"), float("inf"))
TEXTS = ("", "abc", "4", "0.5", "true", "null", "1e-6", "2.5E+3", "???", "auto", "a b", "x:y", "a.b.c", "my_code:f")
LISTS: tuple[Any, ...] = (
    [],
    [1],
    [0.5, 0.9],
    ["a", "b"],
    [None],
    ["???"],
    [["q", "a"]],
    [["q"]],
    [True],
    [1, "b", None],
    (),
    ("a",),
)
PARTS = ({"_target_": "m:f"}, {"_target_": "grpo"}, {"_target_": ""}, {"_target_": "m:f", "x": "???"}, {"_target_": 5})
MAPPINGS: tuple[dict[Any, Any], ...] = (
    {},
    {"a": 1},
    {1: 2},
    {"x": "???"},
    {"low": 1},
    {"a": {"b": [1, "???"]}},
    *PARTS,
)
VALUES = (*NUMBERS, True, False, None, *TEXTS, *LISTS, *MAPPINGS, [{"_target_": "m:f"}])
Case = tuple[str, tuple[tuple[str, Any], ...]]
"""The root's name, and settings with their values."""
Answer = tuple[str, list[str]]
"""The configuration, and what is wrong with it, in any order."""


def drawn(field: SchemaField, rng: random.Random) -> tuple[str, Any]:
    """Return a name and a value for it."""
    kind, seam, luck = strip(field.annotation), seam_of(field.annotation), rng.random()
    if luck < 0.05:
        return field.path + rng.choice("xsz"), 1
    if luck < 0.4 and get_origin(kind) is Literal:
        return field.path, rng.choice(get_args(kind))
    if luck < 0.3 and seam:
        return field.path, rng.choice([*seam])
    if luck < 0.2 and not field.section:
        return field.path, field.default
    if luck < 0.3 and kind in (int, float) and field.default is not None:
        return field.path, field.default * rng.choice([2, -1, 0.5, 1000])
    return field.path, rng.choice(VALUES)


def cases(singles: int, pairs: int, seed: int) -> list[Case]:
    """Return what both sides are asked: two of three times for reinforcement learning, else for supervised training."""
    rng, fields = random.Random(seed), {name: [*walk(root)] for name, root in ROOTS.items()}
    sizes = [1] * singles + [2] * pairs
    names = [rng.choice(["Config", "Config", "SFTConfig"]) for _ in sizes]
    return [
        (name, tuple(drawn(rng.choice(fields[name]), rng) for _ in range(size))) for name, size in zip(names, sizes)
    ]


def answer(case: Case) -> Answer:
    """Return what the loader of this tree says."""
    name, settings = case
    tree: dict[str, Any] = {}
    for path, value in settings:
        *above, last = path.split(".")
        section: Any = tree
        for part in above:
            section = section.setdefault(part, {}) if isinstance(section, dict) else section
        if isinstance(section, dict):
            section[last] = dict(value) if isinstance(value, dict) else value
    try:
        loaded = read_root(tree, ROOTS[name])
    except Exception as error:  # a loader that breaks is what is looked for
        return "", [f"{type(error).__name__}: {error}"]
    return repr(by_name(loaded.config)), sorted(map(str, loaded.violations))


def by_name(value: Any) -> Any:
    """Return a section as a mapping in the order of its names, as that of its declarations says nothing."""
    if not dataclasses.is_dataclass(value):
        return value
    return {name: by_name(getattr(value, name)) for name in sorted(field.name for field in dataclasses.fields(value))}


def written(value: Any) -> Any:
    """Return what JSON can hold of a value, tuples and mappings with their keys included; `read` gives it back."""
    if isinstance(value, dict):
        return {"mapping": [[written(key), written(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [written(item) for item in value]}
    return [written(item) for item in value] if isinstance(value, list) else value


def read(value: Any) -> Any:
    """Return the value that `written` wrote."""
    if isinstance(value, dict):
        items = [read(item) for item in value.get("tuple", value.get("mapping"))]
        return tuple(items) if "tuple" in value else dict(items)
    return [read(item) for item in value] if isinstance(value, list) else value


def answers_of(tree: Path, asked: list[Case]) -> list[Answer]:
    """Return what the loader of a tree says, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--answer"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    text = json.dumps(written(asked))
    done = subprocess.run(command, input=text, cwd=tree, env=environment, stdout=-1, check=True, text=True)
    found: list[Answer] = read(json.loads(done.stdout))
    return found


def difference(before: Answer, now: Answer) -> str:
    """Return the kind of difference between two answers; empty for equal ones."""
    if bool(before[1]) != bool(now[1]):
        return "accepted now" if before[1] else "refused now"
    if before[1] != now[1]:
        fields = [[line.partition(": ")[0] for line in side[1]] for side in (before, now)]
        return "other words" if fields[0] == fields[1] else "other or more problems"
    return "" if before[0] == now[0] else "other values"


def main() -> int:
    if sys.argv[1:] == ["--answer"]:
        print(json.dumps(written([answer(case) for case in read(json.load(sys.stdin))])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--singles", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=5, help="that are printed of each kind of difference")
    options = parser.parse_args()
    asked = cases(options.singles, options.pairs, options.seed)
    here = Path(__file__).resolve().parents[2]
    before, now = (answers_of(tree, asked) for tree in (options.against.resolve(), here))
    counts: Counter[str] = Counter()
    for case, old, new in zip(asked, before, now):
        kind = difference(old, new)
        counts[kind] += 1
        if kind and counts[kind] <= options.examples:
            print(f"{kind}: {case[0]} {case[1]}")
            print("\n".join([*(f"  - {line}" for line in old[1]), *(f"  + {line}" for line in new[1])]))
    print(f"{counts.pop('', 0)} of {len(asked)} answers are equal; {dict(counts) or 'no other'}")
    return int(bool(counts["accepted now"] or counts["refused now"]))


if __name__ == "__main__":
    sys.exit(main())
