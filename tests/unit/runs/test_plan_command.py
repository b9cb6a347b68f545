"""`python -m skyrl_train.plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from skyrl_train.errors import ModelError
from skyrl_train.runs.planning import count_parameters, main
from tests.support.tool_cases import ADD, model_with_tools

EXPERIMENT = ("+experiment=gsm8k_multiturn", "platform=cpu", "plan.rates=none")


def test_the_plan_of_the_quickstart_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT) == 0
    printed = capsys.readouterr().out
    assert "samples per optimizer step  128" in printed
    assert "Learning rate" in printed
    assert "Kept and moved" in printed
    assert "generator.eval_sampling" not in printed


def test_a_plan_composes_its_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[list[str]] = []
    load = ConfigLoaderImpl.load_configuration

    def counted(self: ConfigLoaderImpl, config_name: str, overrides: list[str], *others: Any, **named: Any) -> Any:
        composed.append(overrides)
        return load(self, config_name, overrides, *others, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    assert main(EXPERIMENT) == 0
    assert composed == [list(EXPERIMENT)]


def test_a_plan_says_where_evaluation_samples_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*EXPERIMENT, "generator.eval_sampling.max_generate_length=16")) == 0
    assert "generator.eval_sampling: evaluation samples with max_generate_length=16 (training: 64); " in (
        capsys.readouterr().out
    )


def test_json_is_for_scripts_and_shows_all_violations(capsys: pytest.CaptureFixture[str]) -> None:
    status = main((*EXPERIMENT, "trainer.train_batch_size=30", "generator.max_context_length=8", "--format", "json"))
    report = json.loads(capsys.readouterr().out)
    assert status == 2
    fields = {violation["field"] for violation in report["violations"]}
    assert {"trainer.policy_mini_batch_size", "generator.sampling.max_generate_length"} <= fields


def test_a_plan_for_data_that_is_elsewhere_says_what_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    main((*EXPERIMENT, "data.train=[/nowhere/train.parquet]", "trainer.total_steps=3", "environment=by_row"))
    assert "plan.num_train_prompts=N states how many" in capsys.readouterr().out


@pytest.mark.slow
def test_the_plan_of_agents_has_a_row_for_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*EXPERIMENT, "generator=agent", "generator.agent_loop.run=json:dumps")) == 0
    assert "1 to 20 turns" in capsys.readouterr().out
    assert main((*EXPERIMENT, "generator=agent")) == 2
    assert "needs one of run (a function), command (a list of words) and url" in capsys.readouterr().out


@pytest.mark.slow
def test_tools_that_the_chat_template_ignores_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = (*EXPERIMENT, f"environment.tools=[{ADD}]")
    assert main(tools) == 2
    printed = capsys.readouterr().out
    assert "environment.tools: cannot be shown to the model: its chat template ignores tools; got add." in printed
    mixed = (*EXPERIMENT, f"data.mix=[{{train: builtin:word_problems/train, environment: {{tools: [{ADD}]}}}}]")
    assert main(mixed) == 2
    assert "its chat template ignores tools" in capsys.readouterr().out
    shows = (*tools, f"model.path={model_with_tools(tmp_path / 'model')}")
    assert main(shows) == 0
    assert main((*shows, "environment.tool_format=vllm:hermes")) == 0  # of vLLM, which need not be here
    capsys.readouterr()
    assert main((*shows, "environment.tool_format=hermse")) == 2
    assert "1 problem" in (printed := capsys.readouterr().out)
    assert "Did you mean 'hermes'?" in printed
    assert main((*EXPERIMENT, "environment.tools=[no_module:add]")) == 2
    assert "1 problem" in capsys.readouterr().out


@pytest.mark.slow
def test_a_special_token_without_an_embedding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    model_with_tools(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = next(each for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>")
    end["id"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for arguments in ([f"model.path={folder}"], [f"model.tokenizer_path={folder}"]):
        assert main((*EXPERIMENT, *arguments)) == 2
        assert f"the tokenizer at '{folder}': eos_token_id is 5000, and the embedding of" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 492}))
    assert main((*EXPERIMENT, f"model.path={folder}")) == 2
    assert f"{folder / 'config.json'}: bos_token_id is 492, and the embedding of" in capsys.readouterr().err


def test_a_plan_says_that_data_of_ones_own_is_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n' * 64)
    own = (*EXPERIMENT, "environment=word_problems", f"data.train={tmp_path / 'own.jsonl'}")
    assert main(own) == 0
    assert "data.validation: no held-out rows: data.train is data of your own" in capsys.readouterr().out
    assert main((*own, "data.validation=[]")) == 0
    assert main(EXPERIMENT) == 0
    assert "no held-out rows" not in capsys.readouterr().out


def test_recorded_rollouts_give_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "uid": "a",
        "global_step": 1,
        "turns": [{"prompt_token_ids": [1] * 40, "response_token_ids": [2] * 10, "reward": 1.0}],
    }
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(record) + "\n")
    assert main((*EXPERIMENT, f"plan.lengths={file}", "--format", "json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lengths_source"] == str(file)
    training = report["estimates"][0]
    assert training["num_tokens"] == training["num_rows"] * 50


def test_parameters_are_counted_from_the_files_headers() -> None:
    assert count_parameters("builtin:tiny_qwen2") == pytest.approx(1e6, rel=0.1)
    assert count_parameters("Qwen/Qwen2.5-1.5B-Instruct") is None


MEMORY = (*EXPERIMENT, "plan.device_memory_gb=80", "plan.architecture=Qwen2.5-7B", "model.dtype=bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [EXPERIMENT, MEMORY])
def test_neither_torch_nor_ray_is_imported_for_a_model_that_was_planned_before(arguments: tuple[str, ...]) -> None:
    if arguments == MEMORY:
        main(arguments)
    code = (
        "import sys\nfrom skyrl_train.runs.planning import main\n"
        f"main({list(arguments)!r})\n"
        "sys.exit(3 if {'torch', 'ray', 'transformers'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_memory_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    sharded = ("strategy=fsdp2", "placement=ray", "placement.policy_num_workers=8", "model.gradient_checkpointing=true")
    assert main((*MEMORY, *sharded, "generator.max_context_length=8192")) == 0
    printed = capsys.readouterr().out
    assert "Memory of a device of 80 GB, 4 GB of it left free (predicted)" in printed
    assert "optimizer state 7.62 GB" in printed
    assert "rows of 8,192)" in printed
    assert max(len(line) for line in printed.split("Memory of a device")[1].split("Notes")[0].splitlines()) <= 120


@pytest.mark.slow
def test_a_model_that_is_too_large_for_its_device_is_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*MEMORY, "--format", "json")) == 2
    report = json.loads(capsys.readouterr().out)
    violation = report["violations"][0]
    assert violation["field"] == "generator.max_context_length"
    assert "strategy=fsdp2 over more ranks" in violation["remedy"]
    assert report["memory"]["passes"][0]["budget"] == 0
    assert report["memory"]["passes"][0]["kinds"]["optimizer state"] == 8 * 7_615_616_512


def test_an_unknown_model_says_how_its_sizes_can_be_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*EXPERIMENT, "plan.device_memory_gb=80", "model.path=nobody/nothing")) == 2
    assert "Set plan.architecture to a folder that holds its config.json" in capsys.readouterr().err


def test_memory_that_nobody_asked_for_is_left_out_where_it_cannot_be_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ModelError("policy: its step cannot be traced")

    monkeypatch.setattr("skyrl_train.runs.planning.plan_memory", fails)
    assert main(EXPERIMENT) == 0
    assert "note: Memory is left out. policy: its step cannot be traced" in capsys.readouterr().out
    assert main((*EXPERIMENT, "plan.device_memory_gb=80")) == 2


def test_the_rates_of_a_run_give_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("plan.generated_tokens_per_second=1000", "plan.trained_tokens_per_second=2000")
    assert main((*EXPERIMENT, *rates, "--format", "json")) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert time["step_s"] == pytest.approx(sum(phase["seconds"] for phase in time["phases"]))
    assert time["device_hours"] == pytest.approx(time["step_s"] * time["total_steps"] / 3600)
    assert main((*EXPERIMENT, f"plan.rates={tmp_path}")) == 2
    assert "no metrics.jsonl and plan.json of a run" in capsys.readouterr().err
