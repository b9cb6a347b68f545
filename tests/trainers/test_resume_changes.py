"""What a changed setting does to a run that goes on from a checkpoint: decided by comparing, for settings of every kind."""

from __future__ import annotations

import random
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from skyrl_train.algorithms import KLControllerState
from skyrl_train.config import AnyConfig, Config, SFTConfig
from skyrl_train.config.fields import Range, Resume, SchemaField, fact, strip, walk
from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.registry import absolute_target, code_digests
from skyrl_train.telemetry import RunFolder
from skyrl_train.trainers.checkpoints import settings_of, state
from skyrl_train.trainers.checkpoints.changes import changes_since, flat_config
from skyrl_train.trainers.checkpoints.state import DataFingerprint, Totals, TrainerState, library_versions
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.resume import Start, find_start

DATA = DataFingerprint(num_prompts=96, sha256="ab" * 32)
SHAPES_AND_TOKENS = {
    "model.path",
    "model.tokenizer_path",
    "model.revision",
    "model.freeze",
    "model.lora.rank",
    "model.lora.targets",
    "critic.model.lora.rank",
    "critic.model.lora.targets",
}
"""What no run can begin from a checkpoint with, changed: other tensors, of the weights or of the optimizer's state,
or other meanings of the same token ids."""

GROUPS = 20
"""In which all settings are left out of a checkpoint."""


@dataclass
class Saved:
    """A checkpoint after step 2 of a run in `root`, without weights, which no decision reads."""

    root: Path
    config: AnyConfig

    def __post_init__(self) -> None:
        self.checkpoint = self.write(flat_config(settings_of(self.config)))

    def write(self, recorded: Mapping[str, Any]) -> Path:
        state = TrainerState(
            global_step=2,
            data_position=2,
            weight_version=2,
            kl_controller=KLControllerState(coef=0.0),
            totals=Totals(),
            config=recorded,
            data=DATA,
            versions={**library_versions(), **code_digests(recorded)},
        )
        folder = RunFolder(self.root)
        return CheckpointStore(folder.checkpoints, keep=2).write(2, state.write)

    def start(self, config: AnyConfig, *, root: Path | None = None, data: DataFingerprint = DATA) -> Start:
        """Where a run with `config` starts; in the folder of the checkpoint's run unless given."""
        folder = RunFolder(root or self.root)
        steps = config.trainer.total_steps if isinstance(config, Config) else config.trainer.num_steps
        return find_start(
            config.trainer,
            settings_of(config),
            type(config),
            folder,
            CheckpointStore(folder.checkpoints, keep=2),
            data=data,
            total_steps=steps,
        )

    def forked(self, config: AnyConfig, **changes: Any) -> Start:
        """As `config` starts where the advice of a refusal is followed."""
        trainer = replace(config.trainer, resume_mode="fork", resume_path=str(self.checkpoint))
        return self.start(replace(config, trainer=trainer), root=self.root.parent / "fork", **changes)


def bases() -> list[AnyConfig]:
    """An ordinary run, one with everything that may be absent, and a supervised one; each of 4 steps."""
    plain, sft = Config(), SFTConfig()
    lora = LoraConfig(rank=8)
    full = replace(
        plain,
        model=replace(plain.model, lora=lora),
        critic=replace(plain.critic, model=replace(plain.critic.model, path="policy", lora=lora)),
        generator=replace(plain.generator, backend="vllm"),
        trainer=replace(plain.trainer, docs_per_step=8),
    )
    return [
        *(replace(config, trainer=replace(config.trainer, total_steps=4)) for config in (plain, full)),
        replace(sft, trainer=replace(sft.trainer, num_steps=4)),
    ]


def another(annotation: Any, value: Any, draw: random.Random) -> Any:
    """Another value of the same type, within its range."""
    plain = strip(annotation)
    if get_origin(plain) is Literal:
        return draw.choice([choice for choice in get_args(plain) if choice != value])
    if value is None and get_origin(plain) in (Union, types.UnionType):  # a part, by its name or with arguments
        return f"other_{draw.randrange(9)}"
    if value is None and get_origin(plain) is Mapping:
        value = {}
    if value is None:
        return True if plain is bool else another(plain, 1 if plain is int else plain(), draw)
    if isinstance(value, Mapping):
        return {**value, "added": draw.randrange(9)}
    if plain is bool:
        return not value
    if plain in (int, float):
        rule = fact(annotation, Range) or Range()
        low = value - 10 if rule.min is None else rule.min
        high = value + 10 if rule.max is None else rule.max
        drawn = [draw.randint(int(low), int(high)) if plain is int else draw.uniform(low, high) for _ in range(50)]
        return next(each for each in drawn if each != value and rule.holds(each))
    if isinstance(value, tuple):
        return tuple(another(type(item), item, draw) for item in value) or (another(get_args(plain)[0], 0.5, draw),)
    return f"{value}_{draw.randrange(9)}"


def changed(config: AnyConfig, field: SchemaField, draw: random.Random) -> AnyConfig:
    """`config` with another value of that one setting."""

    def put(section: Any, names: list[str]) -> Any:
        name, rest = names[0], names[1:]
        value = getattr(section, name)
        return replace(section, **{name: put(value, rest) if rest else another(field.annotation, value, draw)})

    result: AnyConfig = put(config, field.path.split("."))
    return result


def settings(config: AnyConfig) -> list[SchemaField]:
    read = {"trainer.resume_mode", "trainer.resume_path"}  # which the test itself sets
    return [field for field in walk(type(config)) if not field.section and field.path not in read]


def outcome(start: Callable[[AnyConfig], Start], config: AnyConfig) -> Start | ConfigError:
    """Where the run starts, or why it does not."""
    try:
        return start(config)
    except ConfigError as error:
        return error


def differing(one: AnyConfig, other: AnyConfig) -> set[str]:
    """Names of the settings that differ."""
    old, new = flat_config(settings_of(one)), flat_config(settings_of(other))
    return {name for name in {*old, *new} if old.get(name, "not there") != new.get(name, "not there")}


def cases() -> list[tuple[int, SchemaField, int]]:
    draw = random.Random(14)
    every = [(base, field) for base, config in enumerate(bases()) for field in settings(config)]
    return [(base, field, draw.randrange(10**6)) for base, field in draw.sample(every, 200)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    return [Saved(tmp_path_factory.mktemp(f"run{base}") / "run", config) for base, config in enumerate(bases())]


@pytest.mark.slow
def test_200_random_changes_resume_or_fork_or_could_not_work(saved: list[Saved]) -> None:
    outcomes: dict[str, set[str]] = {"resumes": set(), "forks": set(), "refused": set()}
    for base, field, seed in cases():
        of_run = saved[base]
        config = changed(of_run.config, field, random.Random(seed))
        resumed = outcome(of_run.start, config)
        if isinstance(resumed, Start):
            outcomes["resumes"].add(field.path)
            continue
        named = {violation.field for violation in resumed.violations}
        assert named
        assert named <= differing(of_run.config, config)
        forked = outcome(of_run.forked, config)
        if isinstance(forked, Start):
            outcomes["forks"].add(field.path)
            advice = f"trainer.resume_mode=fork trainer.resume_path={of_run.checkpoint} and another output_dir=..."
            assert all(advice in violation.remedy for violation in resumed.violations)
            assert all(any(note.startswith(f"{name} was ") for note in forked.notes) for name in named)
        else:
            outcomes["refused"].add(field.path)
            assert re.search("shapes of its tensors|must be more than the 2 steps that are done", str(forked))
    assert outcomes["refused"] <= SHAPES_AND_TOKENS | {"trainer.total_steps", "trainer.num_steps"}
    assert min(len(outcomes["resumes"]), len(outcomes["forks"])) > 40


@pytest.mark.parametrize(
    "path",
    [
        "generator.http.url",
        "generator.vllm.num_engines",
        "generator.vllm.tensor_parallel_size",
        "generator.vllm.gpu_memory_utilization",
        "generator.vllm.max_num_seqs",
        "generator.vllm.max_restarts",
        "generator.weight_transport",
        "generator.merge_stepwise",
        "generator.verify_weight_sync",
        "generator.request_timeout_s",
        "trainer.memory_budget_gb",
        "trainer.memory_margin",
        "trainer.max_positions",
        "trainer.memory_retries",
        "model.compile",
        "placement.call_timeout_s",
        "placement.colocate_all",
        "placement.ray_address",
    ],
)
def test_what_only_moves_work_may_change(saved: list[Saved], path: str) -> None:
    for of_run in saved[:2]:
        (field,) = (field for field in settings(of_run.config) if field.path == path)
        start = of_run.start(changed(of_run.config, field, random.Random(0)))
        assert start.global_step == 2


def test_engines_of_vllm_may_move_behind_a_server_and_back_but_another_sampler_forks(saved: list[Saved]) -> None:
    of_run = saved[1]

    def with_backend(name: str) -> AnyConfig:
        return replace(of_run.config, generator=replace(of_run.config.generator, backend=name))

    note = "generator.backend was vllm and is http: the same training up to rounding"
    assert note in of_run.start(with_backend("http")).notes
    with pytest.raises(ConfigError, match=r"generator\.backend.*resume_mode=fork"):
        of_run.start(with_backend("hf"))


def test_shapes_of_what_the_checkpoint_does_not_hold_are_free_to_choose(saved: list[Saved]) -> None:
    plain, full = saved[0], saved[1]
    lora = LoraConfig(targets=("q_proj",))
    assert plain.start(replace(plain.config, model=replace(plain.config.model, lora=lora))).global_step == 2
    critic = full.config.critic
    begun = plain.forked(replace(plain.config, critic=critic))
    assert begun.fresh_models == {"critic"}
    rank = replace(critic, model=replace(critic.model, lora=LoraConfig(rank=4)))
    with pytest.raises(ConfigError, match=r"critic\.model\.lora\.rank.*shapes"):
        full.forked(replace(full.config, critic=rank))


@pytest.mark.parametrize("base", [0, 1, 2])
def test_a_checkpoint_of_before_a_setting_existed_had_its_default(base: int) -> None:
    config = bases()[base]
    flat, default = flat_config(settings_of(config)), flat_config(settings_of(type(config)()))
    paths = [field.path for field in settings(config)]
    # Each once, several at a time: to compare two whole configurations takes a hundredth of a second. Neighbours stay.
    for first in range(GROUPS):
        younger = set(paths[first::GROUPS])
        recorded = {name: value for name, value in flat.items() if name not in younger}
        expected = sorted(path for path in younger if flat.get(path) != default.get(path))
        assert [change.setting for change in changes_since(recorded, flat, type(config))] == expected


def test_a_setting_that_is_gone_forks(tmp_path: Path) -> None:
    config = bases()[0]
    of_run = Saved(tmp_path / "run", config)
    of_run.checkpoint = of_run.write({**flat_config(settings_of(config)), "trainer.forgotten": 3})
    with pytest.raises(ConfigError, match=r"trainer\.forgotten: is a setting no more; it was 3 when") as refused:
        of_run.start(config)
    (violation,) = refused.value.violations
    assert "resume_mode=fork" in violation.remedy
    assert "Set trainer.forgotten" not in violation.remedy, "nobody can: there is no such setting"
    assert "trainer.forgotten was 3 and is not set" in of_run.forked(config).notes


def test_an_entry_of_a_mapping_that_was_not_there_is_to_be_dropped(saved: list[Saved]) -> None:
    of_run = saved[0]
    data = replace(of_run.config.data, template_kwargs={"seed": 3})
    with pytest.raises(ConfigError, match=r"template_kwargs\.seed.*Drop data\.template_kwargs\.seed, or"):
        of_run.start(replace(of_run.config, data=data))


def test_a_part_with_arguments_is_one_setting(saved: list[Saved]) -> None:
    of_run = saved[0]
    trainer = of_run.config.trainer
    algorithm = replace(trainer.algorithm, policy_loss={"_target_": "my_code:loss", "tau": 0.3})
    config = replace(of_run.config, trainer=replace(trainer, algorithm=algorithm))
    with pytest.raises(
        ConfigError, match=r"got \{_target_:my_code:loss,tau:0.3\}\. Set .*policy_loss=regular, or"
    ) as refused:
        of_run.start(config)
    assert [violation.field for violation in refused.value.violations] == ["trainer.algorithm.policy_loss"]


@pytest.mark.parametrize(
    ("position", "batch_size", "prompts", "expected"),
    [
        (2, 32, 96, 2),
        (2, 16, 96, 4),  # 64 prompts of the first epoch
        (4, 16, 96, 8),  # an epoch of 3 batches, which is one of 6, and 32 prompts
        (2, 48, 96, 1),  # 64 prompts are one batch and a part
        (2, 32, 95, 0),  # other prompts begin with their first
    ],
)
def test_a_fork_goes_on_where_the_data_were(
    tmp_path: Path, position: int, batch_size: int, prompts: int, expected: int
) -> None:
    of_run = Saved(tmp_path / "run", bases()[0])
    state = replace(TrainerState.read(of_run.checkpoint), global_step=3, weight_version=3, data_position=position)
    of_run.checkpoint = CheckpointStore(RunFolder(of_run.root).checkpoints, keep=2).write(3, state.write)
    config = replace(of_run.config, trainer=replace(of_run.config.trainer, train_batch_size=batch_size))
    start = of_run.forked(config, data=replace(DATA, num_prompts=prompts))
    assert start.state is not None
    assert start.state.data_position == expected


def test_other_prompts_are_refused_with_the_versions_that_may_have_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bases()[0]
    monkeypatch.setattr(state, "_version", lambda name: "0.1.24" if name == "reasoning-gym" else "1")
    saved = Saved(tmp_path, config)
    monkeypatch.setattr(state, "_version", lambda name: "0.1.25" if name == "reasoning-gym" else "1")
    with pytest.raises(
        CheckpointError, match=r"the training prompts changed.*\(reasoning-gym was 0.1.24 and is 0.1.25\)"
    ):
        saved.start(config, data=replace(DATA, sha256="b" * 64))


def test_code_in_a_file_that_was_changed_is_told_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "my_code.py"
    file.write_text("def score(completion):\n    return 1.0\n")
    config = bases()[0]
    assert isinstance(config, Config)
    reward = absolute_target(f"{file}:score")
    config = replace(config, environment=replace(config.environment, reward=reward))
    of_run = Saved(tmp_path / "run", config)
    assert [note for note in of_run.start(config).notes if "my_code" in note] == []
    file.write_text("def score(completion):\n    return 2.0\n")
    assert absolute_target(f"{file}:score") == reward, "the command line of the run that goes on is read"
    (note,) = [note for note in of_run.start(config).notes if "my_code" in note]
    assert note.startswith(f"{file} was changed (SHA-256 ")
    assert note.endswith("now): the run goes on with the code as it is")
    assert any(note.startswith(f"{file} was changed") for note in of_run.forked(config).notes)


@pytest.mark.parametrize(
    ("setting", "value", "of_kind"),
    [
        ("generator.seeds", "engine", {"generator.backend": "vllm"}),
        ("trainer.algorithm.off_policy.weight_high", 3.0, {"trainer.algorithm.off_policy.weight": "token"}),
        ("trainer.algorithm.filters.resample_power", 3.0, {"trainer.algorithm.filters.resample": "pow"}),
        ("trainer.in_flight_cache", "keep", {"trainer.in_flight_updates": True, "trainer.max_staleness": 1}),
        ("trainer.policy.optimizer.eps", 1e-4, {"trainer.policy.optimizer.name": "adamw"}),
    ],
)
def test_what_the_chosen_kind_does_not_read_is_no_difference(
    setting: str, value: object, of_kind: dict[str, object]
) -> None:
    other = {**flat_config(settings_of(Config())), "trainer.policy.optimizer.name": "sgd"}
    for settings, meaning in ((other, Resume.FREE), ({**other, **of_kind}, Resume.FORKS)):
        (change,) = changes_since(settings, {**settings, setting: value}, Config)
        assert change.resume is meaning


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ({"at": "<redacted>"}, {"at": "plain-words-77"}, True),
        ({"at": "plain-words-77"}, {"at": "http://<redacted>"}, False),
        ({"at": "http://x/<redacted>/y", "n": 1}, {"at": "http://x/a/y", "n": 1}, True),
        ({"at": "<redacted>", "n": 1}, {"at": "plain", "m": "more", "n": 1}, False),
        ({"at": "<redacted>"}, {}, False),
    ],
)
def test_what_one_process_takes_for_a_secret_and_another_does_not_is_no_change(
    was: dict[str, object], now: dict[str, object], is_same: bool
) -> None:
    config = Config()
    before, after = (
        flat_config(
            settings_of(
                replace(config, environment=replace(config.environment, env_class={"_target_": "my:Env", **each}))
            )
        )
        for each in (was, now)
    )
    assert (changes_since(before, after, Config) == []) == is_same
