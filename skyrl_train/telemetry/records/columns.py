"""What a Parquet file of trajectories holds: one file a step, one row a turn, exact floats.

`OUTPUT_DIR/rollouts/{train|eval|failed}_step_000001.parquet`, zstd, rows in the order of the batch's trajectories and of
their turns. A trajectory that failed before its first turn has one row, whose `turn` is null. Where several nodes wrote a
step, the name is that of a folder of such files (`parts.py`). Every file has all columns:

    of the step        global_step, purpose, error (of a step that failed)
    of the trajectory  uid, sample, num_turns, outcome, failure_kind, failure_message, failure_turn, trajectory_reward (the
                       sum over its turns), greedy_reward, env_class, dataset: in each of its rows
                       prompt, extras, tools, first_messages, metrics, rewards (JSON), teacher_prompt_token_ids: in its first
    of the turn        turn, parent, reward, text, observations (JSON), tool_calls (JSON; null where none was
                       read), stop_reason, versions, added_token_ids, images (JSON, `[start, tokens, SHA-256 sum]` of each
                       among the added tokens; null where there are none), response_token_ids, routed_experts (flat,
                       with its shape)
    of its tokens      logprobs (the engine's), loss_mask, advantages, policy_logprobs, reference_logprobs, entropies:
                       lists as long as response_token_ids; null where there are none

A turn stores what it adds to its parent, an earlier turn of its trajectory (see `types.py`), so that a conversation's tokens
are in the file once. Numbers of tokens stand as streams of their bytes (`BYTE_STREAM_SPLIT`), which zstd takes to half;
texts that come again are stored once (dictionaries). The four columns that the trainer adds (`rollouts.columns`) may be
rounded to bfloat16: they are float32 of which the lower half is zeros then. The file's metadata `skyrl_train` says so:

    {"format": 1, "float_columns": {"advantages": "float32"}, "sample_fraction": 0.1}

What cannot be text in UTF-8 or JSON is written as `system/files/text.py` says. Of a step that failed, numbers that are not
finite stay what they are. Pages have sums, which a reader checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SUFFIX = ".parquet"
FAILED = "failed"
"""Purpose of the rollouts of a step that ended by an error."""
FLOAT_COLUMNS = ("advantages", "policy_logprobs", "reference_logprobs", "entropies")
"""What the trainer knows of each response token, beside what replay reads."""

FORMAT = 1
METADATA = b"skyrl_train"

OF_PROMPT = {"prompt": "messages", "extras": "extras", "tools": "tools"}
OF_TRAJECTORY = ("first_messages", "metrics", "rewards")
"""Columns of a trajectory's first row, which are JSON: fields of its prompt by the columns' names, and its own."""
OF_FIRST_ROW = (*OF_PROMPT, *OF_TRAJECTORY)
KINDS = {
    "global_step": "int",
    "purpose": "text",
    "error": "text",
    "uid": "text",
    "sample": "int",
    "num_turns": "int",
    "outcome": "text",
    "failure_kind": "text",
    "failure_message": "text",
    "failure_turn": "int",
    "trajectory_reward": "double",
    "greedy_reward": "double",
    "env_class": "text",
    "dataset": "text",
    **dict.fromkeys(OF_FIRST_ROW, "text"),
    "teacher_prompt_token_ids": "ids",
    "turn": "int",
    "parent": "int",
    "reward": "double",
    "text": "text",
    "observations": "text",
    "tool_calls": "text",
    "stop_reason": "text",
    "versions": "runs",
    "added_token_ids": "ids",
    "images": "text",
    "response_token_ids": "ids",
    "routed_experts": "experts",
    "routed_experts_shape": "ids",
    "logprobs": "floats",
    "loss_mask": "flags",
    **dict.fromkeys(FLOAT_COLUMNS, "floats"),
}
"""All columns in order, and what they hold."""
LISTS: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "experts": np.int16,
    "floats": np.float32,
    "flags": np.bool_,
    "runs": np.int32,
}


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a file says of itself."""

    float_columns: Mapping[str, str] = field(default_factory=dict)
    """The columns that the trainer added: float32, or bfloat16 for what was rounded to it."""
    sample_fraction: float = 1.0
    """Share of the step's prompts whose rollouts are in the file."""


def rollout_file(folder: Path, *, purpose: str, global_step: int) -> Path:
    """Return the file of a step, e.g. `rollouts/train_step_000001.parquet`."""
    return folder / f"{purpose}_step_{global_step:06d}{SUFFIX}"


@cache
def arrow_schema() -> Any:
    """Return the `pyarrow.Schema` of a file."""
    import pyarrow as pa

    run = pa.struct([("start", pa.int32()), ("version", pa.int32())])
    types = {
        "int": pa.int32(),
        "double": pa.float64(),
        "text": pa.string(),
        "ids": pa.list_(pa.int32()),
        "experts": pa.list_(pa.int16()),
        "floats": pa.list_(pa.float32()),
        "flags": pa.list_(pa.bool_()),
        "runs": pa.list_(run),
    }
    return pa.schema([(name, types[kind]) for name, kind in KINDS.items()])


def leaves(*kinds: str) -> list[str]:
    """Return the names that Parquet has for the columns of some kinds."""
    ends = {"int": ("",), "double": ("",), "text": ("",), "runs": (".list.element.start", ".list.element.version")}
    return [
        f"{name}{end}" for name, kind in KINDS.items() if kind in kinds for end in ends.get(kind, (".list.element",))
    ]
