"""Rollouts that are not in Parquet of this trainer, as rows of its columns: answers of a supervised run, and completions
that TRL and verl dump. What a file does not say stays null: these have no token ids."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from skyrl_train.system.files import parse_strict_json
from skyrl_train.telemetry.reading.sources import RolloutFile

Row = dict[str, Any]


def rows_of(file: RolloutFile) -> Iterator[Row]:
    """Yield the rows of a file that is not Parquet of this trainer, one a turn.

    Raises OSError, and ValueError for what is not readable; what came before it has been yielded.
    """
    if file.kind == "jsonl":
        raise ValueError(
            f"rollouts in JSON lines are not shown; generator=replay generator.replay_path={file.path} makes a run with "
            "them, whose rollouts are Parquet"
        )
    readers: Mapping[str, Callable[[RolloutFile], Iterator[Row]]]
    readers = {"samples": _sample_rows, "trl": _trl_rows, "verl": _verl_rows}
    return readers[file.kind](file)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    record = parse_strict_json(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"must be an object; got {type(record).__name__}")
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                yield record


def _sample_rows(file: RolloutFile) -> Iterator[Row]:
    """Answers of a supervised run to held-out prompts."""
    for record in _lines(file.path):
        yield _completion(
            file,
            uid=f"{record.get('set')}/{record.get('example')}",
            prompt=record.get("prompt"),
            text=record.get("answer"),
            extras={"expected": record.get("expected")},
            stop_reason=record.get("stop_reason"),
        )


# Other trainers: each at most 60 lines


def _trl_rows(file: RolloutFile) -> Iterator[Row]:
    """TRL: `log_completions=True` writes `completions/completions_00010.parquet` with step, prompt, completion, one column a
    reward function, extra columns and advantage. A prompt and a completion are a text or a list of messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    seen: Counter[str] = Counter()
    with pq.ParquetFile(file.path) as table:
        columns = [
            each for each in table.schema_arrow if each.name not in ("step", "prompt", "completion", "advantage")
        ]
        rewarded = {each.name for each in takewhile(lambda each: pa.types.is_floating(each.type), columns)}
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                prompt, completion = record.pop("prompt", None), record.pop("completion", None)
                numbers = {
                    name: float(value)
                    for name, value in record.items()
                    if isinstance(value, (int, float)) and name != "step" and math.isfinite(value)
                }
                rewards = {name: value for name, value in numbers.items() if name in rewarded}
                record.pop("step", None)
                uid = _digest(prompt)
                seen[uid] += 1
                messages = completion if isinstance(completion, list) else None
                yield _completion(
                    file,
                    uid=uid,
                    sample=seen[uid] - 1,
                    prompt=prompt,
                    text=_text_of(completion),
                    observations=messages[1:] if messages else None,
                    rewards=rewards,
                    metrics={name: value for name, value in numbers.items() if name not in rewards},
                    extras={name: value for name, value in record.items() if name not in numbers},
                )


def _verl_rows(file: RolloutFile) -> Iterator[Row]:
    """verl: `trainer.rollout_data_dir` gets `STEP.jsonl` with input, output, score, step, gts, and what the reward function
    returned beside the score. Input and output are texts with the chat template's marks."""
    seen: Counter[str] = Counter()
    for record in _lines(file.path):
        prompt, text, score = record.pop("input", None), record.pop("output", None), record.pop("score", None)
        uid = _digest(prompt)
        seen[uid] += 1
        record.pop("step", None)
        metrics = {name: float(value) for name, value in record.items() if isinstance(value, (bool, int, float))}
        yield _completion(
            file,
            uid=uid,
            sample=seen[uid] - 1,
            prompt=prompt,
            text=text,
            rewards={} if score is None else {"score": float(score)},
            metrics=metrics,
            extras={name: value for name, value in record.items() if name not in metrics},
        )


def _completion(
    file: RolloutFile,
    *,
    uid: str,
    prompt: Any,
    text: Any,
    sample: int = 0,
    observations: Any = None,
    rewards: Mapping[str, float] | None = None,
    metrics: Mapping[str, float] | None = None,
    extras: Mapping[str, Any] | None = None,
    stop_reason: str | None = None,
) -> Row:
    """Return a trajectory of one turn, whose reward is the sum of its rewards."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt or "")}]
    as_json = {
        "prompt": messages,
        "observations": observations or [],
        "rewards": dict(rewards or {}),
        "metrics": dict(metrics or {}),
        "extras": dict(extras or {}),
    }
    reward = sum(rewards.values()) if rewards else None
    return {
        "global_step": file.step,
        "purpose": file.purpose,
        "uid": uid,
        "sample": sample,
        "turn": 0,
        "num_turns": 1,
        "outcome": "done",
        "trajectory_reward": reward,
        "reward": reward,
        "text": None if text is None else str(text),
        "stop_reason": stop_reason,
        **{name: json.dumps(value, ensure_ascii=False, default=str) for name, value in as_json.items()},
    }


def _text_of(completion: Any) -> Any:
    """The first message's text of a completion that is a conversation."""
    if not isinstance(completion, list):
        return completion
    first = completion[0] if completion else {}
    return first.get("content") if isinstance(first, dict) else str(first)


def _digest(prompt: Any) -> str:
    """A name for a prompt that is the same at each step."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:12]
