"""Steps that two ranks on Ray made are executed again in one process, each within the bounds of rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.command_runs import RAY, run_command

pytestmark = pytest.mark.cluster

NUM_STEPS = 6
RUN = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=8",
    "trainer.ckpt_interval=0",
    "trainer.export_hf=false",
    f"trainer.total_steps={NUM_STEPS}",
    "trainer.capsules=5",
)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_last_five_steps_of_two_ranks_are_executed_again_in_one_process(tmp_path: Path, strategy: str) -> None:
    run_command(tmp_path / "run", *RUN, *RAY, f"strategy={strategy}", "placement.policy_num_workers=2")
    for step in range(2, NUM_STEPS + 1):
        done = warm_python.run("-m", "skyrl_train.main_capsule", "run", str(tmp_path / "run"), "--step", str(step))
        print(done.stdout)
        assert done.returncode == 0, done.stdout
        assert "on another placement: rounding is bounded" in done.stdout
        weights = next(line for line in done.stdout.splitlines() if line.startswith("policy weights"))
        assert 0.0 < float(weights.split()[3]) < 1e-4
