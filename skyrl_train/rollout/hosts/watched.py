"""`WatchedEnvironments`: environments of which it is counted who waits for their answers."""

from __future__ import annotations

from skyrl_train.rollout.boundary.session import EnvironmentHandle, Environments, Request
from skyrl_train.telemetry import Activity


class WatchedEnvironments:
    """Implements `Environments` by others. What waits for a thread or a process to be free waits as well."""

    def __init__(self, environments: Environments, activity: Activity) -> None:
        self._environments, self._activity = environments, activity
        self.given_up = environments.given_up
        self.num_given_up = 0
        self.num_close_failures = 0

    def host(self, name: str) -> EnvironmentHandle:
        """Return the place of one environment."""
        return _Watched(self._environments.host(name), self)

    async def ask(self, handle: EnvironmentHandle, request: Request) -> object:
        """Return the answer of an environment; see `EnvironmentHandle.ask`."""
        try:
            with self._activity.environment():
                return await handle.ask(request)
        finally:
            self.num_given_up = self._environments.num_given_up

    async def aclose(self) -> None:
        """End the idle threads, or the processes."""
        await self._environments.aclose()


class _Watched:
    def __init__(self, handle: EnvironmentHandle, environments: WatchedEnvironments) -> None:
        self._handle, self._environments = handle, environments

    async def ask(self, request: Request) -> object:
        return await self._environments.ask(self._handle, request)

    def release(self) -> None:
        self._handle.release()
