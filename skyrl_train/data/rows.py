"""Reads data rows from JSON, JSON-lines, CSV, Parquet and Arrow files, from folders of them, from the package and the hub.

A reader (`data.reader`) is called with a location, an entry of `data.train` say, and yields its rows: a mapping of
columns to values each, or a `Row` where it knows better than their number where they stand.
"""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.objects import MEMORY
from skyrl_train.parts import DATA_READERS
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.system.files import parse_json

BUILTIN = "builtin:"
BY_NAME = "by_name"
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Readers of single files by the ends of their names."""
_NO_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `Dataset.save_to_disk` writes beside its Arrow files."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?:[\w.\[\]:%+-]+")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, its number (from 0) in its source, and where it stands."""

    source: str
    """Short name of the file or data set, the same on every machine."""
    index: int
    place: str
    """For error messages, e.g. `data/train.jsonl, line 3`."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one call of a reader reads: a file, a split of a hub data set, or whatever a custom reader makes of it."""

    name: str
    """Short, e.g. `train` for `data/train.jsonl`; unique among the sources of one call to `find_sources`."""
    location: str
    """Path, or `owner/name:split`, or `owner/name/config:split`; with a custom reader the entry of `data.train`."""
    reader: PartSpec

    @property
    def on_hub(self) -> bool:
        return self.reader == "hub"

    @property
    def is_file(self) -> bool:
        """Whether the rows are a function of the bytes of the one file at `location`."""
        return self.reader in _SUFFIXES.values()


def find_sources(specs: Sequence[str], reader: PartSpec = BY_NAME) -> list[Source]:
    """Return the files and hub splits that `data.train` or `data.validation` names; with another reader than `by_name`, each
    entry is one source.

    Raises DataError for a path that is not there (naming what is, nearby), an empty folder, or an unknown file type.
    """
    if DATA_READERS.name_of(reader) == BY_NAME:
        sources = [source for spec in specs for source in _find(spec)]
    else:
        sources = [Source(name=Path(spec).stem or spec, location=spec, reader=reader) for spec in specs]
    names = [source.name for source in sources]
    # Two files called train.jsonl: their paths tell them apart.
    return [each if names.count(each.name) == 1 else replace(each, name=each.location) for each in sources]


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of one source, in order.

    Raises DataError naming the source and the line or row that cannot be read, or where its reader failed.
    """
    reader: Callable[[str], Iterable[object]] = DATA_READERS.resolve(source.reader)
    index = 0
    try:
        for found in reader(source.location):
            place = found.place if isinstance(found, Row) else f"{source.location}, row {index}"
            values = found.values if isinstance(found, Row) else found
            if not isinstance(values, Mapping):
                raise DataError(f"{place}: must be an object of columns and values; got {type(values).__name__}.")
            yield Row(source=source.name, index=index, place=place, values=values)
            index += 1
    except DataError:
        raise
    except Exception as error:  # whatever a custom reader raises, or the disk
        raise DataError(
            f"{source.location}, row {index}: data.reader={part_name(source.reader)} failed "
            f"({type(error).__name__}: {error}). Fix the reader or the data."
        ) from error


def by_name(location: str) -> Iterator[Row]:
    """The reader `by_name`: files by the ends of their names, folders of them, `builtin:NAME`, `owner/name:split`."""
    for source in _find(location):
        yield from read_rows(source)


def _find(spec: str) -> list[Source]:
    if spec.startswith(BUILTIN):
        return [_find_builtin(spec)]
    if spec.startswith(MEMORY):
        return [Source(name=spec.removeprefix(MEMORY), location=spec, reader="memory")]
    path = Path(spec).expanduser()
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.name not in _NO_DATA)
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise DataError(
                f"{spec}: the folder holds no {', '.join(_SUFFIXES)} file. Point data.train at one that does."
            )
        names = (file.relative_to(path).with_suffix("").as_posix() for file in files)
        return [
            Source(name=name, location=str(file), reader=_SUFFIXES[file.suffix]) for name, file in zip(names, files)
        ]
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise DataError(
                f"{spec}: must end in {', '.join(_SUFFIXES)}. Rename or convert it, or name its reader: "
                "data.reader=jsonl, or a custom one."
            )
        return [Source(name=path.stem, location=str(path), reader=_SUFFIXES[path.suffix])]
    if _HUB_NAME.fullmatch(spec):
        return [Source(name=spec, location=spec, reader="hub")]
    raise DataError(f"{spec}: no such file or folder. {_nearby(path)}".rstrip())


def _find_builtin(spec: str) -> Source:
    name = spec[len(BUILTIN) :]
    assets = Path(str(importlib.resources.files("skyrl_train.data.assets")))
    path = assets / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(f"{BUILTIN}{file.parent.name}/{file.stem}" for file in assets.glob("*/*.jsonl"))
        raise DataError(f"{spec}: the package has no such data. It has {', '.join(known)}.")
    return Source(name=name, location=str(path), reader="jsonl")


def _nearby(path: Path) -> str:
    """Say what a person may have meant: near names in the deepest folder that exists."""
    folder = path.parent
    wanted = path.name
    while not folder.is_dir() and folder != folder.parent:
        wanted, folder = folder.name, folder.parent
    if folder.absolute() == folder.absolute().parent:  # names in the root have nothing to do with it
        return "" if path.parent == folder else f"There is no folder {path.parent}."
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or [
        name for name in names if Path(name).suffix in _SUFFIXES
    ]
    if not near:
        return f"{folder.resolve()} holds nothing like it; for a hub data set write owner/name:split."
    return f"Nearest in {folder.resolve()}: {', '.join(near[:3])}."


def read_jsonl(location: str) -> Iterator[Row]:
    """The reader `jsonl`: a file with one JSON object a line; rows stand at their lines."""
    with open(location, encoding="utf-8") as file:
        index = 0
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{location}, line {number}"
                try:
                    values = parse_json(line.rstrip())
                except ValueError as error:
                    raise DataError(f"{place}: {error}. Write one JSON object a line.") from error
                yield Row(source=location, index=index, place=place, values=values)
                index += 1
        except UnicodeDecodeError as error:
            raise DataError(f"{location}: not UTF-8 text ({error}). Convert the file to UTF-8.") from error


def read_json(location: str) -> Iterator[Any]:
    """The reader `json`: a file with one list of rows."""
    try:
        rows = parse_json(Path(location).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 text ({error}). Convert the file to UTF-8.") from error
    except ValueError as error:
        raise DataError(f"{location}: {error}. For one JSON object a line, name the file .jsonl.") from error
    if not isinstance(rows, list):
        raise DataError(f"{location}: must be a list of rows; got {type(rows).__name__}. Use [ {{...}}, ... ].")
    yield from rows


def read_csv(location: str) -> Iterator[Row]:
    """The reader `csv`: a file whose first line names its columns; rows stand at their lines, and all values are texts."""
    # Blank in a spreadsheet is an empty text. A mark at the start of the file is no part of the first name.
    with open(location, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for index, values in enumerate(rows):
                place = f"{location}, line {rows.line_num}"
                if None in values or None in values.values():
                    raise DataError(
                        f"{place}: must have a value for each of {len(rows.fieldnames or ())} columns. Quote texts that "
                        "hold a comma or a line break."
                    )
                yield Row(source=location, index=index, place=place, values=values)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{location}, line {rows.line_num + 1}: not CSV in UTF-8 ({error}). Write the file again."
            ) from error


def read_parquet(location: str) -> Iterator[Any]:
    """The reader `parquet`: one file, a row group at a time."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(location) as file:
            yield from _rows_of(file.iter_batches(batch_size=1024), location)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{location}: not a readable parquet file ({error}). Write it again.") from error


def read_arrow(location: str) -> Iterator[Any]:
    """The reader `arrow`: one file, a stream (as `Dataset.save_to_disk` writes it) or with a footer (Feather)."""
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(location) as file:
            try:
                batches = iter(pyarrow.ipc.open_stream(file))
            except pyarrow.ArrowInvalid:
                opened = pyarrow.ipc.open_file(file)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            yield from _rows_of(batches, location)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{location}: not a readable Arrow file ({error}). Write it again.") from error


def _rows_of(batches: Iterable[Any], location: str) -> Iterator[Any]:
    index = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError) as error:  # a date that Python has none of, text that is no UTF-8
            raise DataError(f"{location}, {_bad_cell(batch, index)} cannot be read ({error}).") from error
        yield from rows
        index += len(rows)


def _bad_cell(batch: Any, first_row: int) -> str:
    """Return which row and column of an Arrow batch has no value in Python, e.g. `row 7, column 'born'`."""
    for name, column in zip(batch.schema.names, batch.columns):
        for index, cell in enumerate(column):
            try:
                cell.as_py()
            except (ValueError, OverflowError):
                return f"row {first_row + index}, column {name!r}"
    return f"a row from {first_row} on"
