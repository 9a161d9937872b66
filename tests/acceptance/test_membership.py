"""Members that join, leave, freeze and die at real brokers: nothing lost, nothing doubled, order kept."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Final

import pytest
from sqlalchemy import text

from tests.acceptance.ledger import Intention, judge
from tests.acceptance.world import QUICK, World
from tests.contract.rigs import Listener
from towpath.app import App
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import Delivery, Subscription
from towpath.consumer import engine
from towpath.consumer.engine import Consumer
from towpath.consumer.member import Member
from towpath.context import Tx
from towpath.outbox import emit_many
from towpath.settings import WorkerSettings
from towpath.store.database import Database

KEYS: Final = 40
ROUNDS: Final = 10
ROUND_SECONDS: Final = 2.0
PER_ROUND: Final = 150
LIVE_WORKERS: Final = "select count(*) from towpath.worker where lease_until > clock_timestamp()"
LAPSE: Final = "update towpath.worker set lease_until = '-infinity'"
FROZEN: Final = range(3, 9)
"""Rounds in which a member is frozen: longer than its lease and its session at the broker last."""
QUIET: Final = {"TOWPATH_TELEMETRY__LOG_LEVEL": "WARNING"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def group_of(world: World) -> App:
    """Handles the events of the world's group like its processes do, a little slower."""
    app, step_class = App(world.group), world.messages.step
    effect = text(
        "insert into effect (message_id, handler, key, n, attempt) values (:id, 'step', :key, :n, :attempt)"
    )

    @app.transactional()
    async def step(message: step_class, tx: Tx) -> None:  # type: ignore[valid-type]
        payload: Any = message
        await asyncio.sleep(0.02)
        values = {"id": tx.message_id, "key": payload.key, "n": payload.n, "attempt": tx.attempt.attempt}
        await tx.session.execute(effect, values)

    return app


@dataclass
class Here:
    """Members in this process, which can be looked into."""

    world: World
    app: App
    running: list[tuple[Consumer, asyncio.Event, "asyncio.Task[None]"]] = field(default_factory=list)

    def join(self) -> None:
        """One more."""
        settings = WorkerSettings(
            lease=timedelta(seconds=8), beat_every=timedelta(seconds=1), reap_every=timedelta(seconds=1)
        )
        broker = broker_from_url(self.world.broker.url, self.world.broker.options)
        consumer = Consumer(self.app, Database(self.world.database_url), broker, settings)
        stop = asyncio.Event()
        self.running.append((consumer, stop, asyncio.create_task(consumer.run(stop))))

    def is_idle(self) -> bool:
        """Whether all have joined, and count nothing in flight."""
        subscribers: list[Any] = [consumer.health.subscriber for consumer, _, _ in self.running]
        return all(consumer.health.is_ready for consumer, _, _ in self.running) and all(
            (each._intake.count, each._intake.size_bytes) == (0, 0) for each in subscribers
        )

    async def leave(self) -> None:
        """The one that has been there longest."""
        _, stop, task = self.running.pop(0)
        stop.set()
        async with asyncio.timeout(150):
            await task


async def emitted(world: World, numbers: dict[str, Any], count_: int, **fates: Any) -> list[Intention]:
    """Commit events spread over the keys."""
    keys = [f"k{number % KEYS}" for number in range(count_)]
    steps = [world.messages.step(key=key, n=next(numbers[key]), **fates) for key in keys]
    async with world.db.transaction():
        ids = await emit_many(world.db, steps)
    return [
        Intention(id_, "step", step.key, step.n, is_committed=True)
        for id_, step in zip(ids, steps, strict=True)
    ]


async def is_done(world: World, count_: int) -> None:
    query = "select count(*) from towpath.task where consumer_group = $1 and finished_at is not null"
    await world.until_counted(count_, query, world.group, every=0.3)


async def left_at_the_broker(world: World) -> list[Delivery]:
    """What a new member is given."""
    broker = broker_from_url(world.broker.url, world.broker.options)
    subscriber = broker.subscriber(Subscription(world.group, (world.steps,), 1000, 1 << 20))
    await subscriber.start(Listener())
    try:
        await world.until("a new member has joined", _truth(lambda: subscriber.is_connected))
        return list(await subscriber.receive(1000, timeout_seconds=2))
    finally:
        await subscriber.aclose()


def _truth(ask: Any) -> Any:
    async def answer() -> bool:
        return bool(ask())

    return answer


def _is_at_rest(member: Member) -> bool:
    """Whether it holds no message. (One that left may have been claiming: whoever is next gets those.)"""
    held, slots = member._held, member._held._slots
    taken = {limit.taken for limit in (slots._worker, slots._due, *slots._shared)}
    return (held.lanes._lanes, held.suspects, member._roster._tasks, taken) == ({}, [], set(), {0})


async def test_members_that_join_leave_and_freeze_lose_and_double_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1, C18, C10, S2: every two seconds under load; one freezes past its lease and its session."""
    members: list[Member] = []
    living: list[Member] = []

    class Watched(Member):
        async def run(self, stop: asyncio.Event) -> None:
            members.append(self)
            living.append(self)
            try:
                await super().run(stop)
            finally:
                living.remove(self)

    monkeypatch.setattr(engine, "Member", Watched)
    world.timing = QUICK
    world.relay()
    world.consumer("frozen", **QUIET)
    await world.until_counted(1, LIVE_WORKERS)
    frozen_id = await world.db.fetchval("select id from towpath.worker")
    world.consumer("steady", **QUIET)
    await world.until_counted(2, LIVE_WORKERS)
    here = Here(world, group_of(world))
    numbers = {f"k{number}": count(1) for number in range(KEYS)}
    intentions: list[Intention] = []
    for round_ in range(ROUNDS):
        intentions += await emitted(world, numbers, PER_ROUND)
        if round_ == FROZEN.start:
            world.suspend("frozen")
        elif round_ == FROZEN.stop:
            world.resume("frozen")
        if round_ % 3 == 2:
            await here.leave()
        else:
            here.join()
        await asyncio.sleep(ROUND_SECONDS)

    await is_done(world, len(intentions))
    await world.until_sent()

    assert (await judge(world.db, world.group, intentions)).problems() == []
    await world.until_counted(2 + len(here.running), LIVE_WORKERS)
    await world.until("nothing is in flight", _truth(here.is_idle))
    await world.until("they are at rest", _truth(lambda: all(map(_is_at_rest, living))))
    assert not await world.db.fetchval(f"{LIVE_WORKERS} and id = $1", frozen_id), "it is another one now"
    while here.running:
        await here.leave()
    assert [world.stop(name) for name in ("steady", "frozen")] == [0, 0]
    assert members, "nobody was watched"
    assert all(member._roster._tasks == set() for member in members)
    assert await left_at_the_broker(world) == []


async def test_only_the_message_that_kills_its_process_reaches_the_catalog(world: World) -> None:
    """C19, D5: SIGKILL in the handler each time, beside many others of the same claim."""
    limits = {"TOWPATH_WORKER__MAX_DELIVERIES": "3"}
    numbers = {f"k{number}": count(1) for number in range(KEYS)}
    before = await emitted(world, numbers, 10)
    killer = world.messages.step(key="killer", n=1, fate="kills", is_watched=True)
    async with world.db.transaction():
        (killer_id,) = await emit_many(world.db, [killer])
    after = await emitted(world, numbers, 200)
    after += await emitted(world, numbers, 1, fate="lingers", is_watched=True)
    world.relay()
    await world.until_sent()

    for death in range(3):
        world.consumer(f"consumer-{death}", **QUIET, **limits)
        await world.died(f"consumer-{death}")
        await world.db.execute(LAPSE)  # short leases would end under living workers, too
    world.consumer("survivor", **QUIET, **limits)
    await world.until_state("DEAD")
    await world.until_state("SUCCEEDED", len(before) + len(after))

    letters = await world.db.fetch("select message_id, reason_code from towpath.dead_letter")
    assert [(killer_id, "deliveries_exhausted")] == [tuple(letter) for letter in letters]
    happened = await world.db.fetch("select message_id from effect")
    assert sorted(row["message_id"] for row in happened) == sorted(
        each.message_id for each in (*before, *after)
    )
    beside = "select count(*) from towpath.task where deliveries > 1 and id <> $1"
    assert await world.db.fetchval(beside, killer_id) > 0, "some were claimed beside it, and went on"
