"""One command line with mistakes of several kinds (names, types, ranges, rules between fields, parts and their arguments,
what is not on this machine): all are told at once, and advice that is typed works."""

from __future__ import annotations

import pytest

from skyrl_train.runs.cli.command_line import preflight


def told(capsys: pytest.CaptureFixture[str], root: str, *arguments: str) -> dict[str, str]:
    with pytest.raises(SystemExit):
        preflight(list(arguments), config_name=root)
    head, *lines = capsys.readouterr().err.strip().splitlines()
    assert head == f"{len(lines)} problem{'s' * (len(lines) != 1)} in the configuration:"
    return {line[4:].partition(": ")[0]: line for line in lines}


@pytest.mark.parametrize(
    ("root", "arguments", "fields"),
    [
        (
            "config",
            ["trainer.train_batch_size=30", "trainer.policy_mini_batch_size=16", "trainer.policy.optimizer.lr=0"],
            ["trainer.policy.optimizer.lr", "trainer.policy_mini_batch_size"],
        ),
        (
            "config",
            ["trainer.train_batch_sise=4", "seed=x", "trainer.algorithm.policy_loss=my_code:nope"],
            ["trainer.train_batch_sise", "seed", "trainer.algorithm.policy_loss"],
        ),
        (
            "config",
            [
                "trainer.algorithm.policy_loss={_target_: regular, tau: 0.3}",
                "trainer.algorithm.gamma=2",
                "generator.n_samples_per_prompt=1",
            ],
            ["trainer.algorithm.gamma", "generator.n_samples_per_prompt", "trainer.algorithm.policy_loss.tau"],
        ),
        (
            "config",
            ["algorithm=ppoo", "trainer.algorithm.gamma=2", "data.train=[/nope.jsonl]"],
            ["algorithm", "trainer.algorithm.gamma", "data.train"],
        ),
        (
            "config",
            ["experiment=gsm8k_multiturn", "model.path=/nowhere/at_all", "trainer.epochs=0"],
            ["experiment", "trainer.epochs", "model.path"],
        ),
        (
            "config",
            ["trainer.callbacks=[no_module:b]", "trainer.metrics=[nope]", "trainer.total_steps=-1", "trainer"],
            ["trainer", "trainer.total_steps", "trainer.metrics[0]", "trainer.callbacks[0]"],
        ),
        (
            "config",
            [
                "environment.env_class.k=3",
                "trainer.layout=packd",
                "data.max_prompt_length=4096",
                "generator.max_context_length=512",
            ],
            ["environment.env_class.k", "trainer.layout", "data.max_prompt_length"],
        ),
        (
            "config",
            ["trainer.policy.optimizer={lr: 0, nme: sgd}", "trainer.resume_mode=from_path"],
            ["trainer.policy.optimizer.nme", "trainer.policy.optimizer.lr", "trainer.resume_path"],
        ),
        (
            "sft",
            ["trainer.batch_sise=4", "trainer.optimizer.lr=-1", "trainer.tokens_per_step=5", "trainer.docs_per_step=5"],
            ["trainer.batch_sise", "trainer.optimizer.lr", "trainer.docs_per_step"],
        ),
        (
            "sft",
            [
                "trainer.optimizer.name={_target_: adamw, momentum: 1}",
                "data.weights=[1,2]",
                "placement.policy_num_workers=3",
            ],
            ["placement.policy_num_workers", "data.weights", "trainer.optimizer.name.momentum"],
        ),
    ],
)
def test_all_are_told(root: str, arguments: list[str], fields: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert list(told(capsys, root, *arguments)) == fields


def test_an_argument_of_a_part_that_is_a_name_is_answered_with_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = told(capsys, "config", "environment.env_class.k=3")["environment.env_class.k"]
    assert line.endswith("Write environment.env_class={_target_: NAME, k: ...}")


def test_keys_of_a_mapping_need_no_plus_sign() -> None:
    preflight(["algorithm=gdpo", "trainer.algorithm.reward_components={correct: 1}"], config_name="config")
    preflight(["algorithm=gdpo", "trainer.algorithm.reward_components.correct=1"], config_name="config")


def test_each_mistake_with_tools_is_one_line_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    def line(*arguments: str) -> str:
        (found,) = told(capsys, "config", *arguments).values()
        return found

    assert "Argument a is missing a type hint" in line("environment.tools=[tests.support.tool_cases:no_hint]")
    assert "docstring" in line("environment.tools=[tests.support.tool_cases:no_docstring]")
    assert "each must have a name of its own" in line(
        "environment.tools=[tests.support.tool_cases:add,tests.support.tool_cases:add]"
    )
    assert "environment.tools[0]" in line("environment.tools=[tests.support.tool_cases:nothing]")
    assert "Did you mean 'hermes'?" in line("environment.tool_format=hermess")
    assert "must be a server that answers" in line("environment.tools=[{_target_: mcp, command: [/no/such/program]}]")
