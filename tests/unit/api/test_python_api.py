"""Objects in the place of names, and what `load_config` makes of them. Whole runs are slow and at the end."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyrl_train
from skyrl_train.api import load_config
from skyrl_train.data import load_prompts
from skyrl_train.errors import ConfigError, DataError, StopRequested
from skyrl_train.objects import named_part, named_rows
from skyrl_train.registry import import_attr, split_spec
from skyrl_train.rollout.envs import uses_processes
from skyrl_train.rollout.rewards import call_reward
from skyrl_train.runs import run_logged
from skyrl_train.runs.cli import as_override

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"{n} and {n}?", "answer": str(2 * n)} for n in range(8)]


def importable(completion: str) -> float:
    return float(len(completion))


def closure(bonus: float) -> Callable[..., float]:
    def score(completion: str) -> float:
        return bonus * len(completion)

    return score


class Scorer:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completion: str) -> float:
        return self.factor * len(completion)


def test_evaluation_follows_the_sampling_that_python_sets() -> None:
    config = load_config("+experiment=gsm8k_multiturn", settings={"generator.sampling.max_generate_length": 16})
    assert config.generator.eval_sampling.max_generate_length == 16


def test_what_can_be_imported_is_named_by_its_module() -> None:
    assert named_part(importable, setting="environment.reward") == f"{__name__}:importable"
    assert named_part(Scorer, setting="environment.reward") == f"{__name__}:Scorer"


def test_a_closure_is_found_under_its_name_in_this_process() -> None:
    score = closure(0.5)
    name = named_part(score, setting="environment.reward")
    assert isinstance(name, str)
    assert re.fullmatch(rf"skyrl_train\.objects:at_[0-9a-f]{{12}}\.{__name__}\.closure\.score", name)
    assert import_attr(name, field="environment.reward") is score
    with pytest.raises(ConfigError, match="object of another process"):
        import_attr("skyrl_train.objects:at_000000000000.x", field="environment.reward")


def test_the_name_changes_with_the_source_and_with_captured_values() -> None:
    def score(completion: str) -> float:
        return 0.5 + len(completion)

    names = [named_part(each, setting="reward") for each in (closure(0.5), closure(0.25), score, Scorer(1), Scorer(2))]
    assert len({str(name) for name in names}) == 5
    assert named_part(closure(0.5), setting="reward") == names[0]


def test_a_name_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from skyrl_train.objects import named_part, named_rows\n"
        "def score(completion, words={'b', 'a', 'c'}): return 1.0\n"
        "print(named_part(score, setting='r'), named_rows([{'a': b'1'}], setting='data.train'))\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert "__main__.score" in answers.pop()


def test_arguments_of_a_partial_stand_beside_its_name() -> None:
    assert named_part(functools.partial(importable, weight=2), setting="environment.reward") == {
        "_target_": f"{__name__}:importable",
        "weight": 2,
    }
    with pytest.raises(ConfigError, match="must have no positional arguments"):
        named_part(functools.partial(importable, "x"), setting="environment.reward")


def test_rows_in_memory_are_read_like_those_of_a_file() -> None:
    name = named_rows(ROWS, setting="data.train")
    prompts = load_prompts([name], limit=2)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["0 and 0?", "1 and 1?"]
    assert prompts[0].uid == f"{name.removeprefix('memory:')}-0"
    assert named_rows([dict(row) for row in ROWS], setting="data.train") == name
    with pytest.raises(DataError, match="memory of another process"):
        load_prompts(["memory:data.train@0"])


@pytest.mark.parametrize("text", ["it's", "a, b", "back\\slash\\", "\\'", "[1]", "${", "", "naïve\nline"])
def test_texts_reach_the_configuration_as_they_are(text: str) -> None:
    if "${" in text:
        pytest.skip("an interpolation, as in a file")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([as_override("run_name", {"a": [text, 1, None, True, 0.5]})])
    value: Any = override.value()
    assert [str(value["a"][0]), *value["a"][1:]] == [text, 1, None, True, 0.5]


_SAMPLE = {"completion": "abc", "completion_messages": [], "messages": [], "stop_reason": "stop"}


def test_a_closure_runs_on_threads_and_the_configuration_says_what_it_is() -> None:
    config = load_config(
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        settings={
            "environment.reward": closure(2.0),
            "data.train": ROWS,
            "data.validation": [],
            "trainer.total_steps": 3,
        },
    )
    assert config.environment.isolation == "thread"
    assert not uses_processes(config.environment)
    assert config.environment.env_class == "single_turn"
    assert config.environment.reward is not None
    assert config.trainer.total_steps == 3
    target, _ = split_spec(config.environment.reward)
    assert target.endswith(".closure.score")
    assert call_reward(config.environment.reward, {"prompt": [], "uid": "0"}, [_SAMPLE]) == 6.0


_SAMPLE = {"completion": "abc", "completion_messages": [], "messages": [], "stop_reason": "stop"}


@pytest.mark.slow
def test_worker_processes_are_refused_an_object_of_this_one() -> None:
    settings = {"environment.reward": closure(2.0), "data.train": ROWS}
    with pytest.raises(ConfigError, match=r"environment\.reward.* worker processes never have it"):
        load_config("platform=cpu", "environment.isolation=process", settings=settings)


def test_all_problems_are_told_at_once_and_folders_are_fresh() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("trainer.total_stepz=1", settings={"seed": -1})
    assert {violation.field for violation in caught.value.violations} == {"trainer.total_stepz", "seed"}
    with pytest.raises(ConfigError, match="must be a number, a text"):
        load_config(settings={"seed": object()})


@pytest.mark.slow
def test_a_tokenizer_and_a_dataset_may_be_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from skyrl_train.config.models import ModelConfig
    from skyrl_train.model import load_tokenizer

    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path))
    tokenizer = load_tokenizer(ModelConfig())
    settings = {"model.tokenizer_path": tokenizer, "data.train": Dataset.from_list(ROWS * 4), "data.validation": []}
    first, second = (
        load_config("platform=cpu", settings={**settings, "environment.reward": closure(1.0)}) for _ in range(2)
    )
    assert first.model.tokenizer_path == second.model.tokenizer_path
    assert len(load_tokenizer(first.model)) == len(tokenizer)
    assert len(load_prompts(first.data.train)) == 32
    assert first.output_dir != second.output_dir


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyboardInterrupt(), "interrupted"), (StopRequested("SIGINT", 3), "stopped by SIGINT after step 3")],
)
def test_an_interrupted_run_names_its_folder_and_how_to_go_on_in_one_line(
    tmp_path: Path, error: BaseException, words: str
) -> None:
    config = load_config(f"output_dir={tmp_path / 'run'}")

    def deep(depth: int) -> None:
        if not depth:
            raise error
        deep(depth - 1)

    with pytest.raises(type(error)) as raised:
        run_logged(config, lambda _: deep(30))
    line = (
        f'{words}. The run is in {tmp_path}/run: the same load_config with "output_dir={tmp_path}/run" goes on with it'
    )
    assert str(raised.value) == line
    # IPython asks an exception for its lines in this way; Python shows the frames of this file and one more.
    assert raised.value._render_traceback_() == [f"{type(error).__name__}: {line}"]  # type: ignore[attr-defined]
    assert len(traceback.extract_tb(raised.tb)) == 2
    assert raised.value.__cause__ is None
    assert "line repeated 27 more times" in (tmp_path / "run" / "run.log").read_text()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, skyrl_train; print([name for name in ('torch', 'hydra', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
    assert all(hasattr(skyrl_train, name) for name in skyrl_train.__all__)
    with pytest.raises(AttributeError):
        _ = skyrl_train.nothing


@pytest.mark.slow
def test_the_page_runs_and_goes_on_with_the_same_source_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python_api.md").read_text()
    names: dict[str, Any] = {"__name__": "__main__"}

    async def in_a_loop() -> None:  # as in a notebook
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(block, names)

    asyncio.run(in_a_loop())
    result = names["result"]
    assert result.step == 2
    assert [evaluation.global_step for evaluation in result.evaluations] == [0, 2]
    assert result._repr_png_().startswith(b"\x89PNG")
    assert "reward      score" in (result.folder.root / "run.log").read_text()
    assert "isolation   thread: what is defined in this process" in capsys.readouterr().out

    def train_again(reward: Callable[..., float], *overrides: str) -> Any:
        settings = {"environment.reward": reward, "data.train": names["rows"], "data.validation": names["rows"][:4]}
        settings |= {"output_dir": str(result.folder.root)}
        sizes = ("trainer.total_steps=3", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8")
        return skyrl_train.train(load_config("+experiment=gsm8k_multiturn", *sizes, *overrides, settings=settings))

    assert train_again(names["score"]).step == 3
    with pytest.raises(ConfigError, match=r"environment\.reward: must be as it was when"):
        train_again(closure(1.0), "trainer.total_steps=4")
