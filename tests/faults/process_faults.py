"""Faults of our own processes: how they are ended, frozen, and starved."""

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.faults import freezing
from tests.faults.fault import LEASE_SECONDS, LIVE_WORKERS, OF_ROLE, Fault
from tests.faults.world import MEMBERS, PRODUCERS, FaultWorld, Role
from towpath.crashpoints import ENVIRONMENT_VARIABLE, CrashPoint
from towpath.testing.services import faketime

_PATIENCE_SECONDS: Final = 30.0
"""For a process to come by its crash point."""
_AWAKE_SECONDS: Final = 3.0
_PROBE_SECONDS: Final = 20.0


class Killed(Fault):
    """SIGKILL; started again when it is over."""

    def __init__(self, *names: str) -> None:
        self.touches = names
        self.acts_on = frozenset(names)

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            if not world.has_ended(name):
                world.kill(name)

    async def end(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.start(name)


class Terminated(Killed):
    """SIGTERM: an orderly end, then started again."""

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            if world.has_ended(name):
                self.is_missed = True
            elif (code := await world.patiently(name)) != 0:
                raise AssertionError(f"{name} ended with {code} after SIGTERM")


class Frozen(Fault):
    """SIGSTOP for longer than its lease, then SIGCONT."""

    least_seconds = LEASE_SECONDS + 2.0

    def __init__(self, *names: str) -> None:
        self.touches = names
        self.acts_on = frozenset(names)

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.suspend(name)

    async def end(self, world: FaultWorld) -> None:
        for name in self.touches:
            world.resume(name)


@contextmanager
def _producers_held(world: FaultWorld) -> Iterator[None]:
    """They stand still while a process is armed, so that messages are left to come by it."""
    held = [name for name in PRODUCERS if not world.has_ended(name)]
    for name in held:
        world.suspend(name)
    try:
        yield
    finally:
        for name in held:
            world.resume(name)


class Crashed(Fault):
    """One more process, which dies at a named point. The others of its role make way for it."""

    latest_seconds = 1.0
    least_seconds = 10.0

    def __init__(self, role: Role, point: CrashPoint) -> None:
        self._name = f"{role}-{point.value.replace('_', '-')}"
        self._role = role
        self._point = point
        self.touches = (self._name, *OF_ROLE[role])
        self.acts_on = frozenset(self.touches)

    async def begin(self, world: FaultWorld) -> None:
        with _producers_held(world):
            world.start(self._name, **{ENVIRONMENT_VARIABLE: str(self._point)})
            world.expect_death(self._name)
            if self._role == "member":
                await world.until_counted(len(MEMBERS) + 1, LIVE_WORKERS)
            for name in OF_ROLE[self._role]:
                await world.patiently(name)

    async def end(self, world: FaultWorld) -> None:
        try:
            await world.died(self._name, seconds=_PATIENCE_SECONDS)
        except AssertionError:  # it did not come by there
            self.is_missed = True
            world.kill(self._name)
        for name in OF_ROLE[self._role]:
            world.start(name)


class FrozenAt(Fault):
    """One more member freezes at a named point for longer than its lease, goes on there, and ends in order.

    Others make way until then. On Kafka: RabbitMQ needs half a minute to miss a consumer.
    """

    brokers = frozenset({"kafka"})
    latest_seconds = 1.0
    least_seconds = LEASE_SECONDS + 12.0  # others have to take its work over, too

    def __init__(self, point: CrashPoint, condition: str = "") -> None:
        self._name = f"member-frozen-{point.value.replace('_', '-')}"
        self._point = f"{point}:{condition}"
        self.touches = (self._name, *MEMBERS)
        self.acts_on = frozenset(self.touches)

    async def begin(self, world: FaultWorld) -> None:
        with _producers_held(world):
            world.start(self._name, **{freezing.ENVIRONMENT_VARIABLE: self._point})
            await world.until_counted(len(MEMBERS) + 1, LIVE_WORKERS)
            for name in MEMBERS:
                await world.patiently(name)

        async def is_frozen() -> bool:
            status = Path(f"/proc/{world.pids[self._name]}/stat").read_text()
            return status.rpartition(")")[2].split()[0] == "T"

        try:
            await world.until(f"{self._name} is frozen", is_frozen, seconds=_PATIENCE_SECONDS)
        except AssertionError:  # it did not come by there
            self.is_missed = True
        for name in MEMBERS:
            world.start(name)

    async def end(self, world: FaultWorld) -> None:
        world.resume(self._name)
        await asyncio.sleep(_AWAKE_SECONDS)
        if (code := await world.patiently(self._name)) != 0:
            raise AssertionError(f"{self._name} ended with {code} after SIGTERM")


class ClockWrong(Fault):
    """The wall clocks of processes are off from the start; those of the database and of the others are not.

    It holds nothing up: leases, due times and back-off go by the database's clock, and waits by the boot
    time. The clocks are libfaketime's, which leaves all but the wall clock true.
    """

    touches = ()

    def __init__(self, *names: str, offset: str) -> None:
        self.clocks = dict.fromkeys(names, offset)
        self.acts_on = frozenset(f"clock of {name}" for name in names)

    async def begin(self, world: FaultWorld) -> None:
        self.is_missed = not all(faketime.is_loaded(world.pids[name]) for name in self.clocks)

    def _set(self, world: FaultWorld, offset: str) -> None:
        for name in self.clocks:
            world.set_clock(name, offset)


class ClockJumps(ClockWrong):
    """They jump an hour ahead, then back two hours, and are set right."""

    least_seconds = 6.0

    def __init__(self, *names: str) -> None:
        super().__init__(*names, offset="+0")

    async def begin(self, world: FaultWorld) -> None:
        await super().begin(world)
        self._set(world, "+3600")
        await asyncio.sleep(self.least_seconds)
        self._set(world, "-3600")

    async def end(self, world: FaultWorld) -> None:
        self._set(world, "+0")


class Limited(Fault):
    """A resource of one process runs out: what it has it keeps, more it does not get.

    Where it ends for that, or stands still (a thread that cannot begin for want of memory is waited for,
    for ever), it is started again, as whatever supervises and probes it would.
    """

    def __init__(self, role: Role, limit: int, to: Callable[[int], int]) -> None:
        self.touches = (f"{role}-0",)
        self.acts_on = frozenset(self.touches)
        self._limit = limit
        self._to = to
        self._before: tuple[int, int] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    async def begin(self, world: FaultWorld) -> None:
        for name in self.touches:
            pid = world.pids[name]
            self._before = resource.prlimit(pid, self._limit)
            resource.prlimit(pid, self._limit, (self._to(pid), self._before[1]))

    async def end(self, world: FaultWorld) -> None:
        for name in self.touches:
            if not world.has_ended(name):
                resource.prlimit(world.pids[name], self._limit, self._before)
                if await world.is_live(name, seconds=_PROBE_SECONDS):
                    continue
                if not world.has_ended(name):
                    world.kill(name)
            world.start(name)


def size_of(pid: int) -> int:
    """Bytes of a process's address space."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()
