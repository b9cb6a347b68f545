"""Whether data rows have what their environment needs, all of them, before a model is loaded.

An environment says what it needs in an optional method of its class, which is given each row's columns but the prompt:

    @staticmethod
    def check_row(row): ...   # raises ValueError, or DataError, that names the column

For those of skyrl-gym it is written down here. A custom environment is asked in a worker process, as everything else is that
is its code, unless `environment.isolation=thread` trusts it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.data import load_prompts
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.parts import ENVIRONMENTS
from skyrl_train.registry import PartSpec, split_spec
from skyrl_train.rollout.boundary import CHECK_ROWS, column_in, plain
from skyrl_train.rollout.envs.environments import RowProblems, check_rows, environment_of, row_problems, uses_processes
from skyrl_train.rollout.hosts.local import LocalWorkers, run_in_workers
from skyrl_train.rollout.hosts.processes import WorkerEnded
from skyrl_train.rollout.hosts.scoring import check_reward_columns
from skyrl_train.types import Prompt

_CHUNK = 1000
"""Rows that a worker process is sent at a time."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_NAMING = "data.answer_column names the column with the answer"
_Needed = tuple[str, Callable[[Any], bool], str]
"""A column with dots into nested ones, what must hold of its value, and how that is said."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_json_list(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), list)
    except ValueError:
        return False


_TRUTH = "reward_spec.ground_truth"
_NUMBER_AS_TEXT: _Needed = (
    _TRUTH,
    lambda value: isinstance(value, str) and _NUMBER.fullmatch(value) is not None,
    "must be a number, written as a text without commas, such as '72'",
)
_TEXT: _Needed = (_TRUTH, _is_text, "must be a text")
_GYM: Mapping[str, tuple[_Needed, ...]] = {
    "aime": (("reward_model.ground_truth", _is_text, "must be a text"),),
    "gsm8k": (_NUMBER_AS_TEXT,),
    "gsm8k_multi_turn": (_NUMBER_AS_TEXT,),
    "lcb": ((_TRUTH, _is_json_list, "must be a JSON text with a list of tests"),),
    "search": (
        (
            _TRUTH,
            lambda value: isinstance(value, Mapping) and bool(value.get("target")),
            'must be {"target": [answers]}',
        ),
    ),
    "searchcode": (_TEXT,),
    "text2sql": (("db_id", _is_text, "must name a database"), ("data", _is_text, "must name a collection"), _TEXT),
}
"""What the environments of skyrl-gym read of a row, where they would fail, or never give a reward, without it."""


def checked_prompts(
    data: DataConfig, sources: Sequence[str], limit: int, environment: EnvironmentConfig
) -> list[Prompt]:
    """Return the prompts of `sources`, whose rows have what their environment and their rewards need. Raises as
    `load_prompts`, `check_all_rows` and `check_reward_columns`; none where there are no sources."""
    if not sources:
        return []
    prompts = load_prompts(sources, data, limit=limit)
    check_rows(prompts, environment)
    check_all_rows(prompts, environment)
    check_reward_columns(prompts, environment)
    return prompts


def check_all_rows(prompts: Sequence[Prompt], environment: EnvironmentConfig) -> None:
    """Raise DataError, in one line, for the first row that its environment cannot use: place, column and how many others
    there are. ConfigError and SkyrlTrainError as `WorkerHost.ready`, where the environment itself is what is wrong."""
    by_environment: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_environment.setdefault(environment_of(prompt, environment), []).append(prompt)
    for name, rows in by_environment.items():
        spec: PartSpec = name if environment.env_class is None else environment.env_class
        found = list(_problems(spec, rows, environment))
        if found:
            index, problem = found[0]
            others = f" ({len(found) - 1} other rows of {len(rows)} are refused, too)" if len(found) > 1 else ""
            raise DataError(f"{rows[index].place or 'prompt ' + rows[index].uid}: {problem.rstrip('.')}{others}.")


def _problems(spec: PartSpec, prompts: Sequence[Prompt], environment: EnvironmentConfig) -> Iterable[tuple[int, str]]:
    name = split_spec(spec)[0]
    if name in _GYM:
        return _gym_problems(name, prompts)
    if (
        name in ENVIRONMENTS or name == "reasoning_gym" or not uses_processes(environment)
    ):  # whose check imports nothing
        return _in_chunks(prompts, lambda rows: row_problems(spec, rows))
    if ":" not in name:  # another one of skyrl-gym's registry
        return ()
    alone = replace(environment, env_class=spec, tools=(), reward=None, rewards=())
    return run_in_workers(
        LocalWorkers.of(alone),
        lambda workers: _asked(workers, spec, prompts, environment.step_timeout_s),
        what=f"the check of {len(prompts)} rows by {name}",
        timeout_s=environment.step_timeout_s * (2 + len(prompts) // _CHUNK) + 300,
    )


def _gym_problems(name: str, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
    for index, prompt in enumerate(prompts):
        for column, holds, rule in _GYM[name]:
            value = column_in(prompt.extras, column)
            if not holds(value):
                got = "nothing" if value is None else repr(value)[:80]
                yield index, f"{column}: {rule}, for the environment {name}; got {got}. {_NAMING}"
                break


def _in_chunks(
    prompts: Sequence[Prompt], check: Callable[[list[dict[str, Any]]], RowProblems]
) -> Iterator[tuple[int, str]]:
    """Yield row numbers and problems. Nothing is asked again where there is no check."""
    for start in range(0, len(prompts), _CHUNK):
        found = check([dict(prompt.extras) for prompt in prompts[start : start + _CHUNK]])
        if found is None:
            return
        for index, problem in found:
            yield start + index, problem


async def _asked(
    workers: LocalWorkers, spec: PartSpec, prompts: Sequence[Prompt], step_timeout_s: float
) -> list[tuple[int, str]]:
    name, worker = split_spec(spec)[0], workers.start()
    found: list[tuple[int, str]] = []
    try:
        for start in (-_CHUNK, *range(0, len(prompts), _CHUNK)):
            # The first request has no rows: it asks whether there is a check at all.
            chunk = prompts[start : start + _CHUNK] if start >= 0 else ()
            rows = [plain(prompt.extras, f"{prompt.place}: a column") for prompt in chunk]
            request = {"call": CHECK_ROWS, "environment": 0, "name": name, "spec": plain(spec, name), "rows": rows}
            answer: Any = await worker.ask(request, step_timeout_s)
            if not isinstance(answer, dict) or "failure" in answer:
                raise SkyrlTrainError(f"{name}.check_row: {answer.get('message') if answer else 'no answer'}")
            if answer["value"] is None:
                return []
            found += [(start + int(index), str(problem)) for index, problem in answer["value"]]
    except asyncio.TimeoutError:
        raise SkyrlTrainError(
            f"{name}.check_row did not answer for {_CHUNK} rows within environment.step_timeout_s={step_timeout_s:g}"
        ) from None
    except WorkerEnded as ended:
        raise SkyrlTrainError(f"{name}.check_row: its worker process {ended}") from None
    return found
