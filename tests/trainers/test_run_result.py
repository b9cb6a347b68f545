"""What a run gives to the sweeper that started it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.config import Config
from skyrl_train.runs import evaluate, train
from skyrl_train.runs.result import swept_metric
from skyrl_train.telemetry import read_metrics


@pytest.mark.slow
def test_a_sweeper_is_given_the_last_value_of_its_metric(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path))
    sizes = {"total_steps": 1, "train_batch_size": 4, "policy_mini_batch_size": 4, "eval_before_train": False}
    config = replace(
        config,
        data=replace(config.data, max_train_prompts=4, max_validation_prompts=32),
        generator=replace(config.generator, n_samples_per_prompt=2),
        trainer=replace(config.trainer, **sizes),  # type: ignore[arg-type]
    )
    result = train(config)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert result is not None
    assert swept_metric(config) == result.evaluations[-1].overall.accuracy == record["eval/accuracy"] > 0.0
    assert swept_metric(replace(config, sweep_metric="eval/reward_mean")) == record["eval/reward_mean"]
    assert train(config) is None  # it has nothing left to do
    assert swept_metric(config) == record["eval/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(("dumps", "also"), [(True, ", {0}/rollouts"), (False, "")])
def test_an_evaluation_says_what_it_has_written(
    dumps: bool, also: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(output_dir=str(tmp_path))
    sampling = replace(config.generator.eval_sampling, max_generate_length=2)
    evaluate(
        replace(
            config,
            data=replace(config.data, max_train_prompts=64, max_validation_prompts=2),
            generator=replace(config.generator, eval_sampling=sampling),
            trainer=replace(config.trainer, dump_rollouts=dumps),
        )
    )
    assert f"written: {tmp_path}/evaluation.json{also.format(tmp_path)}\n" in capsys.readouterr().out
