"""Several relays over leased shards on real Postgres, through crashes, freezes, joins and leaves.

Each history is random by its seed: the engine itself, with a broker that remembers the order of
arrival, against racing writers. Whatever happens: nothing lost, no ghost, first appearances per key
in commit order, and no two living relays inside one shard.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg
import pytest

from tests.integration.relaying import RecordingBroker, Verdict, judge, prepare, race
from towpath.backoff import RetryPolicy
from towpath.brokers.ports import OutboundMessage
from towpath.relay import Relay, RelayOptions

T = TypeVar("T")

OPTIONS = RelayOptions(
    poll_max=0.02,
    window_rows=40,
    lease=0.6,
    renew_every=0.1,
    publish_deadline=0.15,
    margin=0.05,
    backoff=RetryPolicy(base="5ms", cap="50ms"),
    journal_every=0.1,
)


class Crashed(BaseException):
    """The process is gone: nothing of it runs any more, not even its clean-up."""


class FragileRelay(Relay):
    """A relay that freezes and crashes at every step, as its history says."""

    def __init__(self, url: str, history: "History") -> None:
        super().__init__(url, history.broker, OPTIONS)
        self._history = history
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._is_dead = False
        heartbeat, reading, sender, journal = self._heartbeat, self._reading, self._sender, self._journal_of()
        heartbeat.beat = self._step(heartbeat.beat, freezes=False)  # type: ignore[method-assign]
        reading._step = self._step(reading._step)  # type: ignore[method-assign]
        sender.connect = self._step(sender.connect)  # type: ignore[method-assign]
        journal.append = self._step(journal.append)  # type: ignore[method-assign]

    def _journal_of(self) -> Any:
        return self._dispatch._journal

    def _step(
        self, call: Callable[..., Awaitable[T]], *, freezes: bool = True
    ) -> Callable[..., Awaitable[T]]:
        """The call, unless the process is frozen or dies before or after it."""

        async def step(*args: Any, **keywords: Any) -> T:
            await self._mishap(freezes=freezes)
            result = await call(*args, **keywords)
            await self._mishap(freezes=False)
            return result

        return step

    async def _mishap(self, *, freezes: bool) -> None:
        history = self._history
        await self._thawed.wait()
        if freezes and history.rng.random() < 0.004:
            history.counts["freezes"] += 1
            self._thawed.clear()
            await asyncio.sleep(OPTIONS.lease * 1.7)
            self._thawed.set()
        if history.rng.random() < 0.003:
            history.counts["crashes"] += 1
            self._is_dead = True
            raise Crashed

    async def _close(self) -> None:
        if self._is_dead:
            self._heartbeat.leave = _nothing  # type: ignore[method-assign]
        await super()._close()


async def _take_a_moment(_: int, __: Sequence[OutboundMessage]) -> None:
    """So that something is always in flight when shards change hands."""
    await asyncio.sleep(0.02)


async def _nothing() -> None:
    """A dead process says no goodbye."""


class History:
    """One random run: writers, relays that come and go, and what was seen."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.seed = seed
        self.rng = random.Random(seed)
        self.broker = RecordingBroker(before=self._inside, is_slow=True)
        self.committed: list[tuple[str, int]] = []
        self.counts: Counter[str] = Counter()
        self._holder: dict[int, int] = {}

    async def _inside(self, publisher: int, window: Sequence[OutboundMessage]) -> None:
        """A publish takes a moment; nobody else may be inside one of its shards meanwhile."""
        keys = {int(message.key or 0) for message in window}
        for key in keys:
            if self._holder.setdefault(key, publisher) != publisher:
                self.counts["overlaps"] += 1
        try:
            await asyncio.sleep(self.rng.random() * 0.02)
        finally:
            for key in keys:
                if self._holder.get(key) == publisher:
                    del self._holder[key]

    async def host(self, until: float) -> None:
        """One machine: a relay runs for a while, stops or dies, and another is started."""
        while time.monotonic() < until or not self.is_complete():
            relay = FragileRelay(self.url, self)
            stop = asyncio.Event()
            running = asyncio.create_task(relay.run(stop))
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() * 3 + 0.5):
                    await asyncio.wait([running])
            stop.set()
            relay._thawed.set()
            await self._end(running)
            await asyncio.sleep(self.rng.random() * 0.2)

    async def _end(self, running: asyncio.Task[None]) -> None:
        try:
            await running
        except BaseExceptionGroup as group:
            _, other = group.split(Crashed)
            if other is not None:
                raise

    def is_complete(self) -> bool:
        """Whether everything committed has arrived."""
        return judge(self.committed, self.broker).lost == 0

    async def run(self, relays: int, writers: int, seconds: float) -> None:
        """Write for some seconds, then wait until everything arrived."""
        until = time.monotonic() + seconds
        async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as tasks:
            for number in range(writers):
                tasks.create_task(race(self.url, self.committed, writer=number, until=until, seed=self.seed))
            for _ in range(relays):
                tasks.create_task(self.host(until))


@pytest.mark.parametrize("index", range(3))
async def test_relays_that_crash_and_freeze_lose_and_invert_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str, scale: float, index: int
) -> None:
    """R4, R5, P2: three relays share the shards, whatever happens to them."""
    await prepare(db)
    runs = max(1, int(scale))
    for run in range(runs):
        seed = index * 1000 + run
        history = History(migrated_url, seed)
        await db.execute("update hot set v = v + 1000000")  # values of one run never meet another's
        await history.run(relays=3, writers=6, seconds=5)
        found = judge(history.committed, history.broker)
        facts = f"seed {seed}: {len(history.committed)} commits, {found}, {dict(history.counts)}"
        print(facts)
        assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0), facts
        assert history.counts["overlaps"] == 0, facts
        assert len(history.committed) > 100


async def test_without_mishaps_relays_that_come_and_go_double_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R5: an orderly hand-over repeats no message."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker(before=_take_a_moment)
    until = time.monotonic() + 6
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(race(migrated_url, committed, writer=number, until=until))

        async def come_and_go(first: float) -> None:
            await asyncio.sleep(first)
            while time.monotonic() < until or judge(committed, broker).lost:
                stop = asyncio.Event()
                running = asyncio.create_task(Relay(migrated_url, broker, OPTIONS).run(stop))
                await asyncio.sleep(1.5)
                stop.set()
                await running

        tasks.create_task(come_and_go(0.0))
        tasks.create_task(come_and_go(0.7))
    assert judge(committed, broker) == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)
