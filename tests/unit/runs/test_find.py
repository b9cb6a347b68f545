"""`--find`: what a person looks for, by our names, by what they do, and by what others call them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.fields import peer_rows
from skyrl_train.runs.cli.find import MOST, find, main


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("new tokens", "generator.sampling.max_generate_length=64"),
        ("max_new_tokens", "generator.sampling.max_generate_length"),
        ("MAX COMPLETION LENGTH", "generator.sampling.max_generate_length"),
        ("learning rate", "trainer.policy.optimizer.lr"),
        ("kl_loss_coef", "trainer.algorithm.kl_loss_coef=0.0"),
        ("clip_ratio_c", "trainer.algorithm.policy_loss={_target_:dual_clip,clip_ratio_c:VALUE}"),
        ("smollm2", "model=smollm2_135m"),
        ("repetition penalty", "(nothing)"),
    ],
)
def test_words_find_what_is_meant(text: str, first: str) -> None:
    assert first in [hit.typed for hit in find(text, Config)][:3]


@pytest.mark.slow
def test_names_of_other_trainers_are_found_first() -> None:
    for row in peer_rows()[::20]:
        for names in row.names.values():
            hits = [*find(names[0], Config)[:1], *find(names[0], SFTConfig)[:1]]
            assert any(hit.distance == 0 for hit in hits), names[0]


def test_all_words_count_and_a_word_may_be_begun() -> None:
    assert find("checkpoint timeout", Config)[0].typed.startswith("trainer.checkpoint_timeout_s")
    assert find("checkp timeo", Config)[0].typed.startswith("trainer.checkpoint_timeout_s")
    assert find("checkpoint giraffe", Config) == []
    assert find("", Config) == find(" ._- ", Config) == []


def test_much_is_cut_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--find", "the"], Config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * MOST + 1
    assert "more: add a word" in lines[-1]


@pytest.mark.parametrize(("arguments", "status"), [(["--find", "giraffe"], 1), (["--find"], 2)])
def test_nothing_is_said_so(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments, Config) == status
    assert capsys.readouterr().err


@pytest.mark.slow
def test_the_command_answers_without_torch_or_a_run(tmp_path: Path) -> None:
    program = "import sys; sys.argv[1:] = ['--find', 'new tokens']\nfrom skyrl_train.main import main\n" + (
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generator.sampling.max_generate_length=64\n    New tokens per turn.\n" in done.stdout
    assert [*tmp_path.iterdir()] == []
