"""Hostile environments played in workers, with what each trajectory became."""

from __future__ import annotations

from skyrl_train.rollout import LoopThread
from skyrl_train.rollout.boundary import EnvironmentFailed, EnvironmentSession
from skyrl_train.rollout.hosts import ProcessEnvironments, WorkerHost
from tests.reliability.hostile_environments import HOSTILE

TIMEOUT_S = 2.0


class Played:
    """Environments in worker processes, from a test that is no coroutine."""

    def __init__(self, host: WorkerHost) -> None:
        self._thread = LoopThread(name="hostile")
        self._environments = ProcessEnvironments(host, num_workers=2, timeout_s=TIMEOUT_S)

    def play(self, deed: str) -> str:
        """One episode; what its trajectory fails with, or its reward."""
        return self._thread.run(self._play(deed))

    def close(self) -> None:
        self._thread.run(self._environments.aclose())
        self._thread.close()

    async def _play(self, deed: str) -> str:
        session = EnvironmentSession(self._environments, HOSTILE, {"deed": deed}, "Hostile")
        try:
            await session.start([{"role": "user", "content": "2+2?"}])
            result = await session.step("4")
            await session.metrics()
            return f"reward {result.reward}"
        except EnvironmentFailed as broken:
            return f"{broken.kind.value}: {broken.message}"
        finally:
            await session.close()
