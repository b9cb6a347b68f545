"""What is asked of rollouts: lists, groups, one trajectory, failures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from skyrl_train.view import records
from skyrl_train.view.filters import Arguments, Filters, NotThereError, RunEndpoint, in_order
from skyrl_train.view.rollouts import QueryError, RolloutIndex
from skyrl_train.view.sources import Run
from skyrl_train.view.tails import log_warnings
from skyrl_train.view.trajectory import Decode, describe_samples, describe_trajectory, find_decoder

Json = dict[str, Any]
_ROW = (
    "purpose, step, uid, sample, environment, dataset, outcome, failure_kind, failure_message, reward, num_turns, tokens, "
    "stop_reason, prompt_excerpt, text_excerpt"
)
_SORTS = {"step": "step", "reward": "reward", "tokens": "tokens", "turns": "num_turns", "uid": "uid"}
_GROUP_SORTS = {"spread": "spread", "mean": "reward_mean", "failed": "num_failed", "step": "step", "uid": "uid"}
_SOLVED_REWARD = 1.0
"""As `trainers/evaluation/evaluate.py` has it, where the environment does not say what is solved."""


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
        problems += self._index.refresh(run)
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
            max(reward) AS reward_max, max(tokens) AS tokens_max, max(num_turns) AS turns_max,
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
        return {**row, **by_count}

    def _trajectories(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        sql = f"SELECT {_ROW}, count(*) OVER () AS total FROM trajectories WHERE {{where}}"
        page = self._page(run, arguments, problems, sql, in_order(arguments, _SORTS, "step", "uid, sample"))
        if not page["rows"] and page["offset"]:
            counted, _ = self._asked(run, arguments, problems, "SELECT count(*) AS n FROM trajectories WHERE {where}")
            page["total"] = counted[0]["n"]
        return page

    def _groups(self, run: Run, arguments: Arguments, problems: list[str]) -> Json:
        sample = (
            '{"sample": sample, "reward": reward, "outcome": outcome, "failure_kind": failure_kind, "tokens": tokens, '
            '"num_turns": num_turns, "dataset": dataset, "stop_reason": stop_reason}'
        )
        sql = f"""SELECT purpose, step, uid, any_value(environment) AS environment,
            any_value(prompt_excerpt) AS prompt_excerpt, count(*) AS num_samples, count(failure_kind) AS num_failed,
            avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max,
            stddev_pop(reward) AS reward_std, max(reward) - min(reward) AS spread,
            list({sample} ORDER BY sample) AS samples, count(*) OVER () AS total
            FROM trajectories WHERE {{where}} GROUP BY purpose, step, uid"""
        return self._page(run, arguments, problems, sql, in_order(arguments, _GROUP_SORTS, "spread", "step DESC, uid"))

    def _page(self, run: Run, arguments: Arguments, problems: list[str], sql: str, order: str) -> Json:
        """Return some rows of a query whose column `total` counts all."""
        limit, offset = arguments.count("limit", 50, most=500), arguments.count("offset", 0)
        sql = f"{sql} ORDER BY {order} LIMIT {limit} OFFSET {offset}"
        rows, seconds = self._asked(run, arguments, problems, sql)
        total = max((row.pop("total") for row in rows), default=0)
        return {"total": total, "offset": offset, "limit": limit, "seconds": seconds, "rows": rows}

    def _turns(self, run: Run, arguments: Arguments, problems: list[str], *, of_one: bool) -> list[Json]:
        problems += self._index.refresh(run)
        purpose, uid, step = arguments.text("purpose") or "train", arguments.text("uid"), arguments.whole("step")
        sample = arguments.whole("sample") if of_one else None
        if step is None or (of_one and sample is None):
            raise ValueError("step and sample must be whole numbers")
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
        config = records.flat_config(run, problems)
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
            row_number() OVER (PARTITION BY failure_kind ORDER BY step, uid, sample) AS place,
            row_number() OVER (PARTITION BY failure_kind, step) AS of_step,
            row_number() OVER (PARTITION BY failure_kind, failure_message) AS of_message
            FROM trajectories WHERE failure_kind IS NOT NULL AND {where}
            QUALIFY place = 1 OR of_step = 1 OR of_message = 1 ORDER BY step, uid, sample"""
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
