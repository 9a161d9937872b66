"""Several relays over leased shards on real Postgres, through crashes, freezes, joins and leaves.

Each history is random by its seed: the engine itself, with a broker that remembers the order of
arrival, against racing writers. Whatever happens: nothing lost, no ghost, first appearances per key
in commit order, and no two living relays inside one shard.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import asyncpg
import pytest

from tests.integration.relaying import (
    FAST,
    RecordingBroker,
    Verdict,
    eventually,
    judge,
    prepare,
    race,
    relaying,
)
from towpath.backoff import RetryPolicy
from towpath.brokers.ports import OutboundMessage
from towpath.deadletters import Action, Filter, carry_out, make_plan
from towpath.errors import MessageRefused
from towpath.relay import Relay, RelayOptions

T = TypeVar("T")

pytestmark = pytest.mark.timeout(300)

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


_UNDECIDED = """
select exists (select from towpath.publish_gate) or exists (select from towpath.parked_message)
    or exists (select from towpath.dead_letter where state = 'open')
"""


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
        poison, gates = self._poison, self._gates
        poison.put_aside = self._step(poison.put_aside)  # type: ignore[method-assign]
        gates.parked = self._step(gates.parked)  # type: ignore[method-assign]
        gates.released = self._step(gates.released)  # type: ignore[method-assign]
        gates.settle = self._step(gates.settle)  # type: ignore[method-assign]

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
        self.policy: str | None = None
        self.dropped: set[tuple[str, int]] = set()
        """Messages discarded by a person."""
        self._cured: set[tuple[str, int]] = set()
        self._is_written = asyncio.Event()

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

    async def host(self) -> None:
        """One machine: a relay runs for a while, stops or dies, and another is started."""
        while not self._is_written.is_set() or not await self._is_over():
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

    async def _is_over(self) -> bool:
        """Whether relays have nothing more to do."""
        if not self.is_complete():
            return False
        connection = await asyncpg.connect(self.url)
        try:
            return not await connection.fetchval(_UNDECIDED)
        finally:
            await connection.close(timeout=10)

    def is_complete(self) -> bool:
        """Whether everything committed has arrived."""
        return self.verdict().lost == 0

    def verdict(self) -> Verdict:
        """Over everything that nobody discarded."""
        return judge((name for name in self.committed if name not in self.dropped), self.broker)

    def poison(self, destination_policy: str) -> None:
        """From now on the broker refuses some messages until a person decides about them."""
        self.policy = destination_policy
        self.broker.refuse = self._refusal

    def _refusal(self, message: OutboundMessage) -> MessageRefused | None:
        if (
            message.payload == b"ghost"
            or int(message.payload or 0) % 13
            or self._name(message) in self._cured
        ):
            return None
        return MessageRefused("too_large")

    def _name(self, message: OutboundMessage) -> tuple[str, int]:
        return message.key or "", int(message.payload or 0)

    async def decide(self) -> None:
        """A person replays, or discards, what is in the catalog, as long as there is anything."""
        connection = await asyncpg.connect(self.url)
        try:
            while (
                not self._is_written.is_set()
                or not self.is_complete()
                or await connection.fetchval(_UNDECIDED)
            ):
                await asyncio.sleep(self.rng.random() * 0.3)
                for letter in await connection.fetch(
                    "select id, key, payload from towpath.dead_letter where state = 'open'"
                ):
                    name = (letter["key"], int(letter["payload"]))
                    action: Action = "replay"
                    if name in self.dropped or (name not in self._cured and self.rng.random() < 0.4):
                        action = "discard"
                        self.dropped.add(name)
                    elif self.rng.random() < 0.7:  # else the replay is in vain
                        self._cured.add(name)
                    plan = await make_plan(connection, Filter(ids=(letter["id"],)))
                    _, counts = await carry_out(connection, plan, action, actor="ann")
                    self.counts[action] += counts.done
        finally:
            await connection.close(timeout=10)

    async def run(self, relays: int, writers: int, seconds: float) -> None:
        """Write for some seconds, longer on a busy machine, then wait until everything arrived."""
        told = asyncio.Event()
        async with asyncio.timeout(seconds + 200), asyncio.TaskGroup() as tasks:
            writing = [
                tasks.create_task(race(self.url, self.committed, writer=number, until=told, seed=self.seed))
                for number in range(writers)
            ]
            for _ in range(relays):
                tasks.create_task(self.host())
            if self.policy is not None:
                tasks.create_task(self.decide())
            await asyncio.sleep(seconds)
            while not self._is_enough():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            told.set()
            await asyncio.gather(*writing)
            self._is_written.set()

    def _is_enough(self) -> bool:
        decided = self.policy is None or (self.counts["replay"] > 0 and self.counts["discard"] > 0)
        return decided and len(self.committed) > 100


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


@pytest.mark.parametrize("policy", ["park_key", "block"])
async def test_keys_and_shards_held_for_a_decision_lose_and_invert_nothing_whatever_crashes(
    db: "asyncpg.Connection[Any]", migrated_url: str, scale: float, policy: str
) -> None:
    """R4, R5, R8, R23: every thirteenth message of a key is refused until a person replays or discards it."""
    await prepare(db)
    await db.execute(
        "insert into towpath.destination (name, address, on_poison) values ('orders', 'orders', $1)", policy
    )
    for seed in range(max(1, int(scale))):
        history = History(migrated_url, seed)
        history.poison(policy)
        await db.execute("update hot set v = v + 1000000")
        await history.run(relays=2, writers=6, seconds=5)
        found = history.verdict()
        facts = f"seed {seed}: {len(history.committed)} commits, {found}, {dict(history.counts)}"
        print(facts)
        assert (found.lost, found.ghosts, found.inversions) == (0, 0, 0), facts
        assert history.counts["overlaps"] == 0, facts
        assert history.dropped.isdisjoint(
            (each.message.key, int(each.message.payload or 0))
            for each in history.broker.arrivals
            if each.message.payload != b"ghost"
        ), facts
        assert await db.fetchval(_UNDECIDED) is False


async def test_without_mishaps_relays_that_come_and_go_double_nothing(
    db: "asyncpg.Connection[Any]", migrated_url: str
) -> None:
    """R5: an orderly hand-over repeats no message."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker(before=_take_a_moment)
    patient = replace(OPTIONS, lease=30.0, publish_deadline=15.0)
    until, is_written = time.monotonic() + 6, asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        writing = [
            tasks.create_task(race(migrated_url, committed, writer=number, until=until))
            for number in range(6)
        ]

        async def come_and_go(first: float) -> None:
            await asyncio.sleep(first)
            while not is_written.is_set() or judge(committed, broker).lost:
                stop = asyncio.Event()
                running = asyncio.create_task(Relay(migrated_url, broker, patient).run(stop))
                await asyncio.sleep(1.5)
                stop.set()
                await running

        tasks.create_task(come_and_go(0.0))
        tasks.create_task(come_and_go(0.7))
        await asyncio.gather(*writing)
        is_written.set()
    assert judge(committed, broker) == Verdict(lost=0, ghosts=0, duplicates=0, inversions=0)


@asynccontextmanager
async def working(url: str, committed: list[tuple[str, int]]) -> AsyncIterator[None]:
    """Writers race meanwhile."""
    until = time.monotonic() + 300
    writers = [asyncio.create_task(race(url, committed, writer=number, until=until)) for number in range(4)]
    try:
        yield
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.wait(writers)


def are_fair(relays: Sequence[Relay]) -> bool:
    """Whether they hold every shard once, and each as many as the others or one more."""
    held = [relay.status().shards for relay in relays]
    sizes = [len(each) for each in held]
    every = sorted(number for each in held for number in each)
    return every == list(range(16)) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_relays_share_the_shards_fairly_whoever_joins_leaves_or_dies(
    db: "asyncpg.Connection[Any]", migrated_url: str, count: int
) -> None:
    """P2, R4, R5: and nothing is lost or inverted meanwhile."""
    await prepare(db)
    committed: list[tuple[str, int]] = []
    broker = RecordingBroker(before=_take_a_moment)
    async with AsyncExitStack() as stack:
        relays = [
            await stack.enter_async_context(relaying(migrated_url, broker, FAST)) for _ in range(count - 1)
        ]
        await eventually(lambda: are_fair(relays), seconds=60)
        async with working(migrated_url, committed):
            async with relaying(migrated_url, broker, FAST) as joined:
                await eventually(lambda: are_fair([*relays, joined]), seconds=60)
            await eventually(lambda: are_fair(relays), seconds=60)
            async with relaying(migrated_url, broker, FAST) as dying:
                await eventually(lambda: are_fair([*relays, dying]), seconds=60)
                dying._heartbeat.leave = _nothing  # type: ignore[method-assign]
            await eventually(lambda: are_fair(relays), seconds=60)
            before = len(committed)
            await eventually(lambda: len(committed) > before + 50, seconds=60)
        await eventually(lambda: judge(committed, broker).lost == 0, seconds=60)
    found = judge(committed, broker)
    assert (found.lost, found.inversions) == (0, 0)
