"""Histories of relays: the engine itself on a virtual clock, against models of Postgres and the broker."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch
from uuid import UUID

from tests.simulation.loop import Process, SimLoop, Stuck, run
from tests.simulation.plan import HOSTS, Fault, Step, Write, plan
from tests.simulation.world import Account, World
from towpath.backoff import RetryPolicy
from towpath.crashpoints import CrashPoint
from towpath.relay import Relay, RelayOptions, dispatch, engine, journaling, link, progress

OPTIONS = RelayOptions(
    poll_min=0.1,
    poll_max=0.5,
    wakeup="poll",
    window_rows=6,
    listed_keys=8,
    lease=6.0,
    renew_every=1.0,
    publish_deadline=2.0,
    margin=0.5,
    backoff=RetryPolicy(base="100ms", cap="1s"),
)
KILLS = {
    "kill": None,
    "kill before publish": CrashPoint.READ_BEFORE_PUBLISH,
    "kill after publish": CrashPoint.PUBLISHED_BEFORE_JOURNAL,
    "kill after journal": CrashPoint.JOURNALED,
}
_QUIET_SECONDS = 60.0
"""A history is over when so long nothing came to the broker: any timeout is shorter, and any lease."""
_LONGEST_SECONDS = 600.0
_READ_SECONDS = 10.0
"""Instead of the engine's, so that what fails does so soon."""


class History(World):
    """One run of a plan."""

    def __init__(self, loop: SimLoop, seed: int, steps: Sequence[Step]) -> None:
        super().__init__(loop, seed, steps)
        self._hosts: list[Process | None] = [None] * HOSTS
        self._stops: list[asyncio.Event] = [asyncio.Event() for _ in range(HOSTS)]
        self._is_over = False

    async def run(self) -> Account:
        with (
            patch.object(link.asyncpg, "connect", self._server.connect),
            patch.object(dispatch, "crash_point", self._loop.pass_point),
            patch.object(journaling, "crash_point", self._loop.pass_point),
        ):
            for host in range(HOSTS):
                self._start(host)
            for step in self._steps:
                await asyncio.sleep(max(0.0, step.at - self._loop.time()))
                self._note(str(step))
                if isinstance(step, Write):
                    self._loop.create_task(self._write(step))
                else:
                    self._loop.create_task(self._break(step))
            ends = max((step.at + step.seconds for step in self._steps), default=0.0)
            while self._loop.time() < ends or not (self._is_complete() or self._is_quiet(ends)):
                await asyncio.sleep(1)
                self._decide()
        self._is_over = True
        self._judge()
        return self.account

    def _is_quiet(self, ends: float) -> bool:
        until = max(ends, self._decided_at, self._broker.offered_at) + _QUIET_SECONDS
        return self._loop.time() > min(until, _LONGEST_SECONDS)

    def _start(self, host: int) -> None:
        if self._is_over:
            return
        stop = self._stops[host] = asyncio.Event()
        name = f"relay {host}"

        async def main(process: Process) -> None:
            try:
                relay = Relay("postgresql://simulated", self._broker, OPTIONS)  # type: ignore[arg-type]
                process.owner = relay.id
                for idle in (relay._clearing, relay._mover, relay._census):
                    idle.run = _for_ever  # type: ignore[method-assign]
                await relay.run(stop)
            except Exception as error:
                self.account.wrong.append(f"died: {name} of {error!r}")
                raise
            finally:
                if not process.is_dead and not self._is_over:
                    self._note(f"{name} ended")
                    self._loop.call_later(self._rnd.uniform(0.1, 2), self._start, host)

        self._hosts[host] = self._loop.spawn(name, main)

    async def _break(self, fault: Fault) -> None:
        process = self._hosts[fault.host]
        if process is None:
            return
        server, broker = self._server, self._broker
        if fault.kind in KILLS:
            await self._kill(process, fault)
        elif fault.kind == "stop":
            self._stops[fault.host].set()
        elif fault.kind == "freeze":
            self._loop.freeze(process)
            process.suspended_seconds += fault.seconds
            await asyncio.sleep(fault.seconds)
            server.stall(process, self._rnd.uniform(0, 2))
            self._loop.thaw(process)
        elif fault.kind == "cut database":
            server.cut(lambda connection: connection.process is process)
        elif fault.kind == "hang database":
            server.stall(process, fault.seconds)
        elif fault.kind == "fail over":
            self._fail_over()
            await server.return_after(fault.seconds)
        elif fault.kind.startswith("crash"):
            await self._hurry()
            server.crash(is_hidden=fault.kind.endswith("pooler"))
            await server.return_after(fault.seconds)
        else:
            broker.trouble.add(fault.kind)
            await asyncio.sleep(fault.seconds)
            broker.trouble.discard(fault.kind)

    async def _hurry(self) -> None:
        """Transactions of others that do not wait for the disk: their ids may be given out again."""
        for _ in range(self._rnd.randint(0, 40)):
            x = self._schema.begin(is_durable=False)
            self._schema.xid(x)
            self._schema.commit(x)
            await asyncio.sleep(0.02)

    async def _kill(self, process: Process, fault: Fault) -> None:
        """Now, or when it comes by its crash point; another relay is started later."""
        process.doom = KILLS[fault.kind]
        if process.doom is None:
            self._loop.kill(process)
        await process.died.wait()
        self._server.cut(lambda connection: connection.process is process)
        await asyncio.sleep(fault.seconds)
        self._start(fault.host)

    def _fail_over(self) -> None:
        self._broker.doubtful_until = self._loop.time() + OPTIONS.lease
        before = set(self._committed)
        self._server.fail_over(self._rnd.uniform(0, 1))
        self._lost_by_failover |= before - self._committed.keys()


async def _for_ever() -> None:
    await asyncio.Event().wait()


@contextmanager
def virtual(loop: SimLoop, seed: int) -> Iterator[None]:
    """The clocks, ids and dice of the engine are the simulation's."""
    ids = iter(range(1, 10_000))

    def clock_gettime(_: int) -> float:
        return loop.time()

    state = random.getstate()
    random.seed(seed)
    clock = SimpleNamespace(clock_gettime=clock_gettime, CLOCK_BOOTTIME=0)
    with (
        patch.object(progress, "time", clock),
        patch.object(engine, "uuid7", lambda: UUID(int=next(ids))),
        patch.object(engine, "_READ_SECONDS", _READ_SECONDS),
    ):
        try:
            yield
        finally:
            random.setstate(state)


def simulate(seed: int, steps: Sequence[Step] | None = None) -> Account:
    """Run the history of a seed, or its remaining steps."""

    async def main(loop: SimLoop) -> Account:
        with virtual(loop, seed):
            history = History(loop, seed, plan(seed) if steps is None else steps)
            account.append(history.account)
            return await history.run()

    account: list[Account] = []
    try:
        return run(main)
    except Stuck as error:
        account[0].wrong.append(f"stuck: {error}")
        return account[0]
