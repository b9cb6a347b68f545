"""The original GSM8K lines to data rows."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

from skyrl_train.config.data import DataConfig
from skyrl_train.data import GSM8K_ENV_CLASS, GSM8K_HUB, GSM8K_SPLITS, load_prompts
from skyrl_train.data.sources import is_reachable
from skyrl_train.rollout.envs import make_environment

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    {"question": "A robe takes 2 bolts of blue and half that of white. How many?", "answer": "2/2=<<2/2=1>>1\n#### 3"},
    {"question": "How much profit?", "answer": "He made $<<70000=70000>>70,000\n#### 70,000"},
]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", ROOT / "scripts" / "prepare_gsm8k.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def write_originals(folder: Path, *extra_lines: str) -> Path:
    folder.mkdir()
    lines = [*map(json.dumps, ROWS), *extra_lines]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_each_problem_becomes_a_row_that_its_environment_understands(tmp_path: Path, file_format: str) -> None:
    source, output = write_originals(tmp_path / "in"), tmp_path / "out"
    assert script.main(["--input", str(source), "--output", str(output), "--format", file_format]) == 0
    prompts = load_prompts([str(output / f"train.{file_format}")])
    assert [prompt.uid for prompt in prompts] == ["gsm8k-train-0", "gsm8k-train-1"]
    assert [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts] == ["3", "70000"]
    assert {prompt.env_class for prompt in prompts} == {GSM8K_ENV_CLASS}
    (message,) = prompts[0].messages
    assert message["content"].startswith(ROWS[0]["question"])
    assert "`#### ANSWER`" in message["content"]
    assert prompts[0].extras["extra_info"]["index"] == 0
    for prompt, answer in zip(prompts, ("#### 3", "so #### 70,000")):
        environment = make_environment("gsm8k", prompt.extras)
        assert environment.step(answer)["reward"] == 1.0


def test_another_environment_may_be_named(tmp_path: Path) -> None:
    source, output = write_originals(tmp_path / "in"), tmp_path / "out"
    script.main(["--input", str(source), "--output", str(output), "--env-class", "gsm8k"])
    (prompt, _) = load_prompts([str(output / "validation.parquet")])
    assert prompt.env_class == "gsm8k"


def from_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the hub's library give `ROWS`, whose columns are those of openai/gsm8k, without a network."""
    datasets = pytest.importorskip("datasets")
    is_reachable.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO())
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library.HfApi, "dataset_info", lambda *_, **__: object())
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: {"train": ROWS, "test": ROWS[:1]}[split])


def test_what_is_downloaded_is_what_the_hubs_rows_become_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_hub(monkeypatch)
    assert script.main(["--download", "--output", str(tmp_path)]) == 0
    for split, ours in GSM8K_SPLITS.items():
        fetched = load_prompts([f"{GSM8K_HUB}:{split}"], DataConfig(row_format="gsm8k"))
        assert fetched == load_prompts([str(tmp_path / f"{ours}.parquet")], DataConfig(row_format="gsm8k"))
        assert fetched[0].uid == f"gsm8k-{ours}-0"
    is_reachable.cache_clear()


def test_files_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    for split in GSM8K_SPLITS.values():
        (tmp_path / f"{split}.parquet").write_text("kept")
    assert script.main(["--download", "--if-missing", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "train.parquet").read_text() == "kept"


def test_without_a_network_it_says_at_once_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_reachable.cache_clear()
    assert script.main(["--download", "--output", str(tmp_path / "out")]) == 2
    assert "On a machine with a network run the same command" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"question": "q"}', "not a GSM8K problem"),
        ('{"question": "q", "answer": "no mark"}', "not a GSM8K problem"),
        ("not json", "not valid JSON"),
    ],
)
def test_a_line_that_is_no_problem_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, problem: str
) -> None:
    source, output = write_originals(tmp_path / "in", bad), tmp_path / "out"
    assert script.main(["--input", str(source), "--output", str(output)]) == 2
    assert f"{source / 'train.jsonl'}, line 3: {problem}" in capsys.readouterr().err
    assert not output.exists()


def test_a_folder_without_the_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "train.jsonl and test.jsonl missing" in capsys.readouterr().err


@pytest.mark.slow
def test_no_row_of_the_real_data_is_lost(tmp_path: Path) -> None:
    folder = Path(os.environ.get("SKYRL_TRAIN_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not here; set SKYRL_TRAIN_GSM8K_DIR to the folder of its train.jsonl and test.jsonl")
    assert script.main(["--input", str(folder), "--output", str(tmp_path)]) == 0
    train, validation = (load_prompts([str(tmp_path / f"{split}.parquet")]) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (7473, 1319)
    for prompt in validation[:50]:
        environment = make_environment("gsm8k", prompt.extras)
        assert environment.step(prompt.extras["extra_info"]["answer"])["reward"] == 1.0
