"""The real command, killed with SIGKILL and resumed: a few of the kill points that `kill_and_resume.py` tries."""

from __future__ import annotations

import pytest

from tests.reliability.kill_and_resume import main


@pytest.mark.slow
def test_a_killed_run_ends_like_one_that_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.max_validation_prompts=32", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"]
    small += ["trainer.critic_mini_batch_size=4"]
    assert main(["--kills", "3", "--seed", "1", *small]) == 0, capsys.readouterr().out
