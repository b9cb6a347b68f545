"""The rows of a run: when they are checked, what is evaluated where nothing says so, and what their lengths count."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config, SFTConfig, SFTDataConfig
from skyrl_train.config.data import NO_HELD_OUT, DataConfig, EnvironmentConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import DataError
from skyrl_train.runs import load_data
from skyrl_train.runs.sft import load_sft_data
from tests.support.tool_cases import ADD, model_with_tools
from tests.support.vision_runs import png

BUNDLED = ("builtin:word_problems/train",)


def write_rows(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.fixture
def own(tmp_path: Path) -> str:
    return write_rows(tmp_path / "own.jsonl", *[{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)])


def config_of(*train: str, **data: Any) -> Config:
    config = Config(data=DataConfig(train=train, **data))
    sizes = {"train_batch_size": 4, "policy_mini_batch_size": 4, "critic_mini_batch_size": 4}
    return replace(config, trainer=replace(config.trainer, **sizes))


@pytest.mark.parametrize("kind", [DataConfig, SFTDataConfig])
def test_only_data_that_has_held_out_rows_is_evaluated_where_nothing_says_so(kind: Any, tmp_path: Path) -> None:
    assert kind().held_out == ("builtin:word_problems/validation",)
    assert kind(train=("openai/gsm8k/main:train",)).held_out == ("openai/gsm8k/main:test",)
    assert kind(train=("own.jsonl",)).held_out == ()
    assert kind(train=("own.jsonl", *BUNDLED)).held_out == ("builtin:word_problems/validation",)
    assert kind(train=("own.jsonl",), validation=("test.jsonl",)).held_out == ("test.jsonl",)
    assert kind(validation=()).held_out == ()
    train, held_out = (tmp_path / "gsm8k" / f"{split}.parquet" for split in ("train", "validation"))
    train.parent.mkdir()
    train.touch()
    assert kind(train=(str(train),)).held_out == ()
    held_out.touch()
    assert kind(train=(str(train),)).held_out == (str(held_out),)


def test_data_of_ones_own_is_trained_on_alone_which_is_said(own: str) -> None:
    data = load_data(config_of(own))
    assert (data.num_train, data.validation, data.notes) == (4, (), (NO_HELD_OUT,))
    assert load_data(config_of(own, validation=())).notes == ()
    assert len(load_data(config_of(own, validation=(own,))).validation) == 4
    bundled = load_data(config_of(*BUNDLED, max_train_prompts=4, max_validation_prompts=3))
    assert (len(bundled.validation), bundled.notes) == (3, ())


def test_supervised_data_of_ones_own_is_trained_on_alone_which_is_said(own: str) -> None:
    config = SFTConfig(
        data=SFTDataConfig(train=(own,), prompt_column="question", completion_column="answer", cache=False)
    )
    data = load_sft_data(config.data, config.model, on_progress=lambda name, rows: None)
    assert (data.validation, NO_HELD_OUT in data.notes) == ({}, True)


@pytest.mark.slow
def test_a_row_that_is_refused_is_told_before_torch_is_imported(own: str, tmp_path: Path) -> None:
    (tmp_path / "my_code.py").write_text(
        "def score(completion, answr): return 1.0\ndef always(completion): return 1.0\n"
    )
    (tmp_path / "a.png").write_bytes(png(1))
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    shown = write_rows(tmp_path / "shown.jsonl", {"prompt": [{"role": "user", "content": content}]})
    code = f"""
import sys
from skyrl_train.config.data.sources import DataConfig, EnvironmentConfig
from skyrl_train.config.schema import Config
from skyrl_train.errors import DataError
from skyrl_train.runs import train
def tell(data, env_class, reward=None):
    environment = EnvironmentConfig(env_class=env_class, reward=reward, isolation="thread")
    config = Config(output_dir={str(tmp_path / "run")!r}, data=DataConfig(train=(data,)), environment=environment)
    try:
        train(config)
    except DataError as error:
        print(error)
tell({own!r}, "single_turn", "my_code:score")
tell({shown!r}, "single_turn", "my_code:always")
sys.exit(3 if {{"torch", "transformers"}} & set(sys.modules) else 0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "own.jsonl, line 1: the reward score takes the column 'answr'" in ended.stdout
    assert "Did you mean 'answer'?" in ended.stdout
    assert "shown.jsonl, line 1: has images, and the model reads none. Give model.path one" in ended.stdout
    assert ended.returncode == 0, ended.stderr


def test_the_schemas_of_tools_are_told_where_they_make_prompts_too_long(own: str, tmp_path: Path) -> None:
    config = config_of(own, max_prompt_length=24)
    config = replace(config, model=ModelConfig(path=model_with_tools(tmp_path / "model")))
    load_data(config)
    config = replace(config, environment=EnvironmentConfig(tools=(ADD,), isolation="thread"))
    with pytest.raises(DataError, match=r"=24 tokens \(\d{2,} of them tell the model of its 1 tool\)\. Raise it"):
        load_data(config)
