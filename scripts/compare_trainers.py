"""Measures our functions beside those of verl, TRL, OpenRLHF and SkyRL and writes the tables in docs/algorithms.md.

    pip download --no-deps verl==0.9.1 trl==1.16 openrlhf==0.11.2 skyrl==0.3.0   # unpack each onto PYTHONPATH
    python scripts/compare_trainers.py [--draws 200]

Every row is the largest absolute difference over so many random ragged inputs, in float64, of value and gradient
(`tests/other_trainers/comparisons.py`). Trainers that cannot be imported are left as they stand in theirs.
"""
# ruff: noqa: E402  the repository's root comes first on the path

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.other_trainers.comparisons import COMPARISONS, Comparison, largest_errors

DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- trainers: written by scripts/compare_trainers.py -->", "<!-- end of trainers -->"


def head(trainer: str) -> str:
    """How a trainer's table begins."""
    return f"| Ours | {trainer} | Difference |\n|---|---|---|\n"


def rows_beside(trainer: str, document: str) -> str:
    """The rows of its table in `document`."""
    return document.partition(head(trainer))[2].partition("\n\n")[0]


def line(comparison: Comparison, value: str, gradient: str) -> str:
    """One row of the table."""
    measured = ", ".join(each for each in (value, gradient) if each)
    return f"{key(comparison)} {': '.join(each for each in (measured, comparison.deviates) if each)} |\n"


def key(comparison: Comparison) -> str:
    """How a row begins: by it an earlier measurement is found again."""
    return f"| `{comparison.ours}` | {comparison.theirs.partition(': ')[2]} |"


def tables(document: str, num_draws: int) -> str:
    """A table for each trainer, its rows remeasured where it is installed, else as `document` has them."""
    rows: dict[str, list[str]] = {}
    for comparison in COMPARISONS:
        trainer = comparison.theirs.partition(": ")[0]
        lines = rows.setdefault(trainer, [])
        try:
            value, gradient = largest_errors(comparison, num_draws)
        except ImportError as error:
            print(f"{comparison.theirs}: not measured ({error})")
            pattern = rf"^{re.escape(key(comparison))} .*$"
            known = re.search(pattern, rows_beside(trainer, document), flags=re.MULTILINE)
            lines.append(f"{known.group(0)}\n" if known else line(comparison, "not measured", ""))
            continue
        lines.append(line(comparison, f"{value:.1e}", f"{gradient:.1e}" if gradient else ""))
    return "\n".join(head(trainer) + "".join(lines) for trainer, lines in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="random inputs for each function")
    num_draws = parser.parse_args().draws
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables(document, num_draws)}\n{END}{after}", encoding="utf-8")
    versions = []
    for name in ("verl", "trl", "openrlhf", "skyrl"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} of unknown version")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}: {num_draws} draws; {', '.join(versions)}")


if __name__ == "__main__":
    main()
