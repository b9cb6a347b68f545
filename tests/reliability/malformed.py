"""A grammar of what the outside may send: valid values, and what is done to them. A case is a function of its number.

value     := valid value | valid value with up to three mutations
mutation  := replace a node by an atom | drop a node | double a node | rename a key | nest a node
text      := value as JSON | cut | with bytes of another encoding | with a byte order mark | something else altogether
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any


def deep(levels: int) -> Any:
    """A list in a list, and so on."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HUGE = 10**5000
ATOMS: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3.7,
    -0.5,
    5.0,
    1e39,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
]
ATOMS += [2**31, 2**63, 2**200, HUGE, "", "7", "nan", "stop", "\ud800", "a\udfffb", "\x00", "é漢", [], {}, [[]], [None]]
ATOMS += [
    {"role": "user"},
    {"role": "user", "content": "\udc80"},
    {"a": float("nan")},
    deep(70),
    deep(150),
    [True],
    ["1"],
]
ODD_TEXTS = ["", "[]", "{}", "null", "3", '"text"', "NaN", "{", "]", "<html><body>busy</body></html>", "[" * 20_000]
ODD_TEXTS += [
    "[" * 200_000 + "]" * 200_000,
    "1" * 5000,
    '{"uid": ' + "9" * 5000 + "}",
    "\ufeff{}",
    "{'a': 1}",
    '{"a": 01}',
]


def mutated(numbers: random.Random, value: Any) -> Any:
    """A copy of the value after up to three mutations."""
    value = copy.deepcopy(value)
    for _ in range(numbers.choice((0, 1, 1, 1, 2, 3))):
        value = _mutate(numbers, value)
    return value


def _mutate(numbers: random.Random, value: Any) -> Any:
    nodes = list(_nodes(value))
    if not nodes:
        return copy.deepcopy(numbers.choice(ATOMS))
    owner, key = numbers.choice(nodes)
    kind = numbers.choice(("atom", "atom", "atom", "atom", "drop", "double", "rename", "nest"))
    if kind == "atom":
        owner[key] = copy.deepcopy(numbers.choice(ATOMS))
    elif kind == "drop":
        del owner[key]
    elif kind == "double" and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif kind == "rename" and isinstance(owner, dict):
        owner[numbers.choice(("", "role", "a.b", "\ud801", "turns", "prompt"))] = owner.pop(key)
    else:
        owner[key] = numbers.choice(([owner[key]], {"x": owner[key]}, deep(numbers.choice((3, 80)))))
    return value


def _nodes(value: Any, depth: int = 0) -> Any:
    """Every (container, key) of a value, but of the very deep."""
    if depth > 6:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield value, key
        yield from _nodes(each, depth + 1)


def as_text(numbers: random.Random, value: Any) -> bytes:
    """JSON of the value, most of the time as it should be."""
    if numbers.random() < 0.1:
        return numbers.choice(ODD_TEXTS).encode(errors="surrogatepass")
    text = _json(value)
    kind = numbers.choice(("whole",) * 8 + ("cut", "raw surrogate", "latin-1", "mark", "utf-16", "noise"))
    if kind == "cut":
        return text.encode(errors="surrogatepass")[: numbers.randrange(len(text) + 1)]
    if kind == "raw surrogate":
        return text.replace("\\ud800", "\ud800").encode(errors="surrogatepass")
    if kind == "latin-1":
        return text.replace("}", "\xe9}", 1).encode("latin-1", errors="replace")
    if kind == "mark":
        return b"\xef\xbb\xbf" + text.encode()
    if kind == "utf-16":
        return text.encode("utf-16")
    if kind == "noise":
        noisy = bytearray(text.encode())
        for _ in range(3):
            noisy[numbers.randrange(len(noisy))] = numbers.randrange(256)
        return bytes(noisy)
    return text.encode()


def _json(value: Any) -> str:
    """JSON with integers of any size, which `json.dumps` refuses."""
    mark = 987654321987654321
    text = json.dumps(_marked(value, mark))
    return text.replace(str(mark), "9" * 5000)


def _marked(value: Any, mark: int) -> Any:
    if isinstance(value, dict):
        return {key: _marked(each, mark) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked(each, mark) for each in value]
    return mark if isinstance(value, int) and value == HUGE else value


ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2?"},
    {
        "uid": "train-17",
        "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "4"},
        "extra_info": {"index": 17, "score": 0.25, "tags": ["a", "b"], "none": None},
    },
    {"uid": 3, "prompt": [{"role": "user", "content": "é", "name": None}], "weights": [1.0, 2.5], "ok": True},
]
ANSWER: dict[str, Any] = {
    "choices": [
        {"token_ids": [8, 2, 5], "logprobs": {"token_logprobs": [-0.5, -1.0, 0]}, "finish_reason": "stop", "text": "x"}
    ],
    "usage": {"total_tokens": 9},
}
RECORDS: list[dict[str, Any]] = [
    {"uid": "a", "turns": [{"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "reward": 1.0}]},
    {
        "uid": "train-17",
        "sample": 0,
        "global_step": 1,
        "purpose": "train",
        "outcome": "done",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "env_class": "gsm8k",
        "extras": {"reward_spec": {"ground_truth": "4"}},
        "metrics": {"solved": 1.0},
        "teacher_prompt_token_ids": [1, 2],
        "greedy_reward": 0.5,
        "turns": [
            {
                "parent": None,
                "added_token_ids": [5, 9],
                "response_token_ids": [7, 2],
                "reward": 0.0,
                "text": "4",
                "logprobs": [-0.5, -0.25],
                "loss_mask": [True, False],
                "stop_reason": "stop",
                "weight_versions": [[0, 0], [1, 1]],
            },
            {"parent": 0, "added_token_ids": [6], "response_token_ids": [8], "reward": 1.0, "logprobs": [-0.125]},
        ],
    },
    {
        "uid": "b",
        "outcome": "failed",
        "failure": {"kind": "environment_error", "message": "ValueError", "turn_index": 0},
        "turns": [],
    },
]
