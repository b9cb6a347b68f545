"""Writes docs/configuration.md from the schema. Run it after changing a setting or a group file; a test compares."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import reference

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    path = ROOT / "docs" / "configuration.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(reference(ROOT / "conf"), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
