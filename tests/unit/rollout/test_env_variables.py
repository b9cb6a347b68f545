"""Which of the trainer's variables code of the user's sees in worker processes, and what it is told of the others."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from skyrl_train.rollout.boundary import EnvironmentFailed, EnvironmentSession
from skyrl_train.rollout.envs.environments import variables_of
from skyrl_train.rollout.hosts.local import LocalWorkers, violations_in_process
from skyrl_train.rollout.hosts.processes import ProcessEnvironments
from skyrl_train.rollout.tools.variables import given
from tests.support.environment_cases import COUNTING

ASKING = f"""
import json, os
from {COUNTING.partition(":")[0]} import Counting

class Asking(Counting):
    def step(self, action):
        if action == "see":
            return {{**super().step(action), "observations": [{{"role": "user", "content": json.dumps(dict(os.environ))}}]}}
        if action == "get":
            return len(os.getenv("MY_API_KEY"))
        return len(os.environ["MY_API_KEY"])
"""


@pytest.fixture(autouse=True)
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "needy.py").write_text("import os\nKEY = os.environ['MY_API_KEY']\n" + ASKING)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_API_KEY", "SKYRL_TRAIN_JUDGE_API_KEY"):
        monkeypatch.setenv(name, "s3cret-value-1")
    for name in ("HF_HOME", "HTTPS_PROXY", "LC_ALL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


def said(action: str, *named: str) -> str:
    async def one() -> str:
        workers = LocalWorkers(("asking:Asking",), worker_memory_gb=1.0, variables=named)
        among = ProcessEnvironments(workers, num_workers=1, timeout_s=10.0)
        session = EnvironmentSession(among, "asking:Asking", {}, "Asking")
        try:
            await session.start([{"role": "user", "content": "?"}])
            return str((await session.step(action)).observations[0]["content"])
        finally:
            await among.aclose()

    return asyncio.run(one())


def test_workers_get_the_listed_variables_and_those_that_the_setting_names() -> None:
    seen = json.loads(said("see", "MY_API_KEY"))
    assert seen["MY_API_KEY"] == "s3cret-value-1"
    assert {"PATH", "HOME", "HF_HOME", "HTTPS_PROXY", "LC_ALL", "OMP_NUM_THREADS"} <= seen.keys()
    assert "s3cret-value-1" not in {value for name, value in seen.items() if name != "MY_API_KEY"}


@pytest.mark.parametrize("action", ["get", "index"])
def test_a_failure_names_the_variable_that_was_asked_for_and_the_setting(action: str) -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"; MY_API_KEY is not given to environments: environment.variables=\[MY_API_KEY\]"
    ):
        said(action)


def test_so_does_the_refusal_of_a_module_that_asks_when_it_is_imported() -> None:
    (found,) = violations_in_process(["needy:Asking"])
    assert str(found).endswith("environment.variables=[MY_API_KEY]")
    assert violations_in_process(["needy:Asking"], variables=("MY_API_KEY",)) == []


def test_a_variable_that_the_trainer_has_not_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(EnvironmentFailed) as caught:
        said("index")
    assert "KeyError: 'MY_API_KEY'" in caught.value.message
    assert "environment.variables" not in caught.value.message


def test_an_adapter_gets_what_it_declares() -> None:
    assert "DISPLAY" in variables_of("gymnasium:FrozenLake-v1")
    assert variables_of({"_target_": "verifiers:sums", "n": 1})[0] == "OPENAI_API_KEY"
    assert variables_of("gsm8k") == variables_of("word_problems") == ()
    named = LocalWorkers(("verifiers:sums",), worker_memory_gb=1.0, variables=("MINE",)).named
    assert given({"OPENAI_API_KEY": "a", "MINE": "b", "OTHER_KEY": "c"}, named) == {"OPENAI_API_KEY": "a", "MINE": "b"}
    assert os.environ["MY_API_KEY"] not in given(os.environ, ()).values()
