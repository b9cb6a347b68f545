"""Makes runs that are ill on purpose, and healthy ones, and counts which are named.

    python -m scripts.studies.diseases make FOLDER [--setting NAME] [--jobs 2] [NAME ...]    # half a minute each
    python -m scripts.studies.diseases measure FOLDER --setting NAME     # trials: whether healthy runs of it are healthy
    python -m scripts.studies.diseases check FOLDER [--setting NAME]     # what is named, and how many rightly
    python -m scripts.studies.diseases table FOLDER                              # all settings, as Markdown
    python -m scripts.studies.diseases roc FOLDER                                # thresholds, as Markdown
    python -m scripts.studies.diseases pack FOLDER ARCHIVE [--setting ...]       # one setting's runs as one small file
    python -m scripts.studies.diseases unpack FOLDER ARCHIVE

Each is a run in a process of its own, with one thing planted (`plants.py`). What is recorded is what the doctor reads of any
run, in FOLDER/SETTING/NUMBER; FOLDER/SETTING.json says what NUMBER is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from scripts.studies.diseases.archive import pack, unpack
from scripts.studies.diseases.counting import count, measured, results, roc, table
from scripts.studies.diseases.plants import PLANTS
from scripts.studies.diseases.recording import make_all
from scripts.studies.diseases.settings import Name, Setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "measure", "check", "table", "roc", "pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="runs to make, or the archive")
    parser.add_argument("--setting", choices=get_args(Name), default="first")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_intermixed_args()
    if args.command == "make":
        setting = Setting(name=args.setting, models=args.folder / "models")
        make_all(args.names or list(PLANTS), setting, args.folder, args.jobs)
    elif args.command == "measure":
        setting = Setting(name=args.setting, models=args.folder / "models", is_trial=True)
        trials = args.folder / "trials"
        make_all([name for name in PLANTS if name.startswith("healthy")], setting, trials, args.jobs)
        print(measured(trials, args.setting))
    elif args.command in ("table", "roc"):
        print(table(args.folder) if args.command == "table" else roc(args.folder))
    elif args.command == "pack":
        pack(args.folder, args.setting, Path(args.names[0]))
    elif args.command == "unpack":
        unpack(Path(args.names[0]), args.folder)
    else:
        found = results(args.folder, args.setting, say=True)
        counted = count(found)
        print(counted)
        return int(bool(counted.missed or counted.called_ill))
    return 0


if __name__ == "__main__":
    sys.exit(main())
