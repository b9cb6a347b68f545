"""Queries over the rollouts of runs, by DuckDB.

What is listed, filtered and sorted (a row a trajectory, without tokens and whole texts) is a table in memory, which takes
each file once and again when it changed. Texts and tokens stay in the files and are read when asked for. DuckDB sees
links to them in a folder of its own, so that no name of a run is a pattern, and may open nothing else.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from skyrl_train.errors import DataError, DeadlineError
from skyrl_train.telemetry.reading import RolloutFile, Row, Run, first_line, rows_of
from skyrl_train.telemetry.records import KINDS, arrow_schema, read_parts
from skyrl_train.view.tails import held_in_time

QUERY_TIMEOUT_S = 10.0
_INDEX_TIMEOUT_S = 300.0
"""For the files of a run to be taken in, once."""
_MEMORY_LIMIT = "2GB"
_ROWS_AT_A_TIME = 1000
_BYTES_AT_A_TIME = 20_000_000
"""Of files that one question takes in, the newest first: a run of any length opens at once."""
_MOST_ROWS = 900_000
"""Trajectories of a run in the table: a list as high as a browser can make it, in half the memory limit."""
_SQL_TYPES = {
    "int": "INTEGER",
    "double": "DOUBLE",
    "text": "VARCHAR",
    "ids": "INTEGER[]",
    "floats": "FLOAT[]",
    "flags": "BOOLEAN[]",
    "runs": 'STRUCT("start" INTEGER, "version" INTEGER)[]',
}
COLUMNS = {name: _SQL_TYPES[kind] for name, kind in KINDS.items() if kind in _SQL_TYPES}
"""What is read of a file of rollouts; a column that a file has not is null, others are left alone."""
_SUMMARY = """
    INSERT INTO trajectories
    SELECT ? AS run, parse_filename(filename) AS file, purpose, global_step AS step, uid, sample,
        any_value(env_class), any_value(dataset), any_value(outcome), any_value(failure_kind), any_value(failure_message),
        any_value(failure_turn), any_value(error), any_value(trajectory_reward), max(num_turns),
        sum(len(response_token_ids)), arg_max(stop_reason, turn),
        left(any_value(CASE WHEN json_valid(prompt) THEN coalesce(prompt->>'$[#-1].content[#-1].text',
            prompt->>'$[#-1].content', prompt) ELSE prompt END), 240),
        left(arg_max(text, turn), 240),
        any_value(CASE WHEN json_valid(metrics) THEN try_cast(metrics->>'$.solved' AS DOUBLE) END),
        count(*) FILTER (stop_reason = 'length'),
        max(CASE WHEN purpose = 'train' THEN global_step - 1 - list_min([each."version" for each in versions]) END),
        sum(length(text)), any_value({metrics}), any_value({rewards})
    FROM {rows} GROUP BY ALL"""
_NUMBERS = "CASE WHEN json_valid({0}) THEN try_cast({0}::JSON AS MAP(VARCHAR, DOUBLE)) END"
"""A JSON object as numbers by their names; what is no number is null."""
_SEARCHED = "concat_ws(chr(10), text, observations, prompt, tool_calls, failure_message)"
"""What a pattern is looked for in; `^` and `$` are begin and end of a line."""


@dataclass
class _Taken:
    """What was taken of a run's files."""

    files: dict[str, RolloutFile] = field(default_factory=dict)
    """By the name of the link."""
    problems: dict[str, str] = field(default_factory=dict)
    """By the name of the link: why the file is left out."""


class QueryError(ValueError):
    """A query that cannot be answered as it was asked, such as a wrong regular expression."""


class RolloutIndex:
    """The rollouts of all runs."""

    def __init__(self, folder: Path, runs: Sequence[Run], *, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """`folder` is a temporary one, for links and for what is converted. Nothing beside it and the runs can be read."""
        self._folder, self._timeout_s = folder, timeout_s
        self._taken: dict[str, _Taken] = {}
        self._lock = threading.Lock()
        config: dict[str, Any] = {
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "memory_limit": _MEMORY_LIMIT,
            "temp_directory": str(folder / "spill"),
            "enable_external_file_cache": False,
        }
        self._database = duckdb.connect(":memory:", config=config)
        columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
        self._database.execute(f"CREATE TABLE template ({columns}, filename VARCHAR)")
        self._database.execute(
            """CREATE TABLE trajectories (run VARCHAR, file VARCHAR, purpose VARCHAR, step INTEGER, uid VARCHAR,
            sample INTEGER, environment VARCHAR, dataset VARCHAR, outcome VARCHAR, failure_kind VARCHAR,
            failure_message VARCHAR, failure_turn INTEGER, error VARCHAR, reward DOUBLE, num_turns INTEGER, tokens BIGINT,
            stop_reason VARCHAR, prompt_excerpt VARCHAR, text_excerpt VARCHAR, solved DOUBLE, cut INTEGER, age INTEGER,
            characters BIGINT, metrics MAP(VARCHAR, DOUBLE), rewards MAP(VARCHAR, DOUBLE))"""
        )
        allowed = [folder, *(each.resolve() for run in runs for each in (run.root, run.folder.rollouts))]
        self._database.execute(f"SET allowed_directories = [{', '.join(_quoted(str(each)) for each in allowed)}]")
        self._database.execute("SET enable_external_access = false")
        self._database.execute("SET lock_configuration = true")

    def close(self) -> None:
        """Close the database, which is in memory and gone then."""
        self._database.close()

    def refresh(self, run: Run, steps: tuple[float, float] = (-math.inf, math.inf)) -> list[str]:
        """Take in the files of a run that are new or have changed, and forget those that are gone; what is wrong with some.

        Of many files the newest come first, those of `steps` before all others; that some are left is among what is
        returned. Raises DeadlineError where that takes too long.
        """
        with self._exclusive(run):
            taken = self._taken.setdefault(run.id, _Taken())
            now = {f"{each.purpose}-{each.step}.parquet": each for each in run.rollout_files()}
            stale = [name for name, file in taken.files.items() if now.get(name) != file]
            for name in stale:
                self._forget(run, taken, name)
            if chosen := self._next_files(run, taken, now, steps):
                self._take(run, taken, chosen)
            problems = list(taken.problems.values())
            if len(taken.files) < len(now):
                problems.append(
                    f"{run.folder.rollouts}: {len(taken.files):,} of {len(now):,} files are listed, the newest first. Each "
                    f"question takes in more, up to {_MOST_ROWS:,} trajectories; a range of steps comes before the others"
                )
            return problems

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        """Return what a query over the table `trajectories` gives. Raises DeadlineError, QueryError."""
        with self._cursor() as cursor:
            cursor.execute(sql, list(parameters))
            names = [each[0] for each in cursor.description or ()]
            return [dict(zip(names, values)) for values in cursor.fetchall()]

    def turns(self, run: Run, purpose: str, step: int, uid: str, sample: int | None) -> list[dict[str, Any]]:
        """Return the turns of a trajectory, or of all samples of a prompt. Raises DeadlineError, QueryError."""
        name = f"{purpose}-{step}.parquet"
        if not self._readable(run, {name}):
            return []
        where, parameters = "global_step = ? AND uid = ?", [step, uid]
        if sample is not None:
            where, parameters = f"{where} AND sample = ?", [*parameters, sample]
        names = ", ".join(f'"{each}"' for each in COLUMNS)
        sql = f"SELECT {names} FROM {self._source(run, [name])} WHERE {where} ORDER BY sample, turn"
        try:
            return self.rows(sql, parameters)
        except QueryError as error:
            raise QueryError(f"{self._taken[run.id].files[name].path} cannot be read: {error}") from error

    def matching(self, run: Run, pattern: str, files: Sequence[str]) -> str:
        """Return a query for file, uid and sample of the trajectories with a text that the pattern, `?`, is found in.

        Files that cannot be searched are left out from now on, and are among the problems. Raises QueryError for a pattern
        that is none, DeadlineError.
        """
        try:
            self.rows("SELECT regexp_matches('', ?)", [pattern])
        except QueryError as error:
            raise QueryError(f"text={pattern} is no regular expression: {error}") from error
        found = (
            "SELECT DISTINCT parse_filename(filename), uid, sample FROM {} WHERE regexp_matches("
            + _SEARCHED
            + ", '(?m)' || ?)"
        )
        readable = self._readable(run, set(files))
        return found.format(self._source(run, readable)) if readable else f"{found.format('template')} AND false"

    def drop_unreadable(self, run: Run) -> bool:
        """Leave out the files that cannot be searched; whether there were any."""
        dropped = False
        for name in self._readable(run):
            try:
                self.rows(f"SELECT count(*) FROM {self._source(run, [name])} WHERE {_SEARCHED} = ''")
            except QueryError as error:
                with self._exclusive(run):
                    taken = self._taken[run.id]
                    taken.problems[name] = f"{taken.files[name].path} cannot be searched: {_first_line(error)}"
                    self._database.execute("DELETE FROM trajectories WHERE run = ? AND file = ?", [run.id, name])
                dropped = True
        return dropped

    def files(self, run: Run, steps: tuple[float, float], purposes: Sequence[str]) -> list[str]:
        """Return the names of a run's files that have these steps and purposes (all, where none is named)."""
        taken = self._taken.get(run.id, _Taken())
        low, high = steps
        return [
            name
            for name, file in list(taken.files.items())
            if low <= file.step <= high and (not purposes or file.purpose in purposes)
        ]

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """A connection whose query is ended at the deadline."""
        cursor = self._database.cursor()
        timer = threading.Timer(self._timeout_s, cursor.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield cursor
        except duckdb.InterruptException as error:
            raise DeadlineError("the query", self._timeout_s, "Narrow the filter.") from error
        except duckdb.Error as error:
            raise QueryError(_first_line(error)) from error
        finally:
            timer.cancel()
            cursor.close()

    def _exclusive(self, run: Run) -> AbstractContextManager[None]:
        return held_in_time(self._lock, f"the reading of {run.folder.rollouts}", _INDEX_TIMEOUT_S)

    def _readable(self, run: Run, names: set[str] | None = None) -> list[str]:
        taken = self._taken.get(run.id, _Taken())
        usable = [name for name in list(taken.files) if name not in taken.problems]
        return [name for name in usable if names is None or name in names]

    def _source(self, run: Run, names: Sequence[str]) -> str:
        """Return a relation with all columns of `COLUMNS`, and the name of the file."""
        links = [self._folder / run.id / name for name in names]
        files = [file for link in links for file in (sorted(link.glob("part-*")) if link.is_dir() else [link])]
        read = (
            f"read_parquet([{', '.join(_quoted(str(file)) for file in files)}], union_by_name = true, filename = true)"
        )
        whole = "* REPLACE (regexp_replace(filename, '/part-[0-9]+[.]parquet$', '') AS filename)"
        return f"(SELECT * FROM template WHERE false UNION ALL BY NAME SELECT {whole} FROM {read})"

    def _forget(self, run: Run, taken: _Taken, name: str) -> None:
        self._database.execute("DELETE FROM trajectories WHERE run = ? AND file = ?", [run.id, name])
        (self._folder / run.id / name).unlink(missing_ok=True)
        taken.files.pop(name)
        taken.problems.pop(name, None)

    def _take(self, run: Run, taken: _Taken, files: Mapping[str, RolloutFile]) -> None:
        """Take in new files: all at once, or one by one where one is damaged."""
        (self._folder / run.id).mkdir(exist_ok=True)
        taken.files.update(files)
        usable: list[str] = []
        for name, file in files.items():
            link = self._folder / run.id / name
            link.unlink(missing_ok=True)
            try:
                if file.kind == "parquet":
                    read_parts(file.path)
                    link.symlink_to(file.path)
                elif problem := self._convert(file, link):
                    taken.problems[name] = problem
            except DataError as error:
                taken.problems[name] = str(error)
            if link.exists():
                usable.append(name)
        try:
            if usable:
                self._database.execute(_summary(self._source(run, usable)), [run.id])
        except duckdb.Error:
            for name in usable:
                try:
                    self._database.execute(_summary(self._source(run, [name])), [run.id])
                except duckdb.Error as error:
                    taken.problems[name] = f"{files[name].path} cannot be read: {_first_line(error)}"

    def _next_files(
        self, run: Run, taken: _Taken, now: Mapping[str, RolloutFile], steps: tuple[float, float]
    ) -> dict[str, RolloutFile]:
        """Return the files that are taken in now. A table that is full gives up other steps for those that are asked for."""
        new = {name: now[name] for name in reversed([*now]) if name not in taken.files}
        asked = {name: file for name, file in new.items() if steps[0] <= file.step <= steps[1]}
        if new and self._num_rows(run) >= _MOST_ROWS:
            others = [name for name, file in taken.files.items() if not steps[0] <= file.step <= steps[1]]
            for name in others if asked else ():
                self._forget(run, taken, name)
            new = asked = asked if others else {}
        chosen: dict[str, RolloutFile] = {}
        size = 0
        for name, file in {**asked, **new}.items():
            size += file.num_bytes
            if chosen and size > _BYTES_AT_A_TIME:
                break
            chosen[name] = file
        return chosen

    def _num_rows(self, run: Run) -> int:
        found = self._database.execute("SELECT count(*) FROM trajectories WHERE run = ?", [run.id]).fetchone()
        return int(found[0]) if found else 0

    def _convert(self, file: RolloutFile, path: Path) -> str:
        """Write a file's rows as Parquet; return what is wrong with it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        def write(writer: pq.ParquetWriter | None, rows: Sequence[Row]) -> pq.ParquetWriter:
            table = pa.Table.from_pylist(list(rows), schema=arrow_schema())
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            return writer

        writer, rows, problem = None, list[Row](), ""
        try:
            for row in rows_of(file):
                rows.append(row)
                if len(rows) >= _ROWS_AT_A_TIME:
                    writer, rows = write(writer, rows), []
            writer = write(writer, rows)
        except Exception as error:  # a file of another program may hold anything
            problem = f"{file.path} cannot be read to its end: {_first_line(error)}"
            try:
                writer = write(writer, rows) if rows else writer
            except Exception:  # these rows are what is wrong
                rows = []
        if writer is not None:
            writer.close()
        return problem


def _summary(rows: str) -> str:
    return _SUMMARY.format(rows=rows, metrics=_NUMBERS.format("metrics"), rewards=_NUMBERS.format("rewards"))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: BaseException) -> str:
    return re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", first_line(error))
