"""A plan's traced step takes what the run's own one takes, for models as runs train them, and no weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest

from skyrl_train.config.bundles import Role
from skyrl_train.config.schema import Config, CriticConfig, LoraConfig
from skyrl_train.errors import ModelError
from skyrl_train.memory.meter import CountingMeter
from skyrl_train.memory.predict import Effort, PlannedPasses, planned_passes
from skyrl_train.memory.probe import Prober
from skyrl_train.memory.sizing import hold_everything
from skyrl_train.plan.dry_run import models_of
from tests.learner_cases import critic_of, policy_of, save_tiny_model, settings_of

LONGEST, ROWS = 24, 40
BASE = Config()
CPU = replace(BASE, platform=replace(BASE.platform, name="cpu", device="cpu"))
ALONE = {
    "padded": CPU,
    "checkpointing": replace(CPU, model=replace(CPU.model, gradient_checkpointing=True)),
    "packed adapter in bfloat16": replace(
        CPU,
        model=replace(CPU.model, lora=LoraConfig(rank=4), dtype="bfloat16"),
        trainer=replace(CPU.trainer, layout="packed"),
    ),
}
"""In one process on a CPU, where a run can be measured."""
COUNTED = {
    "sharded over two ranks": replace(
        CPU,
        strategy=replace(CPU.strategy, name="fsdp2"),
        placement=replace(CPU.placement, backend="ray", policy_num_workers=2, critic_num_workers=2),
    ),
    "on an accelerator": replace(CPU, platform=replace(CPU.platform, name="cuda", device="cuda")),
}
"""Elsewhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def bare(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    bare = tmp_path_factory.mktemp("bare")
    copyfile(folder / "config.json", bare / "config.json")
    return bare


def config_at(folder: Path, config: Config) -> Config:
    return replace(
        config,
        model=replace(config.model, path=str(folder)),
        critic=replace(CriticConfig(), model=replace(CriticConfig().model, path="policy")),
        generator=replace(config.generator, max_context_length=LONGEST),
    )


def passes(config: Config, bare: Path, role: Role, source: str) -> PlannedPasses:
    config = config_at(bare, config)
    own = replace(config, trainer=replace(config.trainer, memory_probe=source))  # type: ignore[arg-type]
    settings = settings_of(own, role)
    settings = replace(settings, model=replace(settings.model, path=str(bare)))
    return planned_passes(settings, LONGEST, models_of(own)[role], Effort(how="traced"))


@pytest.mark.parametrize(("name", "role"), [*((name, "policy") for name in ALONE), ("padded", "critic")])
def test_a_plan_traces_what_the_run_takes(folder: Path, bare: Path, name: str, role: Role) -> None:
    config = config_at(folder, ALONE[name])
    learner = critic_of(config) if role == "critic" else policy_of(config)
    meter = CountingMeter(1 << 40)
    hold_everything(learner.engine, meter)
    prober, traced = Prober(learner=learner, meter=meter), passes(config, bare, role, "trace")
    for phase in ("training", "scoring"):
        measured = prober.probe(ROWS, LONGEST, training=phase == "training")
        assert measured is not None
        # buffers and the bias of a value head are not counted
        assert traced.estimate(phase, ROWS).peak_bytes == pytest.approx(measured.peak_bytes, abs=1024), phase  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COUNTED)
def test_what_cannot_be_measured_here_is_traced_as_it_is_counted(bare: Path, name: str) -> None:
    counted, traced = (passes(COUNTED[name], bare, "policy", source) for source in ("measure", "trace"))
    for phase in ("training", "scoring"):
        expected, found = counted.estimate(phase, ROWS), traced.estimate(phase, ROWS)  # type: ignore[arg-type]
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.05), phase


@pytest.mark.slow
def test_the_budget_of_a_traced_step_is_near_the_counted_one(bare: Path) -> None:
    counted, traced = (passes(CPU, bare, "policy", source) for source in ("measure", "both"))
    limit = counted.estimate("training", ROWS).peak_bytes
    expected = counted.token_budget("training", limit)
    assert traced.token_budget("training", limit) == pytest.approx(expected, rel=0.1)


def test_a_search_that_takes_too_long_says_so(bare: Path) -> None:
    traced = passes(CPU, bare, "policy", "trace")
    traced.effort.seconds = 1e6  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"0 sizes were traced in .* Set trainer\.memory_probe=measure"):
        traced.token_budget("scoring", 1 << 30)
