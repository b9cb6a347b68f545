"""A mistake of the user's that a Ray worker finds is told as it is without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_runs import RAY, start_command, wait_for

pytestmark = pytest.mark.cluster


def test_a_typo_in_a_custom_loss_prints_the_lines_that_it_prints_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text("def unclipped(inputs, config):\n    raise AssertionError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    common = (
        "+experiment=gsm8k_multiturn",
        "trainer.total_steps=1",
        "trainer.algorithm.policy_loss=my_losses:uncliped",
    )

    inline = wait_for(start_command(tmp_path / "inline", *common))
    on_ray = wait_for(start_command(tmp_path / "ray", *common, *RAY, "generator=hf"))

    def problems(said: str) -> list[str]:
        lines = said.splitlines()
        return lines[next(number for number, line in enumerate(lines) if "in the configuration" in line) :]

    assert (inline[0], on_ray[0]) == (2, 2)
    assert "uncliped" in inline[1]
    assert problems(on_ray[1]) == problems(inline[1])
