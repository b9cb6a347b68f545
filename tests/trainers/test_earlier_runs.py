"""Runs that commit 1debc52 began are still read: their folders, journals and checkpoints.

`tests/fixtures/earlier_runs.tar.xz` holds four of its runs as a kill after the checkpoint of step 2 of 3 leaves them, their
model of a few thousand parameters (`tests/reliability/recordings.py`), and what that commit exported after step 3.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from skyrl_train.telemetry.reading import find_runs
from tests.support.command_runs import records, run_command

ARCHIVE = Path(__file__).resolve().parents[1] / "fixtures" / "earlier_runs.tar.xz"
RL = (
    *("+experiment=gsm8k_multiturn", "platform=cpu", "model.path=model", "tracker=[]", "data.max_train_prompts=16"),
    *("data.validation=[builtin:word_problems/validation]", "data.max_validation_prompts=2"),
    *("generator.n_samples_per_prompt=2", "generator.sampling.max_generate_length=8", "trainer.total_steps=3"),
    *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "trainer.critic_mini_batch_size=2"),
    *("trainer.ckpt_interval=2", "environment.num_workers=1"),
)
SFT = (
    *("+experiment=sft_gsm8k", "sft_platform=cpu", "model.path=model", "tracker=[]", "data.max_train_rows=16"),
    *("data.max_validation_rows=4", "trainer.batch_size=4", "trainer.num_steps=3", "trainer.ckpt_interval=2"),
    "trainer.eval_samples=0",
)
JOURNALED = ("trainer.max_staleness=1", "trainer.dump_rollouts=false")
COMMANDS = {
    "rl": ("skyrl_train.main", RL),
    "stream": ("skyrl_train.main", (*RL, *JOURNALED)),
    "ppo_lora": ("skyrl_train.main", (*RL, "algorithm=ppo", "model.lora.rank=2")),
    "sft": ("skyrl_train.main_sft", SFT),
}
MOST = 1e-4
"""By how much weights may differ that another processor trained."""


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that they lie in, from which their commands are typed."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("rl", "sft") else pytest.mark.nightly) for name in COMMANDS]
)
def test_it_goes_on_to_the_weights_that_it_would_have_had(earlier: Path, name: str) -> None:
    module, overrides = COMMANDS[name]
    said = run_command(earlier / name, *overrides, module=module)
    assert "step_000002" in said, said[-3000:]
    assert records(earlier / name)[-1]["step"] == 3
    own = load_file(earlier / name / "export" / "model.safetensors")
    expected = load_file(earlier / "expected" / f"{name}.safetensors")
    assert own.keys() == expected.keys()
    for key, tensor in own.items():
        assert abs(tensor - expected[key]).max() <= MOST, key


@pytest.mark.slow
def test_its_journal_is_replayed(earlier: Path) -> None:
    replayed = ("generator=replay", f"generator.replay_path={earlier}/stream/journal")
    run_command(earlier / "again", *RL, *replayed)
    own = load_file(earlier / "again" / "export" / "model.safetensors")
    expected = load_file(earlier / "expected" / "stream.safetensors")
    assert all(abs(tensor - expected[key]).max() <= MOST for key, tensor in own.items())


def test_its_folder_is_shown(earlier: Path) -> None:
    runs = {run.id: run for run in find_runs([earlier]) if run.id in COMMANDS}
    assert list(runs) == sorted(COMMANDS)
    assert {name: run.describe()["last_step"] for name, run in runs.items()} == dict.fromkeys(COMMANDS, 3)
    files = [file for run in runs.values() for file in run.rollout_files()]
    assert {file.kind for file in files} == {"parquet"}
