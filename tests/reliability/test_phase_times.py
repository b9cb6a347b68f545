"""Where the seconds of a step go: in a real run the phases of `metrics.jsonl` add up to the step within 5 %.

On Ray: tests/cluster/test_replayed_runs.py and test_http_server.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_runs import records, run_command, unaccounted_share
from tests.reliability.kill_and_resume import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_phases_of_each_step_add_up_to_the_step(kind: str, tmp_path: Path) -> None:
    module, *overrides = KINDS[kind]
    run_command(tmp_path, *overrides, module=module)
    shares = {record["step"]: unaccounted_share(record) for record in records(tmp_path)}
    print(f"\n{kind}: " + ", ".join(f"step {step}: {share:.2%}" for step, share in shares.items()))
    assert len(shares) > 2
    assert max(shares.values()) < 0.05
