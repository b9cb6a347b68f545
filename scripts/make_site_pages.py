"""Writes the pages of the documentation site: those of docs/, those at the root of the repository, and the Python reference.

    python scripts/make_site_pages.py build/docs
    python scripts/make_site_pages.py --versions build/site 0.2

A page that a text names as a file, `docs/data.md`, becomes a link to it; a link to what is no page becomes code, since the
site has no copy of the sources. With `--versions`, lists the folders of the built site in `versions.json`, from which the
theme offers a choice, and has the address of the site lead to the version named last.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files beside docs/, and what they are called on the site."""
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`* *$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<!\[)`(?:docs/)?([\w.]+\.md)`")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
REFERENCE = {
    "skyrl_train": ["api", "runs.result"],
    "Settings": ["config.schema", "config.algorithm.settings", "config.models.engines"],
    "What parts implement": ["interfaces"],
    "Data": ["types"],
    "Errors": ["errors"],
    "Algorithms": ["registry", "algorithms.advantages", "algorithms.losses.policy"],
}
"""Modules of the package, by heading; the first have what `skyrl_train` offers."""


def pages() -> dict[str, Path]:
    """The source of each page, by its name on the site."""
    found = {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
    return found | {page: ROOT / name for name, page in OF_ROOT.items()}


def page_of(target: str, known: dict[str, Path], *, folder: Path) -> str | None:
    """The page that a path in a file of `folder` means, None where it means none."""
    path = (folder / target).resolve()
    return next((name for name, source in known.items() if source == path), None)


def converted(source: Path, known: dict[str, Path]) -> str:
    """The text of a page, with links that hold on the site."""

    def named(match: re.Match[str]) -> str:
        whole = match[0].strip("`")
        page = page_of(whole, known, folder=ROOT) or page_of(match[1], known, folder=ROOT / "docs")
        return match[0] if page is None or known[page] == source else f"[`{whole}`]({page})"

    def linked(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        if picture:
            return f"![{text}]({path.removeprefix('docs/')})"
        page = page_of(path, known, folder=source.parent)
        if page is not None:
            return f"[{text}]({page}{mark}{anchor})"
        if not (source.parent / path).exists():
            raise SystemExit(f"{source.relative_to(ROOT)}: {target} is neither a page nor a file; correct the link")
        return f"{text} (`{path}`)"

    def prose(text: str) -> str:
        return NAMED.sub(named, LINK.sub(linked, text))

    text, parts, end = source.read_text(encoding="utf-8"), [], 0
    for fence in FENCE.finditer(text):
        parts += [prose(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, prose(text[end:])])


def reference() -> str:
    """The page of the Python reference, which the generator fills from docstrings."""
    lines = [
        "# Python",
        "",
        "What `skyrl_train.__all__` names may be relied on: [releasing.md](releasing.md) says how long,",
        "[python_api.md](python_api.md) shows it in use. The modules below hold what those functions take and return; a",
        "name that begins with an underscore is not for use.",
    ]
    for heading, modules in REFERENCE.items():
        lines += ["", f"## {heading}"]
        for module in modules:
            lines += ["", f"::: skyrl_train.{module}", "    options: {heading_level: 3}"]
    return "\n".join(lines) + "\n"


def write_pages(folder: Path) -> None:
    """Replace what `folder` holds by the pages."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    known = pages()
    for name, source in known.items():
        (folder / name).write_text(converted(source, known), encoding="utf-8")
    (folder / "api.md").write_text(reference(), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", folder / "images")


def list_versions(site: Path, newest: str) -> None:
    """Write `versions.json` of the folders of `site`, and an `index.html` that leads to `newest`."""
    names = sorted((path.name for path in site.iterdir() if path.is_dir()), reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in names]
    (site / "versions.json").write_text(json.dumps(entries, indent=1), encoding="utf-8")
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}/"><a href="{newest}/">{newest}</a>\n'
    (site / "index.html").write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("newest", nargs="?", help="with --versions: where the site's address leads")
    parser.add_argument("--versions", action="store_true")
    options = parser.parse_args()
    if options.versions:
        list_versions(options.folder, options.newest or "latest")
    else:
        write_pages(options.folder)


if __name__ == "__main__":
    main()
