"""What may happen to any process of a world: kills, losses of power, disks that are slow or full, clocks that jump."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.world.disk import Disk
from tests.world.machine import LawBroken, Process, World


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Which of them there are, drawn for each world."""

    kills: float
    """Kills to come for a thousand events, at the mean."""
    max_kills: int
    power: bool
    full_disk: bool
    slow_disk: bool
    clock_jumps: bool
    stops: bool

    @staticmethod
    def of(world: World) -> Rates:
        draw = world.random("rates")
        return Rates(
            kills=draw.choice((0.0, 10.0, 20.0, 40.0)),
            max_kills=draw.choice((0, 10, 30, 60)),
            power=draw.random() < 0.7,
            full_disk=draw.random() < 0.2,
            slow_disk=draw.random() < 0.3,
            clock_jumps=draw.random() < 0.5,
            stops=draw.random() < 0.2,
        )


class Machine:
    """One machine with a disk, and the process on it that things happen to."""

    def __init__(self, world: World) -> None:
        self.world, self.rates = world, Rates.of(world)
        self.disk = Disk(world, self._latency)
        self.process: Process | None = None
        self.num_starts = self.num_kills = 0
        self.outcomes: Counter[str] = Counter()
        self._power_fails = False
        self._next_kill = self._draw_kill()
        world.on_event = self._on_event

    @property
    def can_fail(self) -> bool:
        """Whether faults go on; at the end they do not, so that what was begun can be ended."""
        return self.num_starts <= self.rates.max_kills

    def stop(self) -> None:
        """Ask the process to end, as a signal does."""

    def begin(self, name: str) -> Process:
        """A process starts."""
        self.num_starts += 1
        self.process = self.world.last_process = Process(f"{name}{self.num_starts}")
        self.world.kinds["process"] += 2
        self.world.num_events += 2
        return self.process

    def end(self, process: Process) -> bool:
        """Clear away what has ended; whether it was killed. Raises LawBroken where a law was broken in it."""
        world, was_killed = self.world, process.is_dead
        world.kill(process)
        while not all(fiber.is_done for fiber in process.fibers):
            world.sleep(1e-6, "the end of a process")
        self.disk.let_go(process)
        if LawBroken.first:
            raise LawBroken.first[0]
        if was_killed:
            self.outcomes["killed"] += 1
            if self._power_fails:
                self._power_fails = False
                world.note("power comes back, without " + self.disk.lose_power(world.random("loss")))
        return was_killed

    def _draw_kill(self) -> int:
        draw, rate = self.world.random("kills"), self.rates.kills
        return self.world.num_events + 1 + int(draw.expovariate(rate / 1000)) if rate else 1 << 60

    def _on_event(self, kind: str, what: str) -> None:
        world, rates, process = self.world, self.rates, self.process
        if process is None or world.current.process is not process or process.is_dead:
            return
        if LawBroken.first:
            world.kill(process)  # what follows from it is of no interest
            return
        if not self.can_fail:
            return
        if world.num_events >= self._next_kill:
            self._next_kill = self._draw_kill()
            self._power_fails = rates.power and world.random("power").random() < 0.5
            if world.fault("power" if self._power_fails else "kill", f"at {kind} {what}"):
                self.num_kills += 1
                world.kill(process)
        if rates.stops and world.random("stops").random() < 0.002 and world.fault("stop", "SIGTERM"):
            self.stop()
        if rates.clock_jumps and world.random("clock").random() < 0.01 and world.fault("clock", "jumps"):
            world.wall_offset += world.random("clock").uniform(-1e6, 1e6)

    def _latency(self, operation: str) -> None:
        draw, rates, world = self.world.random("disk"), self.rates, self.world
        if world.current.process is not self.process:
            return
        if draw.random() < 0.3:
            world.sleep(draw.expovariate(200.0), f"the disk, to {operation}")
        if rates.slow_disk and draw.random() < 0.01:
            world.sleep(draw.uniform(1, 60), "a slow disk")
        if not self.can_fail:
            self.disk.room = None
        elif rates.full_disk and operation == "write" and draw.random() < 0.05:
            if self.disk.room is None and draw.random() < 0.2 and world.fault("full", "the disk is full"):
                self.disk.room = draw.randrange(64)
            elif self.disk.room is not None:
                self.disk.room = None
