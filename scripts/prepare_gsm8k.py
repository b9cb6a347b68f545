#!/usr/bin/env python3
"""Turn the original GSM8K JSON lines into data rows for training.

    python scripts/prepare_gsm8k.py --input DIR --output DIR

DIR of the input holds `train.jsonl` and `test.jsonl` (github.com/openai/grade-school-math, folder
grade_school_math/data); the output gets `train` and `validation`. Each row has the question as chat messages with the
instruction to end with `#### ANSWER`, the environment's name, and the right answer for it to compare with.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INSTRUCTION = "Think step by step, and end with the answer on a line of its own, written as `#### ANSWER`."
ENV_CLASSES = ("gsm8k", "gsm8k_multi_turn")
SPLITS = {"train": "train", "test": "validation"}
"""Input file to output file."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class BadRowError(ValueError):
    """A line that is not a GSM8K problem; names file and line."""


def extract_answer(solution: str) -> str:
    """The number after the last `#### `, without commas. Raises ValueError where there is none."""
    _, mark, tail = solution.rpartition("#### ")
    answer = tail.strip().replace(",", "").removeprefix("$")
    if not mark or not _NUMBER.fullmatch(answer):
        raise ValueError(f"no number after '#### ' in {solution[-40:]!r}")
    return answer


def make_row(question: str, solution: str, *, split: str, index: int, env_class: str) -> dict[str, Any]:
    """One data row in the format of `skyrl_train.data.prompts`."""
    return {
        "uid": f"gsm8k-{split}-{index}",
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": extract_answer(solution)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


def read_problems(path: Path, *, split: str, env_class: str) -> Iterator[dict[str, Any]]:
    """The rows of one input file. Raises BadRowError."""
    index = 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                problem = json.loads(line)
                row = make_row(problem["question"], problem["answer"], split=split, index=index, env_class=env_class)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadRowError(f"{path}, line {number}: not a GSM8K problem ({error})") from error
            yield row
            index += 1


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Parquet or JSON lines, by the path's suffix; complete or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    else:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to; made where missing")
    parser.add_argument("--env-class", choices=ENV_CLASSES, default="gsm8k", help="environment named in each row")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="of the output files")
    options = parser.parse_args(arguments)
    missing = [f"{name}.jsonl" for name in SPLITS if not (options.input / f"{name}.jsonl").is_file()]
    if missing:
        print(f"{options.input}: {' and '.join(missing)} missing; give the folder that holds them", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for source, split in SPLITS.items():
        try:
            path = options.input / f"{source}.jsonl"
            rows = list(read_problems(path, split=split, env_class=options.env_class))
        except BadRowError as error:
            print(error, file=sys.stderr)
            return 2
        output = options.output / f"{split}.{options.format}"
        write_rows(rows, output)
        print(f"{output}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
