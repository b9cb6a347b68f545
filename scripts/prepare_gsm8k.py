#!/usr/bin/env python3
"""Turn the original GSM8K into data rows for training, and fetch it from the hub first where asked to.

    python scripts/prepare_gsm8k.py --download --output data/gsm8k
    python scripts/prepare_gsm8k.py --input DIR --output data/gsm8k

DIR of the input holds `train.jsonl` and `test.jsonl` (github.com/openai/grade-school-math, folder
grade_school_math/data); the output gets `train` and `validation`. Each row has the question as chat messages with the
instruction to end with `#### ANSWER`, the environment's name, and the right answer for it to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from skyrl_train.data import GSM8K_ENV_CLASS, GSM8K_HUB, GSM8K_SPLITS, Source, gsm8k_row, read_rows
from skyrl_train.data.sources import endpoint, is_reachable
from skyrl_train.errors import DataError

ENV_CLASSES = ("gsm8k", "gsm8k_multi_turn")


def read_problems(source: Source, *, split: str, env_class: str) -> list[dict[str, Any]]:
    """The rows of one original file or hub split. Raises DataError naming the row that is no GSM8K problem."""
    rows = []
    for row in read_rows(source):
        try:
            question, solution = row.values["question"], row.values["answer"]
            rows.append(gsm8k_row(question, solution, split=split, index=row.index, env_class=env_class))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{row.place}: not a GSM8K problem ({error})") from error
    return rows


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


def sources_of(options: argparse.Namespace) -> dict[str, Source]:
    """Original split to where it is. Raises DataError that says what to do where it is not there."""
    if options.input is None:
        if not is_reachable():
            raise DataError(
                f"{endpoint()} does not answer. On a machine with a network run the same command and copy "
                f"{options.output} here, or clone github.com/openai/grade-school-math and give "
                "--input grade-school-math/grade_school_math/data"
            )
        return {name: Source(name=name, location=f"{GSM8K_HUB}:{name}", reader="hub") for name in GSM8K_SPLITS}
    missing = [f"{name}.jsonl" for name in GSM8K_SPLITS if not (options.input / f"{name}.jsonl").is_file()]
    if missing:
        raise DataError(f"{options.input}: {' and '.join(missing)} missing; give the folder that holds them")
    return {
        name: Source(name=name, location=str(options.input / f"{name}.jsonl"), reader="jsonl") for name in GSM8K_SPLITS
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--input", type=Path, help="folder with train.jsonl and test.jsonl")
    where.add_argument(
        "--download", action="store_true", help=f"fetch {GSM8K_HUB} from the hub; HF_ENDPOINT names a mirror"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write to; made where missing")
    parser.add_argument(
        "--env-class", choices=ENV_CLASSES, default=GSM8K_ENV_CLASS, help="environment named in each row"
    )
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="of the output files")
    parser.add_argument("--if-missing", action="store_true", help="do nothing where the output is there already")
    options = parser.parse_args(arguments)
    outputs = {name: options.output / f"{split}.{options.format}" for name, split in GSM8K_SPLITS.items()}
    if options.if_missing and all(output.is_file() for output in outputs.values()):
        return 0
    try:
        sources = sources_of(options)
        rows = {
            name: read_problems(source, split=GSM8K_SPLITS[name], env_class=options.env_class)
            for name, source in sources.items()
        }
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for name, output in outputs.items():
        write_rows(rows[name], output)
        print(f"{output}: {len(rows[name])} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
