"""Rows that the package reasoning-gym makes: the reader `reasoning_gym`, whose settings are `data.reasoning_gym`.

A row is a function of its task, the task's arguments, the seed and a number. Rows are made by a process of its own,
`python -m skyrl_train.data.tasks.reasoning_tasks`: one that hangs is ended, and text has the same hashes in all of
them, which some tasks depend on. What a task's scorer needs is kept in the row as a Python literal, as JSON has no
tuples.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from skyrl_train.errors import DataError, counted
from skyrl_train.registry import PartSpec, did_you_mean, part_name, split_spec
from skyrl_train.system import derive_seed

SETTING = "data.reasoning_gym"
COLUMN = "reasoning_gym"
"""The column that says where a row comes from and holds what its scorer needs."""
PACKAGE = "reasoning-gym"
NOT_INSTALLED = f"needs the package {PACKAGE}, which is not installed here: pip install {PACKAGE}"
_HELD_OUT, _TRAIN = "validation", "train"
_OF_THE_READER = ("seed", "size")
"""Arguments of every task that are ours to give."""
_DRAWS, _FIRST_DRAWS = 10, 100
"""For n rows at most 10 n + 100 are made: beyond that, nearly all are questions that were there before."""
_SEEDS = 2**30
"""Seeds of training rows lie below, those of held-out rows from here on."""

logger = logging.getLogger(__name__)


def read_tasks(
    location: str,
    *,
    tasks: Sequence[PartSpec] = (),
    train_size: int = 0,
    validation_size: int = 0,
    seed: int = 0,
    instruction: str = "",
    timeout_s: float = 300.0,
) -> Iterator[Mapping[str, Any]]:
    """The reader `reasoning_gym`: yield the rows of `reasoning_gym:train` or `reasoning_gym:validation`.

    Args:
        tasks: Names, or `{_target_: chain_sum, weight: 2, max_terms: 3}`: the weight is the task's share of the rows.
        instruction: Stands behind each question.
        timeout_s: Of making all rows.

    Raises DataError: an unknown task or argument, too few different questions, a task that fails, the deadline.
    """
    split = location.rpartition(":")[2]
    if split not in (_TRAIN, _HELD_OUT):
        rule = f"must be {COLUMN}:{_TRAIN} or {COLUMN}:{_HELD_OUT}"
        raise DataError(f"{location}: {rule} with data.reader={COLUMN}. Set data.train=[{COLUMN}:{_TRAIN}]")
    sizes = {_HELD_OUT: validation_size, _TRAIN: train_size}
    asked = json.dumps({"tasks": list(tasks), "sizes": sizes, "seed": seed}, default=dict)
    for row in _made(asked, timeout_s)[split]:
        yield {**row, "prompt": f"{row['prompt']}\n{instruction}" if instruction else row["prompt"]}


@functools.lru_cache(maxsize=4)
def _made(asked: str, timeout_s: float) -> Mapping[str, Any]:
    """Return the rows by split, from a process that makes them."""
    command = [sys.executable, "-m", __name__]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=timeout_s, env=environ)
    except subprocess.TimeoutExpired as expired:
        said = expired.stderr.decode(errors="replace") if isinstance(expired.stderr, bytes) else expired.stderr or ""
        far = f" ({said.strip().splitlines()[-1]})" if said.strip() else ""
        raise DataError(
            f"{SETTING}: the rows were not made within {SETTING}.timeout_s={timeout_s:g}{far}. Raise it, ask for fewer "
            f"({SETTING}.train_size), or choose an easier task."
        ) from None
    try:
        answer: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DataError(f"{SETTING}: the process that makes rows ended with {done.returncode}: {last}") from None
    if "problem" in answer:
        raise DataError(str(answer["problem"]))
    for task, count in answer["repeated"].items():
        logger.warning("%s of %s left out: rows before had them", counted(count, "repeated question"), task)
    return answer


def package_version() -> str:
    """Return the version of the package. Raises DataError where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DataError(f"{SETTING}: {NOT_INSTALLED}") from None


@functools.cache
def package() -> ModuleType:
    """Import reasoning_gym, which imports all its tasks at once. What these import and is not here is stood in for while it
    does, so that a task fails by the name of what it needs when it uses it, and the others work.

    Raises DataError where the package itself is not there, or needs what is missing in order to be imported.
    """
    package_version()
    stand_ins: list[str] = []
    try:
        while True:
            try:
                return importlib.import_module("reasoning_gym")
            except ImportError as error:
                missing = error.name or ""
                if not missing or missing.partition(".")[0] == "reasoning_gym" or missing in stand_ins:
                    raise DataError(f"{SETTING}: {PACKAGE} cannot be imported here ({error})") from error
                for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
                    del sys.modules[name]
                stand_ins.append(missing)
                sys.modules[missing] = _StandIn(missing)
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


class _StandIn(ModuleType):
    """In place of a module that cannot be imported: calling what is in it says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: object, **_named: object) -> None:
            raise ModuleNotFoundError(
                f"needs {self.__name__}, which cannot be imported here: pip install {self.__name__}", name=self.__name__
            )

        return missing


@functools.lru_cache(maxsize=256)
def _dataset(task: str, arguments: str) -> Any:
    return package().create_dataset(task, **json.loads(arguments))


def score(source: Mapping[str, Any], answer: str | None) -> float:
    """Return what the task's own scorer says of an answer: 1 is right, some give parts of it.

    Args:
        source: The row's column `reasoning_gym`.
        answer: None where the response has none.

    Raises DataError where another version of the package is here than made the row; whatever the scorer raises.
    """
    if package_version() != source["version"]:
        raise DataError(
            f"the row was made by {PACKAGE} {source['version']}, and {package_version()} is installed where it is scored: "
            f"pip install {PACKAGE}=={source['version']}"
        )
    dataset = _dataset(source["task"], json.dumps(source["arguments"], sort_keys=True))
    return float(dataset.score_answer(answer, ast.literal_eval(source["entry"])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """One entry of `data.reasoning_gym.tasks`."""

    setting: str
    label: str
    """As data sources are called in metrics: the task, with its arguments where another entry is of the same one."""
    name: str
    arguments: Mapping[str, Any]
    weight: float


def _tasks(specs: Sequence[PartSpec]) -> list[_Task]:
    """Return the entries. Raises DataError for what is wrong with the first that is."""
    if not specs:
        raise DataError(f"{SETTING}.tasks: must name a task at least: {SETTING}.tasks=[chain_sum]")
    known = importlib.import_module(f"{package().__name__}.factory").DATASETS
    names = [split_spec(spec)[0] for spec in specs]
    found: list[_Task] = []
    for index, spec in enumerate(specs):
        setting = f"{SETTING}.tasks[{index}]"
        name, arguments = split_spec(spec)
        if name not in known:
            near = did_you_mean(name, known) or f"there are {', '.join(sorted(known))}"
            raise DataError(f"{setting}: {PACKAGE} {package_version()} has no task {name!r}; {near}")
        weight = arguments.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise DataError(
                f"{setting}.weight: must be a number greater than 0; got {weight!r}. Leave the task out for 0"
            )
        taken = [field.name for field in dataclasses.fields(known[name][1]) if field.name not in _OF_THE_READER]
        for key in arguments:
            if key in _OF_THE_READER:
                remedy = f"{SETTING}.{'seed' if key == 'seed' else 'train_size'} is of all tasks together"
                raise DataError(f"{setting}.{key}: is no argument of a task; {remedy}")
            if key not in taken:
                near = did_you_mean(key, taken) or f"it takes {', '.join(taken) or 'none'}"
                raise DataError(f"{setting}.{key}: is no argument of {name}; {near}")
        label = name if names.count(name) == 1 else part_name({"_target_": name, **arguments})
        if label in [other.label for other in found]:
            raise DataError(f"{setting}: is in the list already; give it other arguments, or a weight instead")
        found.append(_Task(setting=setting, label=label, name=name, arguments=arguments, weight=float(weight)))
    return found


def _rows(
    task: _Task, count: int, split: str, seed: int, seen: set[str], repeated: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield `count` rows whose questions are not in `seen`, and put them there; those that are, are counted and left out.

    Raises DataError where there are not so many, or the task fails.
    """
    first = derive_seed(seed, f"reasoning_gym/{task.name}/{json.dumps(task.arguments, sort_keys=True)}") % _SEEDS
    first += _SEEDS if split == _HELD_OUT else 0
    draws, found, index = _DRAWS * count + _FIRST_DRAWS, 0, 0
    size = f"{SETTING}.{split}_size"
    try:
        dataset: Any = package().create_dataset(task.name, **task.arguments, seed=first, size=draws)
        while found < count:
            if index == draws:
                raise DataError(
                    f"{size}: asks for {counted(count, 'row')} of {task.label}, which gave {counted(found, 'question')} "
                    f"in {draws} that no row before had. Lower it, or give the task other arguments."
                )
            entry = dict(dataset[index])
            index += 1
            question = str(entry["question"])
            if " ".join(question.split()) in seen:
                repeated[task.label] += 1
                continue
            seen.add(" ".join(question.split()))
            yield _row(task, entry, first + index - 1, dataset)
            found += 1
            sys.stderr.write(f"{task.label}: {found} of {counted(count, split + ' row')}\n")
    except DataError:
        raise
    except Exception as error:  # whatever a task raises
        said = " ".join(str(error).split())
        raise DataError(f"{task.setting}: {task.label} fails ({type(error).__name__}: {said})") from error


def _row(task: _Task, entry: Mapping[str, Any], seed: int, dataset: Any) -> dict[str, Any]:
    """Return the row of what the package made. Raises ValueError where it cannot be kept so that it is scored alike."""
    kept = _plain(entry)
    if kept != entry and dataset.score_answer(entry["answer"], kept) != dataset.score_answer(entry["answer"], entry):
        raise ValueError("its rows are no plain values, and its scorer needs them")
    source = {"task": task.name, "arguments": task.arguments, "version": package_version(), "seed": seed}
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "data_source": f"{COLUMN}/{task.label}",
        COLUMN: {**source, "entry": repr(kept)},
    }


def _plain(value: Any) -> Any:
    """Return what `ast.literal_eval` gives back, with the text of anything else (a fraction, say) in its place."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    if value is None or type(value) in (bool, int, str, bytes) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)


def _make(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows by split: the held-out ones first, whose questions the others leave out; and how many were `repeated`,
    by task."""
    from skyrl_train.data.mix import next_slots  # not above: workers of environments import this module to score alone

    tasks, seen, repeated = _tasks(asked["tasks"]), set[str](), Counter[str]()
    made: dict[str, Any] = {"repeated": repeated}
    for split, size in asked["sizes"].items():
        slots = next_slots([task.weight for task in tasks], [0] * len(tasks), size)
        rows = [
            _rows(task, slots.count(number), split, asked["seed"], seen, repeated) for number, task in enumerate(tasks)
        ]
        made[split] = [next(rows[number]) for number in slots]
    return made


def main() -> None:
    """Answer one request on standard input; on standard output stands nothing else."""
    asked = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer: Mapping[str, Any] = _make(asked)
        except DataError as error:
            answer = {"problem": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
