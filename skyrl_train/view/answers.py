"""A request's path and arguments in, a JSON object out: docs/viewer.md has the list. Nothing here knows of HTTP. The rest of
`skyrl-view`:

    sources     which runs there are, and which files hold their rollouts
    importers   rollouts of older versions and of other trainers, as rows of the same columns
    rollouts    queries over all of them: DuckDB
    trajectory  one trajectory with what is known of each token
    records     everything else in a run's folder: metrics, timeline, settings
    tails       what of it grows: lines of records, and of the log
    pictures    images that messages name by their sums
    server      who may ask, and how; `export` puts answers and page into one file

A folder is only read: it is never opened for writing and never locked, and what vanishes or is half written while it is
looked at is named among the `problems` of an answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from skyrl_train.errors import DeadlineError, SkyrlTrainError, counted
from skyrl_train.view import records
from skyrl_train.view.filters import Arguments, Endpoint, NotThereError, RunEndpoint, chosen_run
from skyrl_train.view.pictures import Picture, read_picture
from skyrl_train.view.rollout_answers import RolloutAnswers
from skyrl_train.view.rollouts import RolloutIndex
from skyrl_train.view.sources import Run, read_object
from skyrl_train.view.tails import Tail, end_of, new_lines, objects_in, records_in

Json = dict[str, Any]


class Answers:
    """Answers for some runs. Safe to be asked by several threads."""

    def __init__(self, runs: Sequence[Run], index: RolloutIndex, *, version: str) -> None:
        self._runs = {run.id: run for run in runs}
        self._index, self._version = index, version
        self._metrics = {run.id: Tail(run.folder.metrics_file) for run in runs}
        of_run: Mapping[str, RunEndpoint] = {
            "metrics": self._show_metrics,
            "overview": self._overview,
            "tail": self._tail,
            **RolloutAnswers(index).endpoints,
        }
        self.endpoints: Mapping[str, Endpoint] = {
            "runs": self._list_runs,
            "diff": self._diff,
            **{name: partial(self._of_run, endpoint) for name, endpoint in of_run.items()},
        }
        """What can be asked, by name."""

    def answer(self, path: str, query: Sequence[tuple[str, str]]) -> tuple[int, Json]:
        """Return the status and the object for `api/<name>`."""
        problems: list[str] = []
        endpoint = self.endpoints.get(path.removeprefix("api/"))
        if endpoint is None:
            return 404, {"error": f"there is no {path}", "problems": []}
        arguments = Arguments(query)
        try:
            found = endpoint(arguments, problems)
            arguments.check_all_read()
        except NotThereError as error:
            return 404, {"error": str(error), "problems": problems}
        except DeadlineError as error:
            return 503, {"error": str(error), "problems": problems}
        except (ValueError, SkyrlTrainError) as error:
            return 400, {"error": str(error), "problems": problems}
        return 200, found | {"problems": problems}

    def picture(self, run: str, name: str) -> Picture:
        """Return an image of a run by its sum. Raises ValueError, NotThereError."""
        if run not in self._runs:
            raise NotThereError(f"run={run} is not one of {', '.join(self._runs)}")
        return read_picture(self._runs[run], name)

    def _of_run(self, endpoint: RunEndpoint, arguments: Arguments, problems: list[str]) -> Json:
        run = chosen_run(self._runs, arguments)
        return {"run": run.id} | endpoint(run, arguments, problems)

    def _list_runs(self, arguments: Arguments, problems: list[str]) -> Json:
        del arguments
        described = [run.describe() for run in self._runs.values()]
        problems += [f"{run['path']}: nothing of a run is here yet" for run in described if run["state"] == "empty"]
        return {"runs": described, "version": self._version}

    def _lines(self, run: Run, problems: list[str]) -> list[Json]:
        """Return the records of metrics; of other trainers' runs, what their rollouts say of each step."""
        if run.kind != "skyrl":
            problems += self._index.refresh(run)
            sql = """SELECT step, avg(reward) AS "reward/mean", stddev_pop(reward) AS "reward/std",
                min(reward) AS "reward/min", max(reward) AS "reward/max", count(*) AS "total/trajectories"
                FROM trajectories WHERE run = ? GROUP BY step ORDER BY step"""
            return self._index.rows(sql, [run.id])
        tail = self._metrics[run.id]
        tail.refresh()
        if tail.torn:
            problems.append(f"{tail.path}: {counted(tail.torn, 'line')} are no records of a step; they are left out")
        return tail.records

    def _show_metrics(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        names = [name for name in arguments.text("names").split(",") if name]
        most = arguments.count("max_points", 2000, most=20_000)
        series = records.metric_series(self._lines(run, problems), names, max(2, most))
        return {**series, "offset": self._metrics[run.id].position}

    def _overview(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        del arguments
        lines = self._lines(run, problems)
        steps = records.step_table(run, lines)
        timeline = Tail(run.folder.timeline_file)
        timeline.refresh()
        plan = read_object(run.folder.plan_file, problems)
        names = sorted({name for line in lines for name in line})
        return {
            "run": run.describe(),
            "steps": steps,
            "phases": _names_in(step["phases"] for step in steps),
            "waits": _names_in(step["waits"] for step in steps),
            "timeline": records.timeline_lines(timeline.records),
            "memory": records.memory_facts(run, lines, problems),
            "mismatch": [name for name in names if name.startswith("mismatch/")],
            "off_policy": [name for name in names if name.startswith("off_policy/")],
            "plan": records.plan_beside(plan, lines),
            "config": list(map(list, records.flat_config(run, problems).items())),
            "environment": records.environment_of(run, problems),
            "restarts": objects_in(new_lines(run.folder.restarts_file, "0")[0]),
            "fork": read_object(run.folder.fork_file, problems) or None,
            "offsets": {
                "metrics": self._metrics[run.id].position,
                "timeline": timeline.position,
                "log": end_of(run.root / "run.log"),
            },
        }

    def _diff(self, arguments: Arguments, problems: list[str]) -> Json:
        runs = [name for name in arguments.text("runs").split(",") if name]
        if unknown := [name for name in runs if name not in self._runs]:
            raise ValueError(f"runs={unknown[0]} is not one of {', '.join(self._runs)}")
        configs = [records.flat_config(self._runs[name], problems) for name in runs]
        settings = sorted({setting for config in configs for setting in config})
        rows: list[Json] = []
        for name in settings:
            values = [config.get(name) for config in configs]
            rows.append({"name": name, "values": values, "differs": any(value != values[0] for value in values)})
        shown = rows if arguments.text("all") == "1" else [row for row in rows if row["differs"]]
        return {"runs": runs, "rows": shown, "num_equal": sum(not row["differs"] for row in rows)}

    def _tail(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        del problems
        paths = {
            "metrics": run.folder.metrics_file,
            "timeline": run.folder.timeline_file,
            "log": run.root / "run.log",
        }
        lines: dict[str, list[str]] = {}
        offsets: dict[str, str] = {}
        reset, is_truncated = [], False
        for name, path in paths.items():
            if position := arguments.text(name):
                lines[name], offsets[name], has_more, is_other = new_lines(path, position)
                is_truncated |= has_more
                reset += [name] if is_other else []
            else:
                lines[name], offsets[name] = [], end_of(path)
        described = run.describe()
        return {
            "run": described,
            "metrics": list(map(records.numbers_of, records_in(lines["metrics"]))),
            "timeline": records.timeline_lines(records_in(lines["timeline"]), last=len(lines["timeline"]) or 1),
            "log": lines["log"],
            "offsets": offsets,
            "rollout_files": described["num_rollout_files"],
            "is_truncated": is_truncated,
            "reset": reset,
        }


def to_json(value: object) -> str:
    """Return JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _names_in(parts: Any) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))
