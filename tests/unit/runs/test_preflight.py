"""What a user sees for a command line with problems, without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.runs.cli.command_line import preflight


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def passes(*arguments: str, rules: bool = True) -> bool:
    preflight(list(arguments), config_name="config", rules=rules)
    return True


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that are printed, after the one that counts them."""
    with pytest.raises(SystemExit) as stop:
        preflight(list(arguments), config_name="config")
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    head, *lines = output.err.splitlines()
    assert head.startswith(f"{len(lines)} problem")
    return [line.removeprefix("  - ") for line in lines]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["+experiment=gsm8k_multiturn"],
        ["+experiment=gsm8k_multiturn", "trainer.total_steps=3", "hydra.run.dir=elsewhere"],
        ["model.path=builtin:tiny_qwen2", "algorithm=dapo", "tracker=[console,wandb]"],
        ["environment.env_class={_target_: gsm8k, difficulty: hard}"],
        ["environment=search", "environment.env_class.topk=5"],
        ["++trainer.total_steps=3"],
        ["~trainer.total_steps"],
        ["-m", "seed=1,2", "trainer.policy.optimizer.lr=1e-4,1e-5"],
        ["--multirun", "seed=range(0,3)", "hydra/launcher=basic"],
        ["-m", "algorithm=grpo,dapo"],
        ["-m", "model=glob(tiny*)"],
        ["run_name='with, comma'"],
        ["run_name=${hydra:job.name}_${seed}"],
        ["output_dir=${hydra:runtime.output_dir}/inner"],
        ["trainer.policy.optimizer={lr:1e-5,name:sgd}"],
        ["data.train=[builtin:word_problems/train]", "data.validation=[]"],
    ],
)
def test_sound_command_lines_pass_silently(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert passes(*arguments)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help", "nonsense=1"],
        ["--hydra-help"],
        ["--version"],
        ["--cfg", "everything"],
        ["--config-path", "elsewhere", "nonsense=1"],
    ],
)
def test_what_hydra_answers_by_itself_is_left_to_it(arguments: list[str]) -> None:
    assert passes(*arguments)


def test_misspelt_keys_wrong_types_and_impossible_values_are_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trainer.train_batch_sise=4", "trainer.train_batch_size=abc", "generator.sampling.temperature=-1"]
    assert problems(capsys, *arguments) == [
        "trainer.train_batch_sise: is not a setting; got '4'. Did you mean trainer.train_batch_size?",
        "generator.sampling.temperature: must be at least 0; got -1. Try generator.sampling.temperature=1.0",
        "trainer.train_batch_size: must be an integer; got 'abc'. Try trainer.train_batch_size=32",
    ]


def test_names_types_rules_and_files_are_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sed=1", "trainer.total_steps=many", "generator.n_samples_per_prompt=1", "data.train=gone.jsonl"]
    arguments.append("environment=word_problems")
    fields = [line.partition(":")[0] for line in problems(capsys, *arguments)]
    assert fields == ["sed", "trainer.total_steps", "generator.n_samples_per_prompt", "data.train"]


@pytest.mark.parametrize("value", ["abc", "-3", "900"])
def test_a_mistake_is_told_once_and_not_of_what_follows_the_setting(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = problems(capsys, f"generator.sampling.max_generate_length={value}", "generator.max_context_length=512")
    assert line.startswith("generator.sampling.max_generate_length: must ")


def test_sizes_that_are_not_positive_and_rules_between_others_are_shown_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = "Try trainer.train_batch_size=32 trainer.policy_mini_batch_size=16 together"
    assert problems(
        capsys,
        "trainer.train_batch_size=0",
        "trainer.policy_mini_batch_size=-3",
        "trainer.policy.optimizer.lr=0",
        "trainer.micro_batching=auto",
        "trainer.memory_budget_gb=1",
        "trainer.docs_per_step=8",
    ) == [
        f"trainer.train_batch_size: must be at least 1; got 0. {both}",
        f"trainer.policy_mini_batch_size: must be at least 1; got -3. {both}",
        "trainer.policy.optimizer.lr: must be greater than 0; got 0. Try trainer.policy.optimizer.lr=1e-06",
        "trainer.docs_per_step: must be 0 with trainer.micro_batching=auto: it closes steps at micro-batches, so that "
        "another device would take other steps; got 8. Set trainer.docs_per_step=0, or trainer.micro_batching=token_budget",
    ]
    stated = ["trainer.train_batch_size=30", "trainer.policy_mini_batch_size=16"]
    lines = problems(capsys, *stated, "trainer.policy.optimizer.lr=0")
    assert [line.partition(":")[0] for line in lines] == [
        "trainer.policy.optimizer.lr",
        "trainer.policy_mini_batch_size",
    ]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("modle=tiny_qwen2", "modle: is not a setting; got 'tiny_qwen2'. Did you mean model=...?"),
        (
            "platform=gpuu",
            "platform: must be one of cpu, gpu; got 'gpuu'. Did you mean platform=gpu?",
        ),
        (
            "experiment=gsm8k_multiturn",
            "experiment: is added with a plus sign; got experiment=gsm8k_multiturn. Write +experiment=gsm8k_multiturn",
        ),
        ("platform.name=gpu", "platform.name: is chosen with the group; got 'gpu'. Write platform=gpu"),
        (
            "generator.max_new_tokens=16",
            "generator.max_new_tokens: is not a setting; got '16'. Did you mean generator.sampling.max_generate_length?"
            " It counts the new tokens of one turn; generator.max_context_length bounds all turns together",
        ),
        (
            "generator.eval_sampling.max_new_tokens=16",
            "generator.eval_sampling.max_new_tokens: is not a setting; got '16'."
            " Did you mean generator.eval_sampling.max_generate_length?",
        ),
        ("trainer.run_dir=runs/1", "trainer.run_dir: is not a setting; got 'runs/1'. Did you mean output_dir?"),
        (
            "learning_rate=1e-5",
            "learning_rate: is not a setting; got '1e-5'. Did you mean trainer.policy.optimizer.lr?",
        ),
        (
            "critic.learning_rate=1e-5",
            "critic.learning_rate: is not a setting; got '1e-5'. Did you mean critic.optimizer.lr?",
        ),
        (
            "num_generations=8",
            "num_generations: is not a setting; got '8'. Did you mean generator.n_samples_per_prompt?",
        ),
        (
            "batch_size=8",
            "batch_size: is not a setting; got '8'. Did you mean trainer.train_batch_size?"
            " It counts prompts: divide a number of samples by generator.n_samples_per_prompt",
        ),
        (
            "trainer.max_steps=3",
            "trainer.max_steps: is not a setting; got '3'. Did you mean trainer.total_steps?"
            " For -1 or null write 0, which derives it from the epochs",
        ),
        (
            "+logging_steps=1",
            "logging_steps: is not a setting; got '1'."
            " Always: every step is a record of metrics.jsonl and of the trackers; drop it",
        ),
        (
            "trainer.algorithm.off_policy.reject=[1]",
            "trainer.algorithm.off_policy.reject: must be a mapping with names as keys; got [1]."
            " Set trainer.algorithm.off_policy.reject={name: value}",
        ),
        (
            "trainer.policy=[1]",
            "trainer.policy: must be a section with settings in it; got [1]. Set trainer.policy.KEY=VALUE instead",
        ),
        (
            "wandb=true",
            "wandb: is not a setting; got 'true'. Write tracker=wandb. More than one: tracker=[console,wandb]",
        ),
        (
            "train_batch_size=8",
            "train_batch_size: is not a setting; got '8'. Did you mean trainer.train_batch_size?",
        ),
        (
            "+trainer.total_stepps=8",
            "trainer.total_stepps: is not a setting; got '8'. Did you mean trainer.total_steps?",
        ),
        (
            "+trainer.total_steps=8",
            "trainer.total_steps: was refused; got '8'. Could not append to config."
            " An item is already at 'trainer.total_steps'."
            " Either remove + prefix: 'trainer.total_steps=8'."
            " Or add a second + to add or override 'trainer.total_steps': '++trainer.total_steps=8'",
        ),
        (
            "environment.kwargs.difficulty=hard",
            "environment.kwargs.difficulty: is not a setting; got 'hard'. Settings of an environment stand beside it: write"
            " environment.env_class={_target_: NAME, difficulty: ...}",
        ),
        (
            "hydra.run.folder=x",
            "hydra.run.folder: was refused; got 'x'. Could not override 'hydra.run.folder'."
            " To append to your config use +hydra.run.folder=x",
        ),
        (
            "hydra.output_subdir=.hydra",
            "hydra.output_subdir: would hold secrets in clear text; got '.hydra'. Drop it: .hydra/ is written in any case,"
            " without secrets",
        ),
        (
            "~hydra.callbacks.redacted_files",
            "hydra.callbacks.redacted_files: must be skyrl_train.runs.cli.hydra_files.RedactedFiles, which keeps secrets out"
            " of files and logs; got None. Drop what changes it; others stand beside it, as hydra.callbacks.NAME",
        ),
        (
            "trainer.total_steps",
            "trainer.total_steps: cannot be read as KEY=VALUE; got 'trainer.total_steps'. Error parsing override"
            " 'trainer.total_steps'. missing EQUAL at '<EOF>'. Quote text that has commas, spaces or brackets:"
            " \"KEY='...'\"",
        ),
        (
            "seed=1,2",
            "seed: has several values; got 1,2. Add -m to run one after the other, or write seed=[1,2] for a list",
        ),
        (
            "run_name=${nowhere}",
            "run_name: could not be worked out; got ${nowhere}. Interpolation key 'nowhere' not found",
        ),
        (
            "environment.env_class=gsm8kk",
            "environment.env_class: must be one of aime, gsm8k, gsm8k_multi_turn, harbor, lcb, reported, search, searchcode,"
            " single_turn, text2sql, word_problems; got 'gsm8kk'. Did you mean 'gsm8k'? Write"
            " package.module:attr for a custom one",
        ),
        (
            "model.path=builtin:tiny",
            "model.path: must be one of builtin:tiny_qwen2; got 'builtin:tiny'. Did you mean 'builtin:tiny_qwen2'?",
        ),
        (
            "platform.device=cuda",
            "platform.device: cannot be used here: CUDA_VISIBLE_DEVICES='' hides every CUDA device; got 'cuda'."
            " Try platform=cpu",
        ),
    ],
)
def test_each_mistake_has_its_remedy(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(capsys, argument)[0] == message


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").touch()
    (line,) = problems(capsys, "hydra.run.dir=taken/run")
    assert line.startswith("output_dir: must be a folder that can be written to")
    assert f"{tmp_path / 'taken'} is a file" in line
    (line,) = problems(capsys, f"hydra.run.dir={300 * 'a'}")
    assert f"File name too long: {tmp_path}: set output_dir" in line
    (line,) = problems(capsys, "hydra.run.dir=/proc/x")
    assert line.endswith("No such file or directory: /proc: set output_dir=FOLDER")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (line,) = problems(capsys, "model.path=./empty")
    assert line == "model.path: must be a folder in Hugging Face format; got './empty'. There is no config.json in it"
    (line,) = problems(capsys, "model.path=./emtpy")
    assert line.endswith("did you mean 'empty'?")
    (tmp_path / "tiny.gguf").touch()
    (line,) = problems(capsys, "model.path=tinny.gguf")
    assert line.startswith("model.path: must be an existing folder, a GGUF file, a hub name or builtin:NAME")
    (line,) = problems(capsys, "model.path=pypi:SmolLM2-135M")
    assert line.startswith(
        "model.path: must be a model that can be read; got 'pypi:SmolLM2-135M'. Must be one of pypi:Smol"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experiment", "gsm8k_multiturn"], "write +experiment=gsm8k_multiturn"),
        (["seed=1", "--trainer.total_steps=3"], "write trainer.total_steps=3"),
        (["--no-such-flag"], "--no-such-flag: is not a flag"),
        (["--logging-steps", "5"], "Always: every step is a record of metrics.jsonl"),
        (["--lr", "1e-5"], "write trainer.policy.optimizer.lr=1e-5"),
        (["--learning-rate=1e-5"], "write trainer.policy.optimizer.lr=1e-5"),
        (["--model", "ORG/NAME"], "write model.path=ORG/NAME"),
        (["model=ORG/NAME"], "Write model.path=ORG/NAME for a folder, a file or a name on a hub"),
        (["data=own/rows.jsonl"], "Write data.train=[own/rows.jsonl] for a folder"),
        (["--experimental-rerun", "config.pickle"], "trainer.resume_mode=latest"),
        (["--config-dir", "/nowhere/at/all"], "--config-dir: must be an existing folder; got '/nowhere/at/all'"),
        (["data.train=[/nowhere/x.jsonl]", "environment=by_row"], "There is no folder /nowhere."),
        (["model.path=/nowhere/x"], "There is no folder /nowhere"),
    ],
)
def test_flags_and_folders_that_there_are_not_are_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        preflight(arguments, config_name="config")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("1 problem in the configuration:")
    assert says in said
    assert "Nearest in /" not in said


def test_a_missing_data_file_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").touch()
    (line,) = problems(capsys, "data.train=trian.jsonl", "environment=word_problems")
    assert line.startswith("data.train: must be data that can be found; got 'trian.jsonl'.")
    assert "train.jsonl." in line


@pytest.mark.slow
def test_data_of_ones_own_asks_how_it_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    (tmp_path / "my_code.py").write_text("def score(completion):\n    return 1.0\n")
    for arguments in (
        ["data.train=rows.jsonl"],
        ["data.validation=[rows.jsonl]"],
        ["data.mix=[{train: rows.jsonl}, {train: builtin:word_problems/train}]"],
    ):
        (line,) = problems(capsys, *arguments)
        assert line.startswith(
            "environment.env_class: must be chosen, or a reward, for data of your own (rows.jsonl): nothing says how "
            "answers are scored; got nothing. Set environment.reward=my_code:score (docs/rewards.md), or "
            "environment=word_problems"
        )
    assert passes("data.train=rows.jsonl", "environment=word_problems")
    assert passes("data.train=rows.jsonl", "environment.env_class=gsm8k")
    assert passes("data.train=rows.jsonl", "environment.reward=exact_match")
    assert passes("data.mix=[{train: rows.jsonl, environment: gsm8k}, {train: builtin:word_problems/train}]")


def test_a_judge_of_the_preset_takes_its_settings_without_a_plus_sign(capsys: pytest.CaptureFixture[str]) -> None:
    judge = ("environment=judge", "environment.reward.model=m")
    rubric = "environment.reward.rubric=[{name: clear, criterion: Is it clear?}]"
    (line,) = problems(capsys, *judge, rubric, "environment.reward.url=judge")
    assert line == (
        "environment.reward.url: must be the address of a server, http://HOST:PORT or https://HOST; got 'judge'. Write "
        "url: http://HOST:PORT, e.g. http://127.0.0.1:8000"
    )
    (line,) = problems(capsys, *judge, rubric, "environment.reward.url=http://me:pa55w0rd@127.0.0.1:9")
    assert line.startswith(
        "environment.reward.url: must be the address of a server that can be used, http://HOST:PORT ("
    )
    assert "; got 'http://<redacted>@127.0.0.1:9'." in line or "; got 'http://me:<redacted>@127.0.0.1:9'." in line
    assert "pa55w0rd" not in line


def test_what_the_hub_would_give_is_refused_at_once_where_it_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("data.train=[nobody/nothing:train]", "model.path=nobody/nothing", "environment=word_problems")
    model, data = problems(capsys, *arguments)[::-1]
    assert "https://huggingface.co does not answer" in model
    assert "hf download nobody/nothing --local-dir FOLDER" in model
    assert "hf download nobody/nothing --repo-type dataset" in data


def test_missing_gsm8k_files_name_the_script_that_makes_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = problems(capsys, "data=gsm8k")
    assert [line.partition(":")[0] for line in lines] == ["data.train", "data.validation"]
    assert all("scripts/prepare_gsm8k.py" in line for line in lines)


def test_each_value_of_a_sweep_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    stated = "trainer.train_batch_size=32"
    lines = problems(
        capsys, "-m", "seed=1,two,3", stated, "trainer.policy_mini_batch_size=16,15", "algorithm=grpo,dapoo"
    )
    fields = [line.partition(":")[0] for line in lines]
    micro = "trainer.micro_train_batch_size_per_gpu"
    assert fields == ["algorithm", "seed", "trainer.policy_mini_batch_size", micro]


def test_the_runs_of_a_sweep_may_not_share_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = problems(capsys, "-m", "seed=1,2", "output_dir=here")
    assert line.startswith("output_dir: must differ between the runs of a sweep")
    assert passes("-m", "seed=1,2", "output_dir=here_${seed}")


def test_flags_between_settings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = problems(capsys, "+experiment=gsm8k_multiturn", "-m", "seed=1,2")
    assert line.endswith("Put flags such as -m before or after all of KEY=VALUE")


def test_showing_the_config_checks_names_but_not_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes("--cfg", "job", "trainer.train_batch_size=abc")
    (line,) = problems(capsys, "--cfg", "job", "trainer.train_batch_sise=4")
    assert line.startswith("trainer.train_batch_sise: is not a setting")


def test_a_plan_for_another_machine_checks_names_and_types_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes("platform=gpu", "generator.n_samples_per_prompt=1", rules=False)
    with pytest.raises(SystemExit):
        passes("platform=gpu", "seed=x", rules=False)
    assert "must be an integer" in capsys.readouterr().err


@pytest.mark.slow
def test_groups_and_experiments_of_the_users_own_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\nseed: 5\ntrainer: {total_stepps: 3}\n")
    (own / "broken.yaml").write_text("seed: [1\n")

    lines = problems(capsys, "--config-dir", "own", "+experiment=mine")
    assert lines == ["trainer.total_stepps: is not a setting; got 3. Did you mean trainer.total_steps?"]
    (line,) = problems(capsys, "--config-dir", "own", "+experiment=broken")
    assert line.startswith("experiment: was refused; got 'broken'.")
    (line,) = problems(capsys, "--config-dir", "own", "+experiment=mien")
    assert line.endswith("Did you mean experiment=mine?")


def test_a_gsm8k_override_of_a_user_is_not_mistaken_for_an_unknown_group(capsys: pytest.CaptureFixture[str]) -> None:
    lines = problems(capsys, "algorithm@critic=grpo")
    assert lines[0].startswith("algorithm: was refused")
