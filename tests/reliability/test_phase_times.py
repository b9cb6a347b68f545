"""Where the seconds of a step go: in a real run the phases of `metrics.jsonl` add up to the step within 5 %.

On Ray: tests/cluster/test_replayed_runs.py and test_http_server.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.kill_and_resume import KINDS
from tests.support.command_runs import records, run_command, unaccounted_share

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["rl", pytest.param("sft", marks=pytest.mark.nightly), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_the_phases_of_each_step_add_up_to_the_step(kind: str, tmp_path: Path) -> None:
    module, *overrides = KINDS[kind]
    run_command(tmp_path, *overrides, module=module)
    steps = records(tmp_path)
    print(f"\n{kind}, steps {[record['step'] for record in steps]}: {unaccounted_share(steps):.2%} in no phase")
    assert len(steps) > 2
    assert unaccounted_share(steps) < 0.05
