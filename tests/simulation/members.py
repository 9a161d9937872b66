"""Histories of consumers: the engine itself on a virtual clock, against models of Postgres and Kafka."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

from tests.simulation.kafka import HEARTBEAT_SECONDS, REBALANCE_SECONDS, SESSION_SECONDS, SimConsumer
from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimLoop, Stuck, run
from tests.simulation.member_plan import HOSTS, Arrive, Fault, Step, plan
from tests.simulation.member_world import Account, World
from tests.simulation.pool import Pool
from towpath.brokers.kafka import placing, session, subscriber, watchdog
from towpath.brokers.kafka.broker import KafkaBroker
from towpath.consumer import (
    burials,
    census,
    endings,
    engine,
    health,
    held,
    loopwatch,
    member,
    membership,
    pace,
    patience,
    pump,
    reaper,
    receiving,
    reporting,
    roster,
    running,
    upkeep,
    waves,
    wiring,
)
from towpath.consumer.effects import calling
from towpath.consumer.lanes import Received
from towpath.crashpoints import CrashPoint
from towpath.errors import BrokerUnavailable
from towpath.settings import WorkerSettings
from towpath.store import claims, database, due
from towpath.store.database import Database

SETTINGS: Final = WorkerSettings(
    concurrency=4,
    max_in_flight=30,
    lease=timedelta(seconds=6),
    beat_every=timedelta(seconds=1.5),
    claim_batch=10,
    due_poll_min=timedelta(milliseconds=100),
    due_poll_max=timedelta(seconds=1.5),
    reap_every=timedelta(seconds=1.5),
    ack_after=timedelta(seconds=2),
    max_parked_per_key=3,
    max_deliveries=10,
    drain_timeout=timedelta(seconds=1),
)
_KAFKA: Final = {
    "session_timeout_ms": round(1000 * SESSION_SECONDS),
    "rebalance_timeout_ms": round(1000 * REBALANCE_SECONDS),
    "heartbeat_interval_ms": round(1000 * HEARTBEAT_SECONDS),
    "request_timeout_ms": 2000,
}
_KILLS: Final = {
    "kill": None,
    "kill received": CrashPoint.RECEIVED_BEFORE_CLAIM,
    "kill claimed": CrashPoint.CLAIMED_BEFORE_HANDLE,
    "kill handled": CrashPoint.HANDLED_BEFORE_SETTLE,
    "kill settled": CrashPoint.COMMITTED_BEFORE_ACK,
    "kill waiting": CrashPoint.WAITING_BEFORE_ACK,
    "kill kept": CrashPoint.KEPT_BEFORE_ACK,
    "kill due": CrashPoint.DUE_STARTED,
    "kill buried": CrashPoint.BURIED_BEFORE_ACK,
}
_CLOCKED: Final = (
    calling, claims, due, endings, health, held, membership, pace, patience, pump, reaper, reporting, roster,
    running, session, subscriber, upkeep, watchdog, waves, wiring,
)  # fmt: skip
_MORTAL: Final = (burials, endings, patience, pump, receiving, running, upkeep)
"""Where crash points are."""
_QUIET_SECONDS: Final = 60.0
"""A history is over when so long nothing came forward: any timeout is shorter, and any lease."""
_LONGEST_SECONDS: Final = 600.0


class History(World):
    """One run of a plan."""

    def __init__(self, loop: SimLoop, seed: int, steps: Sequence[Step]) -> None:
        super().__init__(loop, seed, steps)
        self._hosts: dict[int, Process] = {}
        self._stops: dict[int, asyncio.Event] = {}
        self._is_over = False

    async def run(self) -> Account:
        loop = self._loop
        with (
            patch.object(database.asyncpg, "create_pool", self._create_pool),
            patch.object(session, "AIOKafkaConsumer", partial(SimConsumer, self._broker)),
        ):
            loop.call_soon(self._broker.look, context=OUTSIDE)
            for host in range(HOSTS):
                self._start(host)
            for step in self._steps:
                await asyncio.sleep(max(0.0, step.at - loop.time()))
                self._note(str(step))
                if isinstance(step, Arrive):
                    self._arrive(step)
                else:
                    loop.create_task(self._break(step))
            ends = max((step.at + step.seconds for step in self._steps), default=0.0)
            while loop.time() < ends or not (self._is_complete() or self._is_quiet(ends)):  # noqa: ASYNC110
                await asyncio.sleep(1)
        self._is_over = True
        self._judge()
        return self.account

    async def _create_pool(
        self, *_: object, max_size: int, command_timeout: float, server_settings: dict[str, str], **__: object
    ) -> Pool:
        return await Pool(self._server, max_size, command_timeout, server_settings).open()

    def _is_quiet(self, ends: float) -> bool:
        return self._loop.time() > min(max(ends, self.moved_at) + _QUIET_SECONDS, _LONGEST_SECONDS)

    def _start(self, host: int, *, stays: bool = True) -> None:
        if self._is_over:
            return
        stop = self._stops[host] = asyncio.Event()
        name = f"member {host}"

        async def main(process: Process) -> None:
            try:
                await engine.Consumer(
                    self._app,
                    Database("postgresql://simulated@localhost/simulated"),
                    KafkaBroker("kafka://simulated", _KAFKA),
                    SETTINGS,
                ).run(stop)
            except Exception as error:
                self.account.wrong.append(f"died: {name} of {error!r}")
                raise
            finally:
                if not process.is_dead and not self._is_over:
                    self._note(f"{name} ended")
                    if stays:
                        self._loop.call_later(self._rnd.uniform(0.1, 2), self._start, host)

        self._hosts[host] = self._loop.spawn(name, main)

    async def _break(self, fault: Fault) -> None:
        loop, server, broker = self._loop, self._server, self._broker
        process = self._hosts[fault.host]
        if fault.kind in _KILLS:
            await self._kill(process, fault)
        elif fault.kind == "stop":
            self._stops[fault.host].set()
        elif fault.kind == "join":
            self._start(HOSTS, stays=False)
            loop.call_later(fault.seconds, self._stops[HOSTS].set)
        elif fault.kind == "move":
            broker.rebalance()
        elif fault.kind == "freeze":
            loop.freeze(process)
            await asyncio.sleep(fault.seconds)
            server.stall(process, self._rnd.uniform(0, 2))
            loop.thaw(process)
        elif fault.kind == "cut database":
            server.cut(lambda connection: connection.process is process)
        elif fault.kind == "hang database":
            server.stall(process, fault.seconds)
        elif fault.kind == "lose answers of the database":
            await self._for_a_while(server.unheard, process, fault.seconds)
        elif fault.kind == "cut broker":
            await self._for_a_while(broker.cut_off, process, fault.seconds)
        elif fault.kind.startswith("crash"):
            server.crash(is_hidden=fault.kind.endswith("pooler"))
            await server.return_after(fault.seconds)
        else:
            await self._for_a_while(broker.trouble, fault.kind, fault.seconds)

    async def _for_a_while(self, troubled: set[Any], who: object, seconds: float) -> None:
        troubled.add(who)
        await asyncio.sleep(seconds)
        troubled.discard(who)

    async def _kill(self, process: Process, fault: Fault) -> None:
        """Now, or when it comes by its crash point; another member is started later."""
        process.doom = _KILLS[fault.kind]
        if process.doom is None:
            self._loop.kill(process)
        await process.died.wait()
        self._server.cut(lambda connection: connection.process is process)
        await asyncio.sleep(fault.seconds)
        self._start(fault.host)


async def _for_ever(_: object) -> None:
    await asyncio.Event().wait()


_cancel: Final = roster.cancel


async def _cancel_in_order(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """The oldest first: what is kept in a set has another order each time."""
    await _cancel(sorted(tasks, key=lambda task: int(task.get_name().rpartition("-")[2] or 0)))


async def _unreachable(*_: object) -> BrokerUnavailable:
    return BrokerUnavailable("nobody listens")


@contextmanager
def virtual(loop: SimLoop, seed: int) -> Iterator[None]:
    """The clocks, ids and dice of the engine are the simulation's; what only counts and watches rests."""
    ids = iter(range(1, 1_000_000))

    def clock_gettime(_: int) -> float:
        return loop.time()

    def token() -> UUID:
        return UUID(int=next(ids))

    def worker() -> UUID:
        process = PROCESS.get()
        id_ = token()
        if process is not None:
            process.owner = id_
            process.owners.append(id_)
        return id_

    def received(*columns: Any, **more: Any) -> Received:
        return Received(*columns, **more, received_at=loop.time())

    clock = SimpleNamespace(
        monotonic=loop.time, time=loop.time, clock_gettime=clock_gettime, CLOCK_BOOTTIME=0
    )
    state = random.getstate()
    random.seed(seed)
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        for module in _CLOCKED:
            stack.enter_context(patch.object(module, "time", clock))
        for module in _MORTAL:
            stack.enter_context(patch.object(module, "crash_point", loop.pass_point))
        for place, name, instead in (
            (member, "uuid7", worker),
            (claims, "uuid7", token),
            (receiving, "Received", received),
            (roster, "cancel", _cancel_in_order),
            (session, "connection_error", _unreachable),
            (placing, "known_topics", SimConsumer.known_topics),
            (placing, "committed", SimConsumer.mark),
            (watchdog, "known_topics", SimConsumer.known_topics),
            (loopwatch.LoopWatch, "run", _for_ever),
            (census.CensusLoop, "run", _for_ever),
        ):
            stack.enter_context(patch.object(place, name, instead))
        yield


def simulate(seed: int, steps: Sequence[Step] | None = None) -> Account:
    """Run the history of a seed, or its remaining steps."""
    account: list[Account] = []

    async def main(loop: SimLoop) -> Account:
        stack.enter_context(virtual(loop, seed))
        history = History(loop, seed, plan(seed) if steps is None else steps)
        account.append(history.account)
        return await history.run()

    with ExitStack() as stack:  # until the last task has ended
        try:
            return run(main)
        except Stuck as error:
            account[0].wrong.append(f"stuck: {error}")
            return account[0]
