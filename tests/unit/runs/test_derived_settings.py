"""`${derived:}` in composed configurations: what moves what, and what a run that goes on reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.derived import Situation
from skyrl_train.config.rules import validate_config
from skyrl_train.runs.cli import resolvers as resolver
from skyrl_train.runs.cli.composition import load_node
from skyrl_train.trainers.checkpoints import flat_config, settings_of
from tests.support.composing import composed

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "usable_cores", lambda: 4)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the config.json of a model of 135 million parameters, and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE), encoding="utf-8")
    return f"model.path={folder}"


def own_task(*more: str, platform: str = "cpu") -> Config:
    task = ["environment.reward=my_code:score", "data.train=questions.jsonl"]
    return load_node(composed(f"platform={platform}", *task, *more), Config)


def sizes(config: Config) -> tuple[int, int, int]:
    trainer = config.trainer
    return trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.critic_mini_batch_size


def test_a_real_model_on_a_cpu_gets_sizes_of_its_own(model: str) -> None:
    config = own_task(model)
    assert validate_config(config) == []
    assert sizes(config) == (8, 4, 4)
    assert (config.trainer.micro_batching, config.trainer.max_tokens_per_microbatch) == ("token_budget", 512)
    assert not config.trainer.background_checkpoints
    assert (config.trainer.policy.optimizer.lr, config.platform.num_threads) == (1e-5, 4)
    assert config.derived == (
        "sizes       8 prompts x 8 samples, mini-batches of 4, lr 1e-05, at most 200 held-out prompts: "
        "for 135M parameters on a CPU; state any to change it",
        "threads     4 of 4 cores: for 135M parameters on a CPU; platform.num_threads states another number",
    )


def test_what_is_stated_wins_and_moves_the_rest(model: str) -> None:
    config = own_task(model, "trainer.train_batch_size=6", "trainer.policy.optimizer.lr=1e-4", "platform.num_threads=1")
    assert sizes(config) == (6, 3, 3)
    assert (config.trainer.policy.optimizer.lr, config.platform.num_threads) == (1e-4, 1)
    assert not any(word in line for line in config.derived for word in ("prompts x", "lr", "threads"))


def test_a_configuration_can_be_resolved_whole_as_resolve_on_the_command_line_does(model: str) -> None:
    node = composed("platform=cpu", model, "output_dir=outputs")
    OmegaConf.resolve(node)
    assert [line.split()[0] for line in node.derived] == ["sizes", "threads"]


def test_the_mini_batch_of_a_smaller_batch_divides_it() -> None:
    assert sizes(own_task("trainer.train_batch_size=8")) == (8, 4, 4)
    assert validate_config(own_task("trainer.train_batch_size=8")) == []


def test_a_long_response_makes_room_in_the_context() -> None:
    config = own_task("generator.sampling.max_generate_length=600")
    assert config.generator.max_context_length == 256 + 2 * 600
    assert validate_config(config) == []


def test_a_stated_size_may_refer_to_one_that_is_derived(model: str) -> None:
    config = own_task(model, "trainer.critic_mini_batch_size=${trainer.policy_mini_batch_size}")
    assert sizes(config) == (8, 4, 4)


def test_a_recipe_keeps_its_numbers_whatever_the_model(model: str) -> None:
    config = load_node(composed("platform=cpu", "+experiment=gsm8k_multiturn", model), Config)
    assert sizes(config) == (32, 16, 16)
    assert config.trainer.policy.optimizer.lr == 5e-5


@pytest.mark.parametrize(
    ("path", "batch"), [("me/Own-135M", 8), ("me/own-0.9m", 32), ("me/unknown", 8), ("Qwen/Qwen2.5-0.5B", 8)]
)
def test_a_model_that_is_not_here_is_sized_by_the_table_or_its_name(path: str, batch: int) -> None:
    assert own_task(f"model.path={path}").trainer.train_batch_size == batch


def test_a_gpu_has_room_for_large_batches() -> None:
    config = own_task(platform="gpu")
    assert sizes(config) == (128, 64, 64)
    assert (config.trainer.micro_batching, config.platform.num_threads) == ("auto", 4)


def test_supervised_training_derives_too(model: str) -> None:
    config = load_node(composed("sft_platform=cpu", model, "data.max_length=1500", root="sft"), SFTConfig)
    assert (config.trainer.batch_size, config.trainer.max_tokens_per_microbatch) == (8, 1500)
    assert (config.trainer.optimizer.lr, config.platform.num_threads) == (1e-4, 4)


def another_rule(stated: Any, situation: Situation) -> dict[str, Any]:
    raise AssertionError("derived again")


@pytest.mark.parametrize("how", ["latest", "from_path", "fork", "fork of a checkpoint"])
def test_a_run_that_goes_on_reads_what_was_recorded(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first = own_task(model, f"output_dir={tmp_path}/run", "trainer.train_batch_size=6")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"config": flat_config(settings_of(first))}), encoding="utf-8"
    )
    monkeypatch.setattr(resolver, "derive", another_rule)
    monkeypatch.setattr(resolver, "usable_cores", lambda: 64)
    place = {"fork of a checkpoint": checkpoint}.get(how, tmp_path / "run")
    mode, folder = how.partition(" ")[0], "run" if how == "latest" else "other"
    more = [] if how == "latest" else [f"trainer.resume_mode={mode}", f"trainer.resume_path={place}"]
    again = own_task(model, f"output_dir={tmp_path}/{folder}", "trainer.train_batch_size=6", *more)
    assert sizes(again) == (6, 3, 3)
    assert again.platform == first.platform
    assert (again.trainer.micro_batching, again.trainer.policy) == ("token_budget", first.trainer.policy)
    if how == "latest":
        assert again == first
    else:
        assert again.derived == (f"sizes       of the run at {place}, where nothing else is stated",)


RATES = {
    "device": "cpu",
    "measured_on": "2026-01-02",
    "linear_flops": 1e12,
    "attention_flops": 5e11,
    "flex_flops": 2.5e11,
    "kernel_s": 1e-6,
    "read_bytes": 1e11,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which rates are kept."""
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rates"


def keep(cache: Path, *, device: str = "cpu", gain: float = 1.0, **changed: float) -> None:
    """What the self-test measured of a device: compiled layers `gain` times as fast in both layouts."""
    updates = [
        {"hidden_size": 512, "layout": layout, "compiled": compiled, "checkpointing": True, "positions": 256,
         "tokens_per_s": 100.0 * (gain if compiled else 1.0)}
        for layout in ("packed", "prefix_shared")
        for compiled in (False, True)
    ]  # fmt: skip
    cache.mkdir(parents=True, exist_ok=True)
    content = {"rates": {**RATES, **changed}, "pieces": [{"piece": "copies"}, *updates]}
    (cache / f"{device}.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_device_that_was_not_measured_has_the_stated_rates(model: str, cache: Path) -> None:
    keep(cache, device="another")
    config = own_task(model)
    assert config.platform.rates is None
    assert config.model.compile is False


def test_what_was_measured_of_the_device_is_recorded_with_the_run(model: str, cache: Path) -> None:
    keep(cache, gain=1.06)
    config = own_task(model)
    assert validate_config(config) == []
    assert config.platform.rates == RATES
    assert config.model.compile is True
    assert flat_config(settings_of(config))["platform.rates.flex_flops"] == 2.5e11
    assert config.derived[-1] == (
        "rates       of cpu, measured on 2026-01-02; compiled layers were faster; platform.rates=null takes the stated ones"
    )
    supervised = load_node(composed("sft_platform=cpu", model, root="sft"), SFTConfig)
    assert (supervised.platform.rates, supervised.model.compile) == (RATES, True)


def test_rates_are_those_of_the_gpu_that_the_driver_names(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, device="NVIDIA-H100")
    monkeypatch.setattr(resolver, "gpu_name", lambda: "NVIDIA H100")
    assert own_task(model, platform="gpu").platform.rates == RATES
    assert own_task(model).platform.rates is None


@pytest.mark.parametrize(
    ("stated", "gain", "compiled"),
    [
        ("model.compile=auto", 1.06, True),
        ("model.compile=auto", 1.04, False),
        ("model.compile=true", 1.0, True),
        ("model.compile=false", 2.0, False),
        ("platform.rates=null", 2.0, False),
        ("model.lora.rank=8", 2.0, False),
        ("trainer.layout=padded", 2.0, False),
        ("trainer.layout=packed", 2.0, True),
    ],
)
def test_layers_are_compiled_where_that_was_measured_to_be_faster(
    model: str, cache: Path, stated: str, gain: float, compiled: bool
) -> None:
    keep(cache, gain=gain)
    assert own_task(model, stated).model.compile is compiled


def test_rates_that_are_no_rates_are_refused(model: str) -> None:
    (found,) = validate_config(own_task(model, "platform.rates={linear_flops: 1e12}"))
    assert found.field == "platform.rates"
    assert "kernel_s" in found.rule


@pytest.mark.parametrize("how", ["latest", "fork"])
def test_a_run_that_goes_on_keeps_the_rates_that_it_began_with(
    tmp_path: Path, model: str, cache: Path, how: str
) -> None:
    more = ["trainer.resume_mode=fork", f"trainer.resume_path={tmp_path}/run"] if how == "fork" else []
    folder = "run" if how == "latest" else "other"

    def record(config: Config) -> None:
        checkpoint = tmp_path / "run" / "checkpoints" / "step_000010"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "trainer_state.json").write_text(
            json.dumps({"config": flat_config(settings_of(config))}), encoding="utf-8"
        )

    stated = own_task(model, f"output_dir={tmp_path}/run")
    keep(cache, gain=1.5)
    measured = own_task(model, f"output_dir={tmp_path}/run")
    record(measured)
    keep(cache, gain=1.0, linear_flops=9e12)
    again = own_task(model, f"output_dir={tmp_path}/{folder}", *more)
    assert (again.platform.rates, again.model.compile) == (RATES, True)
    record(stated)
    again = own_task(model, f"output_dir={tmp_path}/{folder}", *more)
    assert (again.platform.rates, again.model.compile) == (None, False)
    before = {name: value for name, value in flat_config(settings_of(stated)).items() if name != "platform.rates"}
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000010"
    (checkpoint / "trainer_state.json").write_text(json.dumps({"config": before}), encoding="utf-8")
    assert own_task(model, f"output_dir={tmp_path}/{folder}", *more).platform.rates is None, "an older release's run"


def test_a_run_that_begins_anew_derives_anew(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = own_task(model, f"output_dir={tmp_path}")
    checkpoint = tmp_path / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"config": flat_config(settings_of(first))}), encoding="utf-8"
    )
    monkeypatch.setattr(resolver, "usable_cores", lambda: 64)
    assert own_task(model, f"output_dir={tmp_path}").platform.num_threads == 4
    assert own_task(model, f"output_dir={tmp_path}", "trainer.resume_mode=none").platform.num_threads == 64
    (checkpoint / "trainer_state.json").write_text("cut o", encoding="utf-8")
    assert own_task(model, f"output_dir={tmp_path}").platform.num_threads == 64
