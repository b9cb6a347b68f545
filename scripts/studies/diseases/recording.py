"""Makes the runs: each in a process of its own, with one thing planted."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pkgutil
import random
import resource
import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.studies.diseases.archive import KEPT
from scripts.studies.diseases.plants import PLANTS
from scripts.studies.diseases.settings import RECIPES, Name, Setting, Settings


def numbers(setting: Name) -> dict[str, str]:
    """Return under which number each plant is recorded: in an order that says nothing."""
    names = sorted(PLANTS)
    random.Random(f"order of {setting}").shuffle(names)
    return {name: f"{number:02d}" for number, name in enumerate(names, start=1)}


def make(name: str, setting: Setting, folder: Path) -> None:
    """Train one run; in a process of its own, whose lines it may exchange."""
    from skyrl_train import api

    loop: Any = pkgutil.resolve_name("skyrl_train.trainers.loop:TrainingLoop")
    loop._draw = lambda *_: None  # pictures are not recorded, and take a third of such a run
    plant = PLANTS[name]
    output = folder / setting.name / numbers(setting.name)[name]
    random.seed(f"{setting.name} {name}")
    shutil.rmtree(output, ignore_errors=True)
    before, config = _LOADED.get((plant.recipe_in(setting), setting.name)) or _loaded(plant.recipe_in(setting), setting)
    settings = dict(before)
    plant.change(settings, setting)
    settings |= {**_own_seed(name, settings), "output_dir": str(output)}
    for path, value in settings.items():
        if value is not before.get(path):
            config = _with(config, path.split("."), api._plain(value, path))
    train: Any = api.train_sft if "num_steps" in vars(config.trainer) else api.train
    try:
        if plant.resumes_at:
            _train_until(plant.resumes_at, train, config)
        train(config)
    except Exception as error:  # an ill run may end by an error
        print(f"{name} ended by {type(error).__name__}: {error}")
        traceback.print_exc(limit=4)


_LOADED: dict[tuple[str, str], tuple[Settings, Any]] = {}
"""Settings and configurations of recipes that are read before the forks: reading takes a third of such a run."""
_ALIKE = ("base", "turns", "adapter", "critic", "curriculum", "held_near")
"""Recipes that begin with a model that is there."""


def _loaded(recipe: str, setting: Setting) -> tuple[Settings, Any]:
    """Return what the healthy runs of a recipe are configured by."""
    from skyrl_train import api

    preset, settings_in = RECIPES[recipe]
    settings: Settings = settings_in(setting)
    is_supervised: Any = preset.startswith("sft")
    return settings, api.load_config(f"+experiment={preset}", settings=settings, sft=is_supervised)


def _with(owner: Any, path: Sequence[str], value: Any) -> Any:
    """Return a section of a configuration with one setting changed."""
    name, *rest = path
    return replace(owner, **{name: _with(getattr(owner, name), rest, value) if rest else value})


def _own_seed(name: str, settings: Settings) -> Settings:
    """Another seed for a run that differs in nothing else."""
    return {"seed": settings["seed"] + 1} if name == "healthy_again" else {}


def _train_until(step: int, train: Any, config: Any) -> None:
    """Train up to a checkpoint, and stop as at a signal."""
    from skyrl_train.errors import StopRequested

    writer: Any = pkgutil.resolve_name("skyrl_train.trainers.loop:TrainingLoop")
    original = writer.record

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if kwargs.get("step", args[0] if args else None) == step:
            os.kill(os.getpid(), 15)
        return found

    writer.record = record
    try:
        train(config)
    except StopRequested:
        pass
    finally:
        writer.record = original


def audited(name: str, setting: Setting, folder: Path) -> None:
    """Audit one run, in a process that plants nothing, and keep what it says beside the runs."""
    from skyrl_train.errors import SkyrlTrainError
    from skyrl_train.runs.checks import audit

    output = folder / setting.name / numbers(setting.name)[name]
    told: Any
    try:
        told = [{**asdict(line), "holds": line.holds} for line in audit.audit(output)]
    except SkyrlTrainError as error:
        told = f"{type(error).__name__}: {error}"
    (folder / f"{setting.name}_audits").mkdir(exist_ok=True)
    (folder / f"{setting.name}_audits" / f"{output.name}.json").write_text(json.dumps(told, indent=1))


def _made(name: str, setting: Setting, folder: Path) -> float:
    """Make and audit one run in processes that are forked, so that each begins with the imports of this one."""
    began, context = time.perf_counter(), multiprocessing.get_context("fork")
    works = [make, audited] if PLANTS[name].recipe_in(setting) == "held_near" else [make]
    for work in works:
        process = context.Process(target=_logged, args=(work, name, setting, folder))
        process.start()
        process.join(3600)
        if process.is_alive():
            process.kill()
    output = folder / setting.name / numbers(setting.name)[name]
    for path in output.iterdir() if output.is_dir() else ():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return time.perf_counter() - began


def _logged(work: Any, name: str, setting: Setting, folder: Path) -> None:
    log = (folder / "logs" / f"{setting.name}_{name}_{work.__name__}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    work(name, setting, folder)


def make_all(names: Sequence[str], setting: Setting, folder: Path, jobs: int) -> None:
    """Make runs, several at a time; the models that they begin with come first."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    import torch

    from skyrl_train.runs import load_data, plan_sft
    from skyrl_train.runs.checks import audit

    torch.set_num_threads(1)
    assert None not in (audit, load_data, plan_sft)  # what runs are made of is imported once, before the forks
    for recipe in {PLANTS[name].recipe_in(setting) for name in names} & set(_ALIKE):
        _LOADED[recipe, setting.name] = _loaded(recipe, setting)
    gc.freeze()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        made = {pool.submit(_made, name, setting, folder): name for name in names}
        for each in as_completed(made):
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(
                f"{made[each]}: {each.result():.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU in all", flush=True
            )
    key = {number: name for name, number in numbers(setting.name).items()}
    (folder / f"{setting.name}.json").write_text(json.dumps(key, indent=1))
