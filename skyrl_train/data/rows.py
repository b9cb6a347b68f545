"""Reads data rows from JSON-lines, JSON and parquet files, from folders of them, from the package and from the hub."""

from __future__ import annotations

import difflib
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError

BUILTIN = "builtin:"
_SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?:[\w.\[\]:%+-]+")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row and where it stands."""

    source: str
    """Short name of the file or data set, the same on every machine."""
    index: int
    """From 0."""
    place: str
    """For error messages, e.g. `data/train.jsonl, line 3`."""
    values: Mapping[str, Any]


def own_columns(row: Row) -> Mapping[str, Any]:
    """The row format `prompt`: a row is what it is."""
    return row.values


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, or one split of a hub data set."""

    name: str
    """Short, e.g. `train` for `data/train.jsonl`; unique among the sources of one call to `find_sources`."""
    location: str
    """Path, or `owner/name:split`, or `owner/name/config:split`."""
    on_hub: bool = False


def find_sources(specs: list[str]) -> list[Source]:
    """The files and hub splits that `data.train` or `data.validation` names.

    Raises DataError for a path that is not there (naming what is, nearby), an empty folder, or an unknown file type.
    """
    sources = [source for spec in specs for source in _find(spec)]
    names = [source.name for source in sources]
    # Two files called train.jsonl: their paths tell them apart.
    return [
        source
        if names.count(source.name) == 1
        else Source(name=source.location, location=source.location, on_hub=source.on_hub)
        for source in sources
    ]


def read_rows(source: Source) -> Iterator[Row]:
    """The rows of one source, in order. Raises DataError naming the file and the line or row that cannot be read."""
    if source.on_hub:
        return _read_hub(source)
    reader = {".parquet": _read_parquet, ".json": _read_json}.get(Path(source.location).suffix, _read_jsonl)
    return reader(source)


def _find(spec: str) -> list[Source]:
    if spec.startswith(BUILTIN):
        return [_find_builtin(spec)]
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise DataError(
                f"{spec}: the folder holds no {', '.join(_SUFFIXES)} file. Point data.train at one that does."
            )
        return [Source(name=file.relative_to(path).with_suffix("").as_posix(), location=str(file)) for file in files]
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise DataError(f"{spec}: must end in {', '.join(_SUFFIXES)}. Rename or convert it.")
        return [Source(name=path.stem, location=str(path))]
    if _HUB_NAME.fullmatch(spec):
        return [Source(name=spec, location=spec, on_hub=True)]
    raise DataError(f"{spec}: no such file or folder. {_nearby(path)}".rstrip())


def _find_builtin(spec: str) -> Source:
    name = spec[len(BUILTIN) :]
    assets = Path(str(importlib.resources.files("skyrl_train.assets")))
    path = assets / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(file.relative_to(assets).with_suffix("").as_posix() for file in assets.glob("*/*.jsonl"))
        raise DataError(
            f"{spec}: the package has no such data. It has {', '.join(BUILTIN + other for other in known)}."
        )
    return Source(name=name, location=str(path))


def _nearby(path: Path) -> str:
    """What a person may have meant: near names in the deepest folder that exists."""
    folder = path.parent
    wanted = path.name
    while not folder.is_dir() and folder != folder.parent:
        wanted, folder = folder.name, folder.parent
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or [
        name for name in names if Path(name).suffix in _SUFFIXES
    ]
    if not near:
        return f"{folder.resolve()} holds nothing like it; for a hub data set write owner/name:split."
    return f"Nearest in {folder.resolve()}: {', '.join(near[:3])}."


def _read_jsonl(source: Source) -> Iterator[Row]:
    with open(source.location, encoding="utf-8") as file:
        index = 0
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise DataError(f"{source.location}: not UTF-8 text ({error}). Convert the file to UTF-8.") from error
            if not line.strip():
                continue
            place = f"{source.location}, line {number}"
            try:
                values = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place}: not valid JSON ({error.msg} at column {error.colno}). Write one JSON object a line."
                ) from error
            yield _row(source, index, place, values)
            index += 1


def _read_json(source: Source) -> Iterator[Row]:
    try:
        rows = json.loads(Path(source.location).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{source.location}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno}). "
            "For one JSON object a line, name the file .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{source.location}: must be a list of rows; got {type(rows).__name__}. Use [ {{...}}, ... ].")
    for index, values in enumerate(rows):
        yield _row(source, index, f"{source.location}, row {index}", values)


def _read_parquet(source: Source) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    index = 0
    try:
        with pyarrow.parquet.ParquetFile(source.location) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield _row(source, index, f"{source.location}, row {index}", values)
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{source.location}: not a readable parquet file ({error}). Write it again.") from error


def _read_hub(source: Source) -> Iterator[Row]:
    import datasets

    address, _, split = source.location.partition(":")
    owner, name, *config = address.split("/")
    try:
        rows = datasets.load_dataset(f"{owner}/{name}", *config, split=split)
    except Exception as error:
        # Whatever the hub client raises (no network, no such repository, gated): one line a person can act on.
        first_line = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{source.location}: the hub data set cannot be loaded ({type(error).__name__}: {first_line}). "
            "Check the name, the split and the network (owner/name/config:split where it has several configurations), "
            "or download it and give its folder."
        ) from error
    for index, values in enumerate(rows):
        yield _row(source, index, f"{source.location}, row {index}", values)


def _row(source: Source, index: int, place: str, values: object) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{place}: must be an object with a prompt; got {type(values).__name__}.")
    return Row(source=source.name, index=index, place=place, values=values)
