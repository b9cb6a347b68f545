"""GSM8K as its makers publish it (columns `question` and `answer`, on the hub and as JSON lines) to rows with a prompt."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_train.data.rows import Row

INSTRUCTION = "Think step by step, and end with the answer on a line of its own, written as `#### ANSWER`."
HUB = "openai/gsm8k/main"
"""Name and configuration of the data set on the hub."""
SPLITS = {"train": "train", "test": "validation"}
"""Their names there, and ours."""
ENV_CLASS = "gsm8k_multi_turn"
"""Named in each row: the environment of `+experiment=gsm8k_multiturn` on GPUs."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def extract_answer(solution: str) -> str:
    """The number after the last `#### `, without commas. Raises ValueError where there is none."""
    _, mark, tail = solution.rpartition("#### ")
    answer = tail.strip().replace(",", "").removeprefix("$")
    if not mark or not _NUMBER.fullmatch(answer):
        raise ValueError(f"no number after '#### ' in {solution[-40:]!r}")
    return answer


def make_row(question: str, solution: str, *, split: str, index: int, env_class: str = ENV_CLASS) -> dict[str, Any]:
    """One data row in the format of `data/prompts.py`. Raises ValueError for a solution without an answer."""
    return {
        "uid": f"gsm8k-{split}-{index}",
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": extract_answer(solution)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


def published_row(row: Row) -> dict[str, Any]:
    """A row as published; its split is the last part of its source's name (`openai/gsm8k/main:test`). The same as
    `scripts/prepare_gsm8k.py` writes, uids included. Raises KeyError, ValueError."""
    split = row.source.rpartition(":")[2].partition("[")[0]
    return make_row(row.values["question"], row.values["answer"], split=SPLITS.get(split, split), index=row.index)
