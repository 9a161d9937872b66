"""Messages that RabbitMQ dead-letters by itself: into the catalog, once, in agreement with their tasks."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import aiormq
import pytest
from uuid_utils.compat import uuid7

from tests.acceptance.world import World
from tests.integration.engine import Posted, Weigh, bench, depot, until
from tests.integration.wired import Wired, new_name, wired
from towpath.app import App
from towpath.brokers.rabbitmq import topology
from towpath.brokers.rabbitmq.topology import broker_dead_letter_address, group_queue
from towpath.crashpoints import ENVIRONMENT_VARIABLE, CrashPoint
from towpath.deadletters import Filter, carry_out, make_plan
from towpath.failures import Failure
from towpath.messages import load_headers
from towpath.outbox import emit, submit
from towpath.store.broker_deaths import BrokerDeathStore
from towpath.store.database import Database
from towpath.store.work import Standing, Work
from towpath.testing.services import RabbitServer

pytestmark = pytest.mark.services

HASTY = {
    "TOWPATH_WORKER__LEASE": "3s",
    "TOWPATH_WORKER__BEAT_EVERY": "500ms",
    "TOWPATH_WORKER__REAP_EVERY": "500ms",
}
REJECTED = Failure("dead", "broker_rejected", error_class="BrokerDeadLetter", fingerprint="broker_rejected")


@pytest.fixture
async def channel(rabbit_url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """Another client's."""
    connection = await aiormq.connect(rabbit_url)
    yield await connection.channel()
    await connection.close()


@pytest.fixture
def short_ttl(rabbit_server: RabbitServer) -> Iterator[str]:
    """A prefix of queues whose messages a policy lets expire at once."""
    name = new_name("ttl")
    rabbit_server.ctl(
        "set_policy", "--apply-to", "queues", name, f"^{name}.*[.][0-9]+$", '{"message-ttl": 1}'
    )
    yield name
    rabbit_server.ctl("clear_policy", name)


async def _refuse(channel: aiormq.abc.AbstractChannel, queue: str, *, requeue: bool) -> None:
    """Reject every message of a queue that comes; with `requeue` until the limit takes it away."""

    async def refuse(message: aiormq.abc.DeliveredMessage) -> None:
        await channel.basic_reject(message.delivery_tag or 0, requeue=requeue)

    await channel.basic_qos(prefetch_count=1)
    await channel.basic_consume(queue, refuse)


def _sorting(name: str) -> tuple[App, list[Posted]]:
    app, seen = App(name), list[Posted]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel)

    return app, seen


def _station(app: App, url: str, rabbit_url: str) -> Any:
    return wired(app, url, rabbit_url, {})


async def _waiting(channel: aiormq.abc.AbstractChannel, queue: str) -> int:
    declared = await channel.queue_declare(queue, passive=True)
    return declared.message_count or 0


async def _replay(engine: Wired) -> None:
    plan = await make_plan(engine.db, Filter())
    await carry_out(engine.db, plan, actor="ada")


@pytest.mark.parametrize("reason", ["rejected", "delivery_limit", "expired"])
async def test_what_the_broker_dead_letters_is_in_the_catalog_and_can_be_replayed(
    migrated_url: str,
    rabbit_url: str,
    channel: aiormq.abc.AbstractChannel,
    monkeypatch: pytest.MonkeyPatch,
    short_ttl: str,
    reason: str,
) -> None:
    """D6: with its bytes, headers, reason and queue; nothing is left at the broker, and nothing loops."""
    monkeypatch.setattr(topology, "DELIVERY_LIMIT", 2)
    app, seen = _sorting(short_ttl if reason == "expired" else new_name("depot"))
    async with _station(app, migrated_url, rabbit_url) as engine:
        address = engine.addresses["parcels"]
        queue, graveyard = group_queue(app.name, address, 0), broker_dead_letter_address(app.name, address)
        if reason != "expired":
            await _refuse(channel, queue, requeue=reason == "delivery_limit")
        ids = [await engine.publish(Posted("a", number), headers=(("h", b"\xff"),)) for number in range(2)]

        async def is_dead() -> bool:
            return await _waiting(channel, graveyard) == 2

        await until(is_dead)
        await channel.close()
        async with engine.member():
            for id_ in ids:
                row = await engine.reaches(id_, "DEAD")
            assert (row["kind"], row["lane"], row["held_by"]) == ("event", "a", "database")
            letters = await engine.letters()
            assert ids == sorted(letter["message_id"] for letter in letters)
            for number, letter in enumerate(sorted(letters, key=lambda each: each["message_id"])):
                assert (letter["stage"], letter["reason_code"]) == ("broker", f"broker_{reason}")
                assert json.loads(letter["payload"]) == {"parcel": "a", "number": number}
                headers = dict(load_headers(letter["headers"]))
                assert headers["h"] == b"\xff"
                assert headers["ce_type"] == b"parcel.posted"
                assert not [name for name in headers if name.startswith("x-")]
                origin = json.loads(letter["origin"])
                assert (origin["queue"], origin["reason"]) == (queue, reason)
            assert len(await engine.outbox("copy")) == 2
            assert seen == []
            await _replay(engine)
            for id_ in ids:
                await engine.reaches(id_, "SUCCEEDED")
            assert seen == [Posted("a", 0), Posted("a", 1)]
            assert len(await engine.letters()) == 2


async def test_bytes_that_the_group_refused_and_the_broker_dead_letters_are_one_dead_letter(
    migrated_url: str, rabbit_url: str, channel: aiormq.abc.AbstractChannel
) -> None:
    """D6, C11: a message has the same name in either queue."""
    app, _ = _sorting(new_name("depot"))
    async with _station(app, migrated_url, rabbit_url) as engine:
        address = engine.addresses["parcels"]
        properties = aiormq.spec.Basic.Properties(message_id="order-17")
        for target in (address, broker_dead_letter_address(app.name, address)):
            await channel.basic_publish(b"\0\xff", exchange=target, properties=properties)
        async with engine.member():

            async def is_ingested() -> bool:
                queues = [group_queue(app.name, address, 0), broker_dead_letter_address(app.name, address)]
                return sum([await _waiting(channel, queue) for queue in queues]) == 0

            await until(is_ingested)
            await until(lambda: _count(engine, 1, "select count(*) from towpath.dead_letter"))
        (letter,) = await engine.letters()
        assert (letter["payload"], letter["death_count"]) == (b"\0\xff", 1)


async def _count(engine: Any, expected: int, query: str) -> bool:
    return bool(expected == await engine.db.fetchval(query))


def _work(id_: UUID, *, has_body: bool = True) -> Work:
    payload = b'{"parcel":"a"}' if has_body else None
    kind = "event" if has_body else "task"
    return Work(
        id_, "parcel.weigh", kind, "tasks.depot", "a", "a", 7, payload, "application/json", (), None,
        has_body=has_body,
    )  # fmt: skip


async def test_a_broker_death_agrees_with_the_task_of_its_message(migrated_url: str) -> None:
    """D6: a task that waits for the broker ends DEAD with its letter; any other goes on, and says so."""
    alive, dead = uuid7(), uuid7()
    async with bench(depot(), migrated_url) as engine:
        database = Database(migrated_url, pool_size=2)
        await database.start()
        try:
            store = BrokerDeathStore(database, "depot", alive)
            await engine.db.execute(
                "insert into towpath.worker (id, consumer_group, host, lease_until) "
                "values ($1, 'depot', 'h', now() + interval '1 hour')",
                alive,
            )
            async with engine.db.transaction():
                submitted = (await submit(engine.db, Weigh("a", 1))).id
            assert await store.take(_work(submitted, has_body=False), REJECTED, origin=None) is None
            rows = {
                name: await engine.submit(Weigh("a", 2), **options)
                for name, options in {
                    "abandoned": {"state": "RUNNING", "worker": dead, "token": uuid7()},
                    "running": {"state": "RUNNING", "worker": alive, "token": uuid7()},
                    "kept": {"state": "RUNNING", "worker": dead, "token": uuid7(), "held_by": "database"},
                }.items()
            }
            assert {
                "abandoned": None,
                "running": Standing.BUSY,
                "kept": Standing.SETTLED,
            } == {name: await store.take(_work(id_), REJECTED, origin=None) for name, id_ in rows.items()}
            never = uuid7()
            assert await store.take(_work(never), REJECTED, origin=None) is None
            unknown = _work(uuid7(), has_body=False)
            assert await store.take(unknown, REJECTED, origin=None) is Standing.MISSING
            buried = [submitted, rows["abandoned"], never]
            for id_ in buried:
                assert await store.take(_work(id_), REJECTED, origin=None) is Standing.SETTLED, "a repeat"
        finally:
            await database.aclose()
        assert [await engine.state(id_) for id_ in buried] == ["DEAD"] * 3
        assert [await engine.state(rows[name]) for name in ("running", "kept")] == ["RUNNING"] * 2
        letters = {letter["message_id"]: letter for letter in await engine.letters()}
        assert dict.fromkeys(buried, 1) == {id_: letters[id_]["death_count"] for id_ in letters}
        assert json.loads(letters[submitted]["payload"]) == {"parcel": "a", "number": 1}
        moves = [
            (each["from_state"], each["to_state"]) for id_ in buried for each in await engine.events(id_)
        ]
        assert moves == [("ACCEPTED", "DEAD"), ("RUNNING", "DEAD"), (None, "DEAD")]


async def test_a_broker_death_of_a_lanes_head_lets_its_followers_go_on(migrated_url: str) -> None:
    """D6, C10: and its letter says how many passed."""
    async with bench(depot(), migrated_url) as engine:
        database = Database(migrated_url, pool_size=2)
        await database.start()
        try:
            head = await engine.submit(Weigh("a", 1), lane="a", position=1)
            follower = await engine.submit(
                Weigh("a", 2), lane="a", position=2, state="PARKED", held_by="database"
            )
            gate = "insert into towpath.key_gate values ('depot', 'tasks.depot', 'a', $1)"
            await engine.db.execute(gate, head)
            store = BrokerDeathStore(database, "depot", uuid7())
            assert await store.take(_work(head), REJECTED, origin=None) is None
        finally:
            await database.aclose()
        row = await engine.row(follower)
        assert (row["state"], row["waiting_for"]) == ("WAITING", "promoted")
        assert await engine.db.fetchval("select head from towpath.key_gate") == follower
        (letter,) = await engine.letters()
        assert letter["followers_passed"] == 1


@pytest.mark.parametrize("wire", ["rabbitmq"], indirect=True)
async def test_a_death_between_catalog_and_acknowledgement_repeats_nothing(
    world: World, rabbit_url: str, channel: aiormq.abc.AbstractChannel
) -> None:
    """D6, C6: by SIGKILL."""
    graveyard = broker_dead_letter_address(world.group, world.steps)
    await _refuse(channel, group_queue(world.group, world.steps, 0), requeue=False)
    world.relay()
    async with world.db.transaction():
        id_ = await emit(world.db, world.messages.step(key="a", n=1))

    async def is_dead() -> bool:
        return await _waiting(channel, graveyard) == 1

    await world.until("it is dead at the broker", is_dead)
    await channel.close()
    world.consumer("dies", **HASTY, **{ENVIRONMENT_VARIABLE: CrashPoint.BURIED_BEFORE_ACK})
    await world.died("dies")
    world.consumer("finishes", TOWPATH_WORKER__LEASE="1m")  # the other's may lapse soon, this one's not
    async with world.db.transaction():
        await emit(world.db, world.messages.step(key="a", n=2))

    await world.until_state("SUCCEEDED")
    watching = await aiormq.connect(rabbit_url)
    again = await watching.channel()

    async def is_gone() -> bool:
        return await _waiting(again, graveyard) == 0

    await world.until("it is acknowledged", is_gone)
    assert world.stop("finishes") == 0
    declared = await again.queue_declare(graveyard, passive=True)
    assert declared.message_count == 0
    await watching.close()
    letters = await world.db.fetch("select message_id, stage, death_count from towpath.dead_letter")
    assert [tuple(letter) for letter in letters] == [(id_, "broker", 1)]
    assert await world.states() == {"SUCCEEDED": 1, "DEAD": 1}
