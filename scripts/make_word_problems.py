"""Write the bundled word problems: train.jsonl and validation.jsonl.

python scripts/make_word_problems.py --output skyrl_train/data/assets/word_problems
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from skyrl_train.data.tasks import Split, generate_problems, to_row

DEFAULT_SEED = 0
DEFAULT_COUNTS = {Split.TRAIN: 2048, Split.VALIDATION: 256}


def write_split(path: Path, split: Split, count: int, seed: int) -> None:
    """One JSON object per line, in a stable key order."""
    problems = generate_problems(split, count, seed)
    lines = [json.dumps(to_row(problem, split, index)) + "\n" for index, problem in enumerate(problems)]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    for split, count in DEFAULT_COUNTS.items():
        parser.add_argument(f"--{split.value}", type=int, default=count, help=f"number of {split.value} problems")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for split in Split:
        path = options.output / f"{split.value}.jsonl"
        write_split(path, split, getattr(options, split.value), options.seed)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
