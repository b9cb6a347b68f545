"""A request's path and arguments in, a JSON object out: docs/viewer.md has the list. Nothing here knows of HTTP. The rest of
`skyrl-view`:

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
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from skyrl_train.doctor import examine
from skyrl_train.errors import DeadlineError, SkyrlTrainError, counted
from skyrl_train.telemetry.reading import Run, read_object, settings_of
from skyrl_train.view import records
from skyrl_train.view.filters import (
    Arguments,
    Endpoint,
    Filters,
    NotThereError,
    RunEndpoint,
    chosen_run,
    in_order,
    metric_column,
)
from skyrl_train.view.pictures import Picture, read_picture
from skyrl_train.view.rollouts import QueryError, RolloutIndex
from skyrl_train.view.tails import Tail, end_of, last_lines, log_warnings, new_lines, objects_in, records_in
from skyrl_train.view.trajectory import Decode, describe_samples, describe_trajectory, find_decoder

Json = dict[str, Any]
_ROW = (
    "purpose, step, uid, sample, environment, dataset, outcome, failure_kind, failure_message, reward, num_turns, tokens, "
    "stop_reason, prompt_excerpt, text_excerpt, cut, age, metrics, rewards"
)
_SORTS = {name: name for name in ("step", "reward", "tokens", "uid", "cut", "age")} | {"turns": "num_turns"}
_GROUP_SORTS = {
    **{name: name for name in ("spread", "step", "uid")},
    "mean": "reward_mean",
    "failed": "num_failed",
    "cut": "num_cut",
    "age": "oldest",
}
_MOST_METRICS = 100
"""Names of numbers that lists can be filtered and sorted by."""
_OF_ONE_RUN = frozenset({"output_dir", "run_name", "derived"})
"""Settings that differ between any two runs."""
_MOST_IN_A_LABEL = 3
_SOLVED_REWARD = 1.0
"""As `trainers/evaluation/evaluate.py` has it, where the environment does not say what is solved."""


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
            "findings": self._findings,
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
        for each, label in zip(described, self._labels(problems), strict=True):
            each["label"] = label
        problems += [f"{run['path']}: nothing of a run is here yet" for run in described if run["state"] == "empty"]
        return {"runs": described, "version": self._version}

    def _labels(self, problems: list[str]) -> list[str]:
        """Return what tells each run from the others: its settings that differ, after its folder's name unless that is but a
        number."""
        runs = [*self._runs.values()]
        configs = [settings_of(run, problems) for run in runs]
        names = {name for config in configs for name in config if name not in _OF_ONE_RUN}
        differ = [name for name in sorted(names) if len({str(config.get(name)) for config in configs}) > 1]
        labels = []
        for run, config in zip(runs, configs, strict=True):
            words = [f"{name.rpartition('.')[2]}={config.get(name)}"[:40] for name in differ[:_MOST_IN_A_LABEL]]
            named = [] if run.root.name.isdecimal() else [f"{run.id}:"]
            labels.append(" ".join([*named, *words]) if config and words else run.id)
        return [
            f"{label} ({run.id})" if labels.count(label) > 1 and label != run.id else label
            for run, label in zip(runs, labels, strict=True)
        ]

    def _lines(self, run: Run, problems: list[str]) -> list[Json]:
        """Return the records of metrics; of other trainers' runs, what their rollouts say of each step."""
        if run.kind != "skyrl":
            problems += self._index.refresh(run)
            sql = """SELECT step, avg(reward) AS "reward/mean", stddev_pop(reward) AS "reward/std",
                min(reward) AS "reward/min", max(reward) AS "reward/max", count(*) AS "total/trajectories",
                avg(characters) AS "response_length/characters"
                FROM trajectories WHERE run = ? GROUP BY step ORDER BY step"""
            lines = {line["step"]: line for line in self._index.rows(sql, [run.id])}
            for column, named in (("rewards", "reward/{}/mean"), ("metrics", "env/{}")):
                sql = f"""SELECT step, entry.key AS name, avg(entry.value) AS mean FROM
                    (SELECT step, unnest(map_entries({column})) AS entry FROM trajectories WHERE run = ?) GROUP BY ALL"""
                for row in self._index.rows(sql, [run.id]):
                    lines[row["step"]][named.format(row["name"])] = row["mean"]
            return [*lines.values()]
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

    def _findings(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        """Return what the rules of `skyrl-doctor` find in the folder as it is now."""
        del arguments
        found, tables = examine(run)
        problems += tables.problems
        return {"findings": [finding.as_json() for finding in found]}

    def _overview(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        del arguments
        lines = self._lines(run, problems)
        files = run.rollout_files()
        steps = records.step_table(files, lines)
        plan = read_object(run.folder.plan_file, problems)
        names = sorted(set[str]().union(*lines))
        return {
            "run": run.describe(files),
            "steps": steps,
            "phases": _names_in(step["phases"] for step in steps),
            "waits": _names_in(step["waits"] for step in steps),
            "timeline": records.timeline_lines(records_in(last_lines(run.folder.timeline_file))),
            "memory": records.memory_facts(run, lines, problems),
            "mismatch": [name for name in names if name.startswith("mismatch/")],
            "off_policy": [name for name in names if name.startswith("off_policy/")],
            "plan": records.plan_beside(plan, lines),
            "config": list(map(list, settings_of(run, problems).items())),
            "environment": records.environment_of(run, problems),
            "restarts": objects_in(new_lines(run.folder.restarts_file, "0")[0]),
            "fork": read_object(run.folder.fork_file, problems) or None,
            "offsets": {
                "metrics": self._metrics[run.id].position,
                "timeline": end_of(run.folder.timeline_file),
                "log": end_of(run.root / "run.log"),
            },
        }

    def _diff(self, arguments: Arguments, problems: list[str]) -> Json:
        runs = [name for name in arguments.text("runs").split(",") if name]
        if unknown := [name for name in runs if name not in self._runs]:
            raise ValueError(f"runs={unknown[0]} is not one of {', '.join(self._runs)}")
        configs = [settings_of(self._runs[name], problems) for name in runs]
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


class RolloutAnswers:
    """Answers about the rollouts of a run."""

    def __init__(self, index: RolloutIndex) -> None:
        self._index = index
        self._decoders: dict[str, Decode | None] = {}
        self.endpoints: Mapping[str, RunEndpoint] = {
            "facets": self._facets,
            "trajectories": self._trajectories,
            "groups": self._groups,
            "group": self._group,
            "prompt": self._prompt,
            "trajectory": self._trajectory,
            "failures": self._failures,
        }
        """What can be asked, by name."""

    def _filtered(self, run: Run, arguments: Arguments, problems: list[str]) -> tuple[str, list[object]]:
        """Return a condition on the table `trajectories`, with its parameters."""
        filters = Filters.of(arguments)
        problems += self._index.refresh(run, filters.steps)
        conditions, parameters = filters.conditions()
        conditions, parameters = ["run = ?", *conditions], [run.id, *parameters]
        if filters.text:
            files = self._index.files(run, filters.steps, filters.among.get("purpose", ()))
            keys = self._index.matching(run, filters.text, files)
            conditions.append(f"(file, uid, sample) IN ({keys})")
            parameters.append(filters.text)
        return " AND ".join(conditions), parameters

    def _asked(self, run: Run, arguments: Arguments, problems: list[str], sql: str) -> tuple[list[Json], float]:
        """Return the rows of a query, in which `{where}` is the filter, and its seconds. Files whose texts turn out to be
        damaged are left out."""
        began = time.perf_counter()
        where, parameters = self._filtered(run, arguments, problems)
        try:
            rows = self._index.rows(sql.replace("{where}", where), parameters)
        except QueryError:
            if not self._index.drop_unreadable(run):
                raise
            where, parameters = self._filtered(run, arguments, problems)
            rows = self._index.rows(sql.replace("{where}", where), parameters)
        return rows, round(time.perf_counter() - began, 4)

    def _facets(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        del arguments
        facets = {
            "environments": "environment",
            "datasets": "dataset",
            "outcomes": "outcome",
            "failure_kinds": "failure_kind",
            "purposes": "purpose",
            "stop_reasons": "stop_reason",
        }
        counts = ", ".join(f"histogram({column}) AS {name}" for name, column in facets.items())
        sql = f"""SELECT {counts}, min(step) AS step_min, max(step) AS step_max, min(reward) AS reward_min,
            max(reward) AS reward_max, max(tokens) AS tokens_max, max(num_turns) AS turns_max, max(cut) AS cut_max,
            max(age) AS age_max,
            count(*) AS num_trajectories, coalesce(sum(greatest(num_turns, 1)), 0)::BIGINT AS num_turns
            FROM trajectories WHERE run = ?"""
        problems += self._index.refresh(run)
        row = self._index.rows(sql, [run.id])[0]
        by_count = {
            name: sorted(
                ([value, count] for value, count in (row[name] or {}).items() if value), key=lambda each: -each[1]
            )
            for name in facets
        }
        return {**row, **by_count, "metrics": self._metric_ranges(run)}

    def _metric_ranges(self, run: Run) -> list[Json]:
        """Return the numbers that differ between trajectories, with their ranges: metrics, and components of rewards."""
        entries = """SELECT '{1}' || entry.key AS name, entry.value AS value FROM
            (SELECT unnest(map_entries({0})) AS entry FROM trajectories WHERE run = ?)"""
        parts = " UNION ALL ".join((entries.format("metrics", ""), entries.format("rewards", "rewards/")))
        sql = f"""SELECT name, min(value) AS min, max(value) AS max FROM ({parts}) GROUP BY name
            HAVING min(value) < max(value) ORDER BY name LIMIT {_MOST_METRICS}"""
        return self._index.rows(sql, [run.id, run.id])

    def _trajectories(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        sql = f"SELECT {_ROW}, count(*) OVER () AS total FROM trajectories WHERE {{where}}"
        sorts = {**_SORTS, **({"metric": metric} if (metric := metric_column(arguments)) else {})}
        return self._page(run, arguments, problems, sql, in_order(arguments, sorts, "step", "uid, sample"))

    def _groups(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        sample = (
            '{"sample": sample, "reward": reward, "outcome": outcome, "failure_kind": failure_kind, "tokens": tokens, '
            '"num_turns": num_turns, "dataset": dataset, "stop_reason": stop_reason, "cut": cut, "age": age, '
            '"metrics": metrics, "rewards": rewards}'
        )
        in_order_of_samples = "list(reward ORDER BY sample)"  # a sum's last digit is that of its order
        metric = metric_column(arguments)
        sorts = {**_GROUP_SORTS, **({"metric": f"avg({metric})"} if metric else {})}
        sql = f"""SELECT purpose, step, uid, any_value(environment) AS environment,
            any_value(prompt_excerpt) AS prompt_excerpt, count(*) AS num_samples, count(failure_kind) AS num_failed,
            list_avg({in_order_of_samples}) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max,
            list_stddev_pop({in_order_of_samples}) AS reward_std, max(reward) - min(reward) AS spread,
            count(*) FILTER (cut > 0) AS num_cut, max(age) AS oldest,
            list({sample} ORDER BY sample) AS samples, count(*) OVER () AS total
            FROM trajectories WHERE {{where}} GROUP BY purpose, step, uid"""
        return self._page(run, arguments, problems, sql, in_order(arguments, sorts, "spread", "step DESC, uid"))

    def _page(self, run: Run, arguments: Arguments, problems: list[str], sql: str, order: str) -> Json:
        """Return some rows of a query whose column `total` counts all."""
        limit, offset = arguments.count("limit", 50, most=500), arguments.count("offset", 0)
        rows, seconds = self._asked(run, arguments, problems, f"{sql} ORDER BY {order} LIMIT {limit} OFFSET {offset}")
        total = max((row.pop("total") for row in rows), default=0)
        if not rows and offset:  # behind the last, no row says how many there are
            counted, _ = self._asked(run, arguments, problems, f"SELECT count(*) AS n FROM ({sql})")
            total = counted[0]["n"]
        return {"total": total, "offset": offset, "limit": limit, "seconds": seconds, "rows": rows}

    def _turns(self, run: Run, arguments: Arguments, problems: list[str], *, of_one: bool) -> list[Json]:
        purpose, uid, step = arguments.text("purpose") or "train", arguments.text("uid"), arguments.whole("step")
        sample = arguments.whole("sample") if of_one else None
        if step is None or (of_one and sample is None):
            raise ValueError("step and sample must be whole numbers")
        problems += self._index.refresh(run, (step, step))
        rows = self._index.turns(run, purpose, step, uid, sample)
        if not rows:
            name = f"{uid}/{sample}" if of_one else uid
            raise NotThereError(f"{name} is not in {purpose} step {step} of {run.id}")
        return rows

    def _group(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        rows = self._turns(run, arguments, problems, of_one=False)
        whole = describe_trajectory(run, [row for row in rows if row["sample"] == rows[0]["sample"]], None, None)
        names = ("purpose", "step", "uid", "environment", "prompt", "extras")
        return {name: whole[name] for name in names} | {"samples": describe_samples(rows)}

    def _prompt(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        uid, purpose = arguments.text("uid"), arguments.text("purpose")
        problems += self._index.refresh(run)
        sql = f"""SELECT purpose, step, count(*) AS num_samples, count(failure_kind) AS num_failed,
            avg(CASE WHEN failure_kind IS NULL THEN coalesce(solved >= 0.5, reward >= {_SOLVED_REWARD})::INT END)
            AS solved,
            avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max,
            any_value(environment) AS environment, count(solved) AS stated
            FROM trajectories WHERE run = ? AND uid = ? AND (? = '' OR purpose = ?) GROUP BY purpose, step ORDER BY step"""
        points = self._index.rows(sql, [run.id, uid, purpose, purpose])
        if not points:
            raise NotThereError(f"uid={uid} is in no rollout of {run.id}")
        stated = any(point.pop("stated") for point in points)
        environments = [point.pop("environment") for point in points]
        turns: list[Json] = []
        try:
            turns = self._index.turns(run, points[0]["purpose"], points[0]["step"], uid, None)
        except QueryError as error:
            problems.append(str(error))
        return {
            "uid": uid,
            "prompt": describe_trajectory(run, turns[:1], None, None)["prompt"] if turns else [],
            "environment": environments[0],
            "points": points,
            "solved_means": "metrics.solved" if stated else f"reward >= {_SOLVED_REWARD:g}",
        }

    def _trajectory(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        rows = self._turns(run, arguments, problems, of_one=True)
        config = settings_of(run, problems)
        if run.id not in self._decoders:
            self._decoders[run.id] = find_decoder(run, config)
        described = describe_trajectory(run, rows, self._decoders[run.id], _clip_range(config))
        return described | {"neighbours": self._neighbours(run, described)}

    def _neighbours(self, run: Run, own: Json) -> Json:
        key = [run.id, own["purpose"], own["step"], own["uid"], own["sample"]]
        side = """(SELECT purpose, step, uid, sample, '{}' AS side FROM trajectories
            WHERE run = ? AND purpose = ? AND step = ? AND (uid, sample) {} (?, ?) ORDER BY uid {}, sample {} LIMIT 1)"""
        sides = side.format("previous", "<", "DESC", "DESC"), side.format("next", ">", "ASC", "ASC")
        rows = {row.pop("side"): row for row in self._index.rows(" UNION ALL ".join(sides), key + key)}
        return {name: {"run": run.id, **rows[name]} if name in rows else None for name in ("previous", "next")}

    def _failures(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        sql = """SELECT failure_kind AS kind, failure_message AS message, purpose, step, uid, sample, failure_turn AS turn,
            count(*) OVER (PARTITION BY failure_kind) AS count, count(*) OVER (PARTITION BY failure_kind, step) AS in_step,
            count(*) OVER (PARTITION BY failure_kind, failure_message) AS alike,
            row_number() OVER (PARTITION BY failure_kind ORDER BY step, uid, sample, purpose DESC) AS place,
            row_number() OVER (PARTITION BY failure_kind, step) AS of_step,
            row_number() OVER (PARTITION BY failure_kind, failure_message) AS of_message
            FROM trajectories WHERE failure_kind IS NOT NULL AND {where}
            QUALIFY place = 1 OR of_step = 1 OR of_message = 1 ORDER BY step, uid, sample, purpose DESC"""
        rows, _ = self._asked(run, arguments, problems, sql)
        kinds = []
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in rows if row["kind"] == kind]
            first = next(row for row in own if row["place"] == 1)
            messages = [[row["message"], row["alike"]] for row in own if row["of_message"] == 1]
            kinds.append(
                {
                    "kind": kind,
                    "count": first["count"],
                    "steps": [[row["step"], row["in_step"]] for row in own if row["of_step"] == 1],
                    "first": {name: first[name] for name in ("purpose", "step", "uid", "sample", "turn", "message")},
                    "messages": sorted(messages, key=lambda each: -each[1])[:20],
                }
            )
        sql = """SELECT step, any_value(error) AS error, count(*) AS num_trajectories FROM trajectories
            WHERE run = ? AND purpose = 'failed' GROUP BY step ORDER BY step"""
        log, log_total = log_warnings(run.root / "run.log")
        return {
            "total": sum(kind["count"] for kind in kinds),
            "kinds": sorted(kinds, key=lambda kind: -kind["count"]),
            "failed_steps": self._index.rows(sql, [run.id]),
            "log": log,
            "log_total": log_total,
        }


def _clip_range(config: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = (config.get(f"trainer.algorithm.eps_clip_{end}") for end in ("low", "high"))
    return (float(low), float(high)) if isinstance(low, (int, float)) and isinstance(high, (int, float)) else None


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
