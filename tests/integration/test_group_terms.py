"""What all members of a group must agree on: its ordering, and at RabbitMQ how many queues it has."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aio_pika
import pytest
from uuid_utils.compat import uuid7

from consumers.groups.orders.app import app as orders
from tests.fixtures.fix_cli import Run
from tests.fixtures.json_documents import check_document
from tests.integration.engine import Engine, Note, Posted, bench, depot, until
from tests.integration.relaying import FAST, RecordingBroker
from tests.integration.wired import new_name
from towpath.app import App, Ordering
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import ROUTING_SLOTS, OutboundMessage
from towpath.consumer.engine import Consumer
from towpath.context import Call
from towpath.errors import GroupMismatch
from towpath.outcomes import Snooze
from towpath.relay import Relay
from towpath.store.database import Database

TARGET = "consumers.groups.orders.app:app"


def sorting(ordering: Ordering = "key") -> App:
    """The depot, with one handler that makes its first message wait for an hour."""
    app = depot(ordering=ordering)

    @app.idempotent()
    async def sort(parcel: Posted, call: Call) -> None:
        if parcel.number == 0:
            raise Snooze("1h")

    return app


async def refusal(engine: Engine, app: App) -> str:
    """Why a member of this app is refused, in one line."""
    consumer = Consumer(app, Database(engine.url, pool_size=6), engine.broker, engine.settings)
    with pytest.raises(GroupMismatch) as refused:
        await asyncio.wait_for(consumer.run(asyncio.Event()), 60)
    assert "\n" not in str(refused.value)
    return str(refused.value)


async def ordering_of(engine: Engine) -> str:
    ordering: str = await engine.db.fetchval(
        "select ordering from towpath.consumer_group where name = 'depot'"
    )
    return ordering


async def test_another_ordering_is_refused_while_a_member_lives(migrated_url: str) -> None:
    """C10, O2: also a second app under the same name."""
    async with bench(sorting(), migrated_url) as engine, engine.member():
        told = await refusal(engine, sorting("none"))

        assert told == (
            "the group depot is ordered by 'key' and this app says 'none', while 1 members of it are alive: "
            "stop them first, or give this app another name"
        )
        await engine.reaches(await engine.publish(Posted("a", 1)), "SUCCEEDED")


async def test_another_ordering_is_refused_while_a_key_waits_behind_its_gate(migrated_url: str) -> None:
    """C10: whoever ran the followers in another order would let them pass."""
    async with bench(sorting(), migrated_url) as engine:
        async with engine.member():
            head, follower = await engine.publish(Posted("a")), await engine.publish(Posted("a", 1))
            await engine.reaches(head, "WAITING")
            await engine.reaches(follower, "PARKED")

        told = await refusal(engine, sorting("partition"))

        assert "while 2 of its tasks stand in that order: let members with ordering='key' finish them" in told
        assert await ordering_of(engine) == "key"
        async with engine.member():
            await engine.db.execute(
                "update towpath.task set payload = $1 where id = $2", b'{"parcel":"a","number":2}', head
            )
            await engine.db.execute("update towpath.task set due_at = towpath.clock() where id = $1", head)
            await engine.reaches(follower, "SUCCEEDED")
        async with engine.member(app=sorting("partition")):
            assert await ordering_of(engine) == "partition"


async def test_a_member_that_wakes_up_after_the_change_is_refused(migrated_url: str) -> None:
    """C10: its lease had run out, so nobody waited for it."""
    async with bench(sorting(), migrated_url) as engine:
        with pytest.raises(GroupMismatch, match="ordered by 'none' and this app says 'key', while 1 members"):
            await oversleep(engine)


async def oversleep(engine: Engine) -> None:
    """Lose the lease, and let somebody take over under another ordering meanwhile."""
    async with engine.member() as sleeper:
        await engine.db.execute(
            """
            update towpath.worker set lease_until = '-infinity';
            update towpath.consumer_group set ordering = 'none';
            insert into towpath.worker (id, consumer_group, host, lease_until)
              values (gen_random_uuid(), 'depot', 'elsewhere', 'infinity')
            """
        )
        await until(sleeper.task.done)


async def test_what_was_handed_back_takes_its_place_in_the_new_order(migrated_url: str) -> None:
    async with bench(sorting("partition"), migrated_url) as engine:
        id_ = await engine.publish(Posted("a", 1))
        await engine.db.execute(
            """
            insert into towpath.task
              (consumer_group, id, type, kind, source, key, lane, position, state, held_by)
              values ('depot', $1, 'parcel.posted', 'event', 'parcels', 'a', 'a', 1, 'ACCEPTED', 'broker')
            """,
            id_,
        )
        async with engine.member():
            row = await engine.reaches(id_, "SUCCEEDED")

    assert row["lane"] not in (None, "a")


async def test_members_with_other_handlers_run_side_by_side_and_say_so(
    migrated_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """O2: a deployment that rolls looks like this, and so does another app under the group's name."""
    other = depot()

    @other.idempotent()
    async def read(note: Note) -> None: ...

    async with bench(sorting(), migrated_url) as engine, engine.member(), engine.member(app=other):
        await engine.reaches(await engine.publish(Posted("a", 1)), "SUCCEEDED")

    (told,) = [record for record in caplog.records if record.message == "worker.handlers_differ"]
    fields: dict[str, Any] = vars(told)["towpath_fields"]
    assert (fields["only_here"], fields["only_there"]) == (["note.left"], ["parcel.posted"])


class Queues:
    """The orders group at RabbitMQ, under addresses of its own."""

    def __init__(
        self, db: Any, url: str, rabbit_url: str, towpath: Run, environment: pytest.MonkeyPatch
    ) -> None:
        self.db, self.url, self.rabbit_url = db, url, rabbit_url
        self._towpath, self._environment = towpath, environment
        self.addresses = {name: new_name(name) for name in orders.destinations}
        environment.setenv("TOWPATH_BROKER_URL", rabbit_url)

    async def prepare(self) -> None:
        for name, address in self.addresses.items():
            await self.db.execute("insert into towpath.destination values ($1, 0, $2)", name, address)

    async def cli(self, queues: int, *arguments: str) -> Any:
        """A command, with that many queues in its settings."""
        self._environment.setenv("TOWPATH_BROKER_OPTIONS", json.dumps({"queues_per_group": queues}))
        return await asyncio.to_thread(self._towpath, "broker", *arguments, "--app", TARGET)

    def consumer(self, queues: int) -> Consumer:
        broker = broker_from_url(self.rabbit_url, {"queues_per_group": queues})
        return Consumer(orders, Database(self.url, pool_size=6), broker)

    async def publish(self, *slots: int) -> None:
        """One message for each slot, as the relay would."""
        publisher = broker_from_url(self.rabbit_url, {}).publisher()
        address = self.addresses["orders"]
        window = [
            OutboundMessage(uuid7(), 0, address, "raw", str(slot), slot, (), b"%d" % slot) for slot in slots
        ]
        try:
            result = await publisher.publish(window, timeout_seconds=30)
        finally:
            await publisher.aclose()
        assert len(result.acknowledged) == len(slots)

    async def take(self) -> dict[str, list[int]]:
        """Empty every queue there may be; slots by number of the queue."""
        found: dict[str, list[int]] = {}
        async with await aio_pika.connect(self.rabbit_url) as connection:
            for number in range(4):
                channel = await connection.channel()
                try:
                    queue = await channel.declare_queue(
                        f"orders.{self.addresses['orders']}.{number}", passive=True
                    )
                except aio_pika.exceptions.ChannelNotFoundEntity:
                    continue
                found[str(number)] = slots = []
                async with queue.iterator(timeout=60) as messages:
                    for _ in range(queue.declaration_result.message_count or 0):
                        message = await anext(messages)
                        slots.append(int(message.body))
                        await message.ack()
        return found


@pytest.fixture
async def queues(
    db: Any, migrated_url: str, rabbit_url: str, towpath: Run, clean_environment: pytest.MonkeyPatch
) -> Queues:
    made = Queues(db, migrated_url, rabbit_url, towpath, clean_environment)
    await made.prepare()
    return made


async def test_other_queues_are_refused_until_they_are_changed_while_nothing_runs(queues: Queues) -> None:
    """C10, O2: a member that read fewer would leave the rest for ever, one with more would overtake."""
    assert (await queues.cli(2, "apply")).code == 0
    known = "the group orders has 2 queues per address and queues_per_group says 3: set it to 2"

    refused = await queues.cli(3, "apply")
    assert (refused.code, known in refused.err, refused.err.count("\n")) == (1, True, 1)
    assert known in (await queues.cli(3, "check")).out
    with pytest.raises(GroupMismatch, match=known):
        await queues.consumer(3).run(asyncio.Event())
    await queues.publish(*range(ROUTING_SLOTS))
    assert (await queues.cli(3, "rollover")).err.count("messages wait in the queue orders.") == 1
    assert [len(slots) for slots in (await queues.take()).values()] == [32, 32]

    told = (await queues.cli(3, "rollover", "--reason", "more members", "--json")).out
    assert json.loads(told) == {"group": "orders", "before": 2, "queues": 3}
    check_document(["broker", "rollover", "--json"], told)

    await queues.publish(*range(ROUTING_SLOTS))
    spread = await queues.take()
    assert {number: {slot % 3 for slot in slots} for number, slots in spread.items()} == {
        "0": {0},
        "1": {1},
        "2": {2},
    }
    assert Counter(slot for slots in spread.values() for slot in slots) == Counter(range(ROUTING_SLOTS))
    assert (await queues.cli(3, "check")).code == 0
    assert (await queues.cli(2, "check")).code == 3
    async with living(queues.consumer(3)):
        pass


async def test_queues_go_when_there_are_to_be_fewer_also_after_an_interruption(queues: Queues) -> None:
    await queues.cli(3, "apply")
    async with await aio_pika.connect(queues.rabbit_url) as connection:  # what an interrupted one had done
        channel = await connection.channel()
        await channel.queue_delete(f"orders.{queues.addresses['orders']}.2")

    assert (await queues.cli(1, "rollover")).out == "orders: 1 queues per address, 3 before\n"

    await queues.publish(*range(ROUTING_SLOTS))
    assert {number: sorted(slots) for number, slots in (await queues.take()).items()} == {
        "0": list(range(ROUTING_SLOTS))
    }


@asynccontextmanager
async def living(process: Consumer | Relay) -> AsyncIterator[None]:
    """Run it from when it is ready to the end of the block."""
    stop = asyncio.Event()
    task = asyncio.create_task(process.run(stop))

    def is_ready() -> bool:
        if isinstance(process, Relay):
            return bool(process.status().shards)
        return process.health.is_ready

    try:
        await until(lambda: is_ready() or task.done(), seconds=60)
        yield
    finally:
        stop.set()
        await task


async def test_queues_are_not_changed_while_a_relay_or_a_member_lives(queues: Queues) -> None:
    await queues.cli(1, "apply")

    async with living(Relay(queues.url, RecordingBroker(), replace(FAST, lease=30))):
        assert "a relay holds leases: stop the relays" in (await queues.cli(2, "rollover")).err
    await queues.db.execute(
        """
        insert into towpath.worker (id, consumer_group, host, lease_until)
          values (gen_random_uuid(), 'orders', 'here', 'infinity')
        """
    )
    assert "1 members of orders are alive: stop them first" in (await queues.cli(2, "rollover")).err
