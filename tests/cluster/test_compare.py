"""`skyrl-doctor compare` with a real vLLM: the whole vocabulary at each position, as the trainer has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_train.main_doctor import main

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_vllm_and_the_trainer_agree_over_the_whole_vocabulary(tmp_path: Path, capsys: Any) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Ana has 3 apples. Ana buys 4 more. How many apples does Ana have now?\nBen does 4 laps a day.\n")
    command = ["compare", "builtin:tiny_qwen2", "--engine", "vllm", "--texts", str(texts), "--most", "1e-6"]
    assert main([*command, "generator.vllm.dtype=float32"]) == 0
    assert "over the whole vocabulary of 492" in capsys.readouterr().out
