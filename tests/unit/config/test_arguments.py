"""Arguments of built-in parts: declared at their functions, checked without importing them; and settings of before."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.door import EARLIER, for_hydra, load_config, read_root
from skyrl_train.config.fields import parts_of, remedy_for_unknown
from skyrl_train.config.rules import validate_config
from skyrl_train.parts import ADVANTAGE_ESTIMATORS, CRITIC_LOSSES, POLICY_LOSSES
from skyrl_train.registry import Seam, import_attr, split_spec
from skyrl_train.runs.cli import conf_dir
from skyrl_train.trainers.checkpoints import changes_since, flat_config, settings_of

SEAMS = [ADVANTAGE_ESTIMATORS, POLICY_LOSSES, CRITIC_LOSSES]
PARTS = [pytest.param(seam, name, id=name) for seam in SEAMS for name in seam]
SAPO = {"_target_": "sapo", "tau_pos": 2.0}


def loaded(**algorithm: Any) -> Any:
    return read_root({"trainer": {"algorithm": algorithm}}, Config)


def with_algorithm(**algorithm: Any) -> Config:
    return Config(trainer=TrainerConfig(algorithm=AlgorithmConfig(**algorithm)))


def told(config: Config) -> list[str]:
    return [str(violation) for violation in validate_config(config)]


@pytest.mark.parametrize(("seam", "name"), PARTS)
def test_what_is_read_from_the_source_is_what_the_function_takes(seam: Seam, name: str) -> None:
    function = import_attr(seam.builtins[name].target, field="")
    assert callable(function)
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    expected = {one.name: (hints[one.name], one.default) for one in parameters if one.kind is one.KEYWORD_ONLY}
    declared = seam.arguments(name)
    assert {key: (argument.annotation, argument.default) for key, argument in declared.items()} == expected
    assert all(argument.meaning.endswith(".") for argument in declared.values())
    assert [one.name.lstrip("_") for one in parameters if one.kind is not one.KEYWORD_ONLY] == ["inputs", "config"]


def test_losses_declare_what_they_read_as_custom_ones_do() -> None:
    for name, builtin in POLICY_LOSSES.builtins.items():
        assert import_attr(builtin.target, field="").reads == builtin.reads, name  # type: ignore[attr-defined]


def test_a_refusal_of_an_argument_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from skyrl_train.config.rules import validate_config\n"
        "from skyrl_train.config.door import load_config\n"
        "spec = {'_target_': 'sapo', 'tau_pos': -1, 'tau': 1}\n"
        "found = validate_config(load_config({'trainer': {'algorithm': {'policy_loss': spec}}}))\n"
        "assert len(found) == 2, found\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("spec", "normal"),
    [
        ("sapo", "sapo"),
        ({"_target_": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}, "sapo"),
        ({"_target_": "sapo", "tau_pos": 1}, "sapo"),
        ({"_target_": "sapo", "tau_pos": 2, "tau_neg": "1e-1"}, {"_target_": "sapo", "tau_pos": 2.0, "tau_neg": 0.1}),
        ({"_target_": "skyrl_train.algorithms.losses.weighted.sapo", "tau_pos": 2}, SAPO),
        ({"_target_": "sapo", "tau_pos": True}, {"_target_": "sapo", "tau_pos": True}),
        ({"_target_": "my.loss", "tau": 1}, {"_target_": "my.loss", "tau": 1}),
    ],
)
def test_a_part_is_kept_in_its_shortest_form_with_arguments_of_their_types(spec: Any, normal: Any) -> None:
    assert loaded(policy_loss=spec).config.trainer.algorithm.policy_loss == normal


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (
            {"_target_": "sapo", "tau_pos": 0, "tau_neg": "high"},
            {
                "tau_pos: must be greater than 0; got 0.0. Try trainer.algorithm.policy_loss.tau_pos=1.0",
                "tau_neg: must be a number; got 'high'. Try trainer.algorithm.policy_loss.tau_neg=1.05",
            },
        ),
        ({"_target_": "sapo", "tau": 1}, {"tau: is no argument of sapo, which takes tau_pos, tau_neg; got 1"}),
        (
            {"_target_": "gspo", "tau_pos": 1},
            {"tau_pos: is no argument of gspo, which takes none; got 1. It is one of"},
        ),
        ({"_target_": "clip_cov", "low": 9}, {"low: must not be above high=5; got 9.0. Try"}),
        ({"_target_": "clip_cov", "low": 9, "high": "x"}, {"high: must be a number; got 'x'"}),
        (
            {"_target_": "dppo", "divergence": "tvd"},
            {"divergence: must be one of tv, kl; got 'tvd'. Did you mean 'tv'?"},
        ),
    ],
)
def test_what_is_wrong_with_arguments_is_told_at_once(spec: Any, fields: set[str]) -> None:
    found = [each.removeprefix("trainer.algorithm.policy_loss.") for each in told(loaded(policy_loss=spec).config)]
    assert len(found) == len(fields)
    assert all(any(each.startswith(field) for each in found) for field in fields), found


@pytest.mark.parametrize("seam", SEAMS)
def test_the_default_of_a_setting_of_before_is_that_of_the_argument(seam: Seam) -> None:
    """So that a run whose record names it goes on where a command line does not."""
    of_seam = {seam.setting: list(seam.builtins)}
    for setting, names in of_seam.items():
        for name in names:
            by_name = flat_config(settings_of(with_algorithm(**{setting.rpartition(".")[2]: name})))
            assert {key.rpartition(".")[2] for key in by_name if key.startswith(f"{setting}.")} == (
                {"_target_", *seam.arguments(name)} if seam.arguments(name) else set()
            )


def test_settings_of_before_are_given_to_the_part_that_is_chosen() -> None:
    found = loaded(policy_loss="sapo", sapo_tau_pos=2, sapo_tau_neg=1.05, advantage_estimator="gae", gae_lambda=0.5)
    assert found.violations == ()
    algorithm = found.config.trainer.algorithm
    assert algorithm.policy_loss == SAPO
    assert algorithm.advantage_estimator == {"_target_": "gae", "gae_lambda": 0.5}
    assert list(found.notes) == [
        "trainer.algorithm.gae_lambda is an argument of gae now: write "
        "trainer.algorithm.advantage_estimator={_target_: gae, gae_lambda: 0.5}",
        "trainer.algorithm.sapo_tau_pos, trainer.algorithm.sapo_tau_neg are arguments of sapo now: write "
        "trainer.algorithm.policy_loss={_target_: sapo, tau_pos: 2, tau_neg: 1.05}",
    ]


def test_a_setting_of_before_wins_over_what_a_preset_says() -> None:
    spec = {"_target_": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}
    assert loaded(policy_loss=spec, sapo_tau_pos=2.0).config.trainer.algorithm.policy_loss == SAPO


def test_a_setting_of_before_that_the_chosen_part_lacks_is_dropped_at_its_default_and_else_refused() -> None:
    found = loaded(policy_loss="vespo", sapo_tau_pos=1.0, sapo_tau_neg=2.0, clip_ratio_c=3)
    assert found.notes == ()
    (violation,) = found.violations
    assert str(violation) == (
        "trainer.algorithm.sapo_tau_neg: is for policy_loss=sapo; it is vespo; got 2.0. Drop it, or write "
        "trainer.algorithm.policy_loss={_target_: sapo, tau_neg: 2.0}"
    )


def test_every_setting_of_before_at_its_default_changes_nothing() -> None:
    """As configurations recorded them, whatever the run read."""
    recorded = {
        "gae_lambda": 1.0, "clip_ratio_c": 3.0, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "clip_cov_share": 0.0002,
        "clip_cov_low": 1.0, "clip_cov_high": 5.0, "kl_cov_share": 0.002, "kl_cov_coef": 1.0,
        "dppo_divergence": "tv", "dppo_max_ratio": 20.0, "value_clip": 0.2,
    }  # fmt: skip
    assert {f"trainer.algorithm.{name}" for name in recorded} == EARLIER
    for name in POLICY_LOSSES:
        for estimator in ADVANTAGE_ESTIMATORS:
            found = loaded(policy_loss=name, advantage_estimator=estimator, **recorded)
            assert found.violations == ()
            assert found.config == loaded(policy_loss=name, advantage_estimator=estimator).config


def test_a_checkpoint_of_before_compares_with_the_same_run_of_now() -> None:
    now = with_algorithm(policy_loss=SAPO, advantage_estimator={"_target_": "gae", "gae_lambda": 0.95})
    flat = {name: value for name, value in flat_config(settings_of(now)).items() if "policy_loss" not in name}
    flat = {
        name: value for name, value in flat.items() if "advantage_estimator" not in name and "critic_loss" not in name
    }
    before = {
        **flat,
        "trainer.algorithm.policy_loss": "sapo",
        "trainer.algorithm.sapo_tau_pos": 2.0,
        "trainer.algorithm.sapo_tau_neg": 1.05,
        "trainer.algorithm.vespo_k_pos": 7.0,  # which nothing read
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.gae_lambda": 0.95,
        "trainer.algorithm.critic_loss": "clipped",
        "trainer.algorithm.value_clip": 0.2,
    }
    assert changes_since(before, flat_config(settings_of(now)), Config) == []
    (change,) = changes_since({**before, "trainer.algorithm.sapo_tau_pos": 1.0}, flat_config(settings_of(now)), Config)
    assert change.line() == "trainer.algorithm.policy_loss was sapo and is {_target_:sapo,tau_pos:2.0}"
    assert change.resume.value == "forks"


def own_estimator(inputs: Any, config: Any, *, scale: float = 1.0) -> None:
    """A custom one, which takes the place of a preset's in a file, where Hydra merges the two mappings."""


def takes_lambda(inputs: Any, config: Any, *, gae_lambda: float = 0.5) -> None:
    """A custom one with an argument that a built-in one has, too."""


def test_what_a_preset_says_of_the_part_that_is_replaced_is_left_out() -> None:
    own = {"_target_": "test_arguments:own_estimator", "gae_lambda": 0.95, "scale": 2.0}
    found = loaded(advantage_estimator=own).config.trainer.algorithm.advantage_estimator
    assert found == {"_target_": "test_arguments:own_estimator", "scale": 2.0}
    typed = {**own, "gae_lambda": 0.9}
    (violation,) = ADVANTAGE_ESTIMATORS.violations(typed)
    assert str(violation).startswith(
        "trainer.algorithm.advantage_estimator.gae_lambda: is no argument of test_arguments:own_estimator, which takes "
        "scale; got 0.9. It is one of gae: drop it"
    )
    taken = {"_target_": "test_arguments:takes_lambda", "gae_lambda": 0.95}
    assert ADVANTAGE_ESTIMATORS.normal(taken) == taken


def test_a_setting_of_before_that_a_preset_stated_is_dropped_for_another_part() -> None:
    """As `algorithm=ppo` with another estimator had it."""
    assert loaded(advantage_estimator="rloo", gae_lambda=0.95).violations == ()


@pytest.mark.parametrize("file", sorted((conf_dir() / "algorithm").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_preset_states_arguments_that_are_left_out_beside_another_part(file: Path) -> None:
    content = OmegaConf.load(file)
    for seam in SEAMS:
        setting = seam.setting.rpartition(".")[2]
        spec = OmegaConf.select(content, seam.setting) or OmegaConf.select(content, setting)
        if isinstance(spec, DictConfig):
            name, arguments = split_spec(dict(spec))  # type: ignore[arg-type]
            for key, value in arguments.items():
                declared = seam.arguments(name)[key]
                assert declared.is_default(value) or declared.is_preset(value), key


def test_a_record_names_every_argument() -> None:
    flat = flat_config(settings_of(with_algorithm(policy_loss=SAPO)))
    assert flat["trainer.algorithm.policy_loss.tau_neg"] == 1.05
    assert flat["trainer.algorithm.critic_loss.value_clip"] == 0.2
    assert flat["trainer.algorithm.advantage_estimator"] == "grpo"


def test_a_class_on_resume_that_an_argument_states_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_train.config.fields import Resume
    from skyrl_train.declarations import Argument

    free = Argument(annotation=Annotated[float, Resume.FREE], default=1.0, meaning="")
    monkeypatch.setattr(Seam, "arguments", lambda *_: {"tau_pos": free})
    one, other = (with_algorithm(policy_loss={"_target_": "sapo", "tau_pos": tau}) for tau in (2.0, 3.0))
    (change,) = changes_since(flat_config(settings_of(one)), flat_config(settings_of(other)), Config)
    assert change.resume is Resume.FREE


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("tau_pos", "write trainer.algorithm.policy_loss={_target_:sapo,tau_pos:VALUE}"),
        ("sapo_tau_po", "write trainer.algorithm.policy_loss={_target_:sapo,tau_pos:VALUE}"),
        ("gae_lamda", "write trainer.algorithm.advantage_estimator={_target_:gae,gae_lambda:VALUE}"),
        ("gama", "did you mean trainer.algorithm.gamma?"),
    ],
)
def test_an_argument_beside_its_part_is_told_where_it_belongs(written: str, remedy: str) -> None:
    assert remedy_for_unknown(f"trainer.algorithm.{written}", Config) == remedy


def test_a_command_line_is_written_so_that_hydra_takes_it() -> None:
    part = "trainer.algorithm.policy_loss={_target_: sapo, tau_pos: 2}"
    given = ["algorithm=ppo", "trainer.algorithm.value_clip=0.1", part, "trainer.algorithm.policy_loss.tau_pos=3"]
    assert for_hydra(given) == [
        "algorithm=ppo",
        "++trainer.algorithm.value_clip=0.1",
        "trainer.algorithm.policy_loss=null",
        part,
        "trainer.algorithm.policy_loss.tau_pos=3",
    ]


def test_a_setting_that_chooses_such_a_part_is_known() -> None:
    assert {path for path, seam in parts_of(Config).items() if seam.declares_arguments} == {
        seam.setting for seam in SEAMS
    }


def test_a_run_with_arguments_is_computed_with_them() -> None:
    config = load_config({"trainer": {"algorithm": {"policy_loss": {"_target_": "sapo", "tau_pos": 2}}}})
    loss = POLICY_LOSSES.resolve(config.trainer.algorithm.policy_loss)
    assert loss.keywords == {"tau_pos": 2.0}
    assert replace(config).trainer.algorithm.policy_loss == SAPO
