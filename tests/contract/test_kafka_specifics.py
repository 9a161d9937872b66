"""What only Kafka does: partitions, batches, idempotence, offsets, rebalances."""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.partitioner import DefaultPartitioner

from tests.contract.rigs import (
    KAFKA_OPTIONS,
    Listener,
    Rig,
    eventually,
    numbers,
    receive,
    receive_rest,
    receive_shared,
)
from towpath.brokers.factory import broker_from_url
from towpath.brokers.kafka import watchdog as watchdog_module
from towpath.brokers.kafka.publisher import KafkaPublisher
from towpath.brokers.kafka.subscriber import KafkaSubscriber
from towpath.brokers.ports import Bookmark, Mark, OutboundMessage, PublishResult, Subscriber, Subscription
from towpath.errors import BrokerUnavailable, ConfigurationError
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import EmbeddedKafka, KafkaServer

pytestmark = pytest.mark.services


@pytest.fixture
async def kafka_admin(kafka_server: KafkaServer) -> AsyncIterator[AIOKafkaAdminClient]:
    """The library's own admin client."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_server.bootstrap)
    await admin.start()
    yield admin
    await admin.close()


async def _topic(admin: AIOKafkaAdminClient, partitions: int = 1, **config: str) -> str:
    name = f"t.{uuid.uuid4().hex[:8]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=settings)])
    await _listed(admin, name)
    return name


async def _listed(admin: AIOKafkaAdminClient, name: str, *, is_there: bool = True) -> None:
    """Wait until the broker knows what the controller was told."""
    async with asyncio.timeout(60):
        while (name in await admin.list_topics()) is not is_there:  # noqa: ASYNC110 - the broker is being told
            await asyncio.sleep(0.02)


def _opened(subscriber: Subscriber) -> KafkaSubscriber:
    assert isinstance(subscriber, KafkaSubscriber)
    return subscriber


async def test_keys_land_on_the_partition_that_other_clients_choose(kafka_rig: Rig) -> None:
    """Order per key also holds beside Java producers."""
    keys = [f"key-{number}" for number in range(40)] + ["", "ключ"]
    await kafka_rig.publish_all([kafka_rig.message(number, key) for number, key in enumerate(keys)])
    for delivery in await receive(await kafka_rig.subscribe(), len(keys)):
        expected = DefaultPartitioner()(str(delivery.key).encode(), [0, 1, 2, 3], [])
        assert delivery.partition == f"{kafka_rig.address}:{expected}"


async def test_messages_without_a_key_are_spread_by_their_id(kafka_rig: Rig) -> None:
    """Published again, a message lands where it was."""
    messages = [kafka_rig.message(number, None) for number in range(40)]
    await kafka_rig.publish_all(messages)
    await kafka_rig.publish_all(messages)
    partitions: dict[bytes | None, set[str]] = {}
    for delivery in await receive(await kafka_rig.subscribe(), 80):
        partitions.setdefault(delivery.value, set()).add(delivery.partition)
    assert all(len(where) == 1 for where in partitions.values())
    assert len(set.union(*partitions.values())) == 4


async def test_a_batch_the_broker_refuses_is_halved_until_the_culprit_is_found(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient
) -> None:
    """R8, R23: the topic's own limit is below ours; neighbours arrive, followers of the key wait."""
    topic = await _topic(kafka_admin, max_message_bytes="8000")
    window = [kafka_rig.message(number, f"k{number % 10}", address=topic) for number in range(60)]
    for number in (17, 33):
        window[number] = kafka_rig.message(number, f"k{number % 10}", address=topic, payload=b"x" * 9000)
    result = await kafka_rig.publish(window, timeout_seconds=60)
    withheld = {27, 37, 47, 57, 43, 53}
    reasons = {index: refusal.reason for index, refusal in result.refused.items()}
    assert reasons == {17: "too_large", 33: "too_large"}
    assert result.acknowledged == set(range(60)) - {17, 33} - withheld
    assert result.unavailable is None


async def test_an_unkeyed_message_in_a_compacted_topic_is_refused_alone(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient
) -> None:
    """R8: the client library does not know the broker's code for it."""
    topic = await _topic(kafka_admin, cleanup_policy="compact")
    window = [kafka_rig.message(number, None if number == 4 else "k", address=topic) for number in range(8)]
    result = await kafka_rig.publish(window, timeout_seconds=60)
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {4: "invalid_record"}
    assert result.acknowledged == set(range(8)) - {4}


async def test_a_broker_that_refuses_timestamps_is_a_configuration_failure(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: a wrong clock puts nothing aside."""
    topic = await _topic(kafka_admin, message_timestamp_before_max_ms="60000")
    real_time = time.time
    monkeypatch.setattr("towpath.brokers.kafka.lanes.time.time", lambda: real_time() - 7200)
    with pytest.raises(ConfigurationError, match="clock"):
        await kafka_rig.publish([kafka_rig.message(0, address=topic)])
    monkeypatch.undo()
    await kafka_rig.publish_all([kafka_rig.message(0, address=topic)])


async def test_a_producer_in_a_fatal_state_is_replaced(kafka_rig: Rig) -> None:
    """R14: a broken sequence never heals by itself."""
    publisher = kafka_rig.broker.publisher()
    assert isinstance(publisher, KafkaPublisher)
    assert (await publisher.publish([kafka_rig.message(0)], timeout_seconds=60)).acknowledged == {0}
    assert publisher._producer is not None
    sequences = publisher._producer._txn_manager._sequence_numbers
    for topic_partition in sequences:
        sequences[topic_partition] += 100
    result = await publisher.publish([kafka_rig.message(1)], timeout_seconds=60)
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert not result.acknowledged
    assert (await publisher.publish([kafka_rig.message(1)], timeout_seconds=60)).acknowledged == {0}
    await publisher.aclose()
    assert numbers(await receive(await kafka_rig.subscribe(), 2)) == [0, 1]


async def test_missing_topics_are_made_where_the_option_says_so(
    kafka_rig: Rig, kafka_server: KafkaServer
) -> None:
    """The partition count is the option's."""
    options = {**KAFKA_OPTIONS, "create_topics": True, "partitions": 3}
    broker = broker_from_url(f"kafka://{kafka_server.bootstrap}", options)
    topic = f"made.{uuid.uuid4().hex[:8]}"
    publisher = broker.publisher()
    window = [kafka_rig.message(number, f"k{number}", address=topic) for number in range(30)]
    result = await publisher.publish(window, timeout_seconds=60)
    await publisher.aclose()
    assert result == PublishResult(acknowledged=set(range(30)))
    subscriber = broker.subscriber(Subscription(kafka_rig.group, (topic,), 100, 1 << 20))
    kafka_rig.opened.append(subscriber)
    await subscriber.start(Listener())
    received = await receive(subscriber, 30)
    assert {delivery.partition for delivery in received} == {f"{topic}:{number}" for number in range(3)}


async def test_looking_for_a_missing_topic_does_not_make_it(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient
) -> None:
    """A metadata request for a name may create it; ours never do."""
    with pytest.raises(ConfigurationError):
        await kafka_rig.publish([kafka_rig.message(0, address="typo")])
    assert "typo" not in await kafka_admin.list_topics()


async def test_a_topic_made_again_is_read_from_its_new_beginning(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient
) -> None:
    """C24: offsets that begin anew are new messages under a new epoch, with other coordinates."""
    topic = await _topic(kafka_admin)
    subscriber = kafka_rig.broker.subscriber(Subscription(kafka_rig.group, (topic,), 100, 1 << 20))
    kafka_rig.opened.append(subscriber)
    await kafka_rig.publish_all([kafka_rig.message(number, address=topic) for number in range(5)])
    await subscriber.start(Listener())
    before = await receive(subscriber, 5)
    subscriber.acknowledge(before)
    await eventually(lambda: Mark(5) in subscriber.marks.values())
    await kafka_admin.delete_topics([topic])
    await _listed(kafka_admin, topic, is_there=False)
    await asyncio.sleep(1)
    await kafka_admin.create_topics([NewTopic(topic, 1, 1)])
    await _listed(kafka_admin, topic)
    await kafka_rig.publish_all([kafka_rig.message(10 + number, address=topic) for number in range(3)])
    after = await receive(subscriber, 3)
    assert numbers(after) == [10, 11, 12]
    assert not any(subscriber.is_current(delivery) for delivery in before)
    assert not {each.coordinates for each in before} & {each.coordinates for each in after}


async def _make_anew(bootstrap: str, topic: str, values: Sequence[int]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([topic])
        while (await admin.create_topics([NewTopic(topic, 1, 1)])).topic_errors[0][1]:  # noqa: ASYNC110 - it is going
            await asyncio.sleep(0.05)
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for value in values:
            await producer.send_and_wait(topic, str(value).encode(), partition=0)


async def test_a_topic_made_anew_before_a_member_notices_is_not_read_on_in_its_middle(
    kafka_rig: Rig, kafka_admin: AIOKafkaAdminClient, kafka_server: KafkaServer
) -> None:
    """C24, C25: the new topic reaches past the member's place, which it commits there, too."""
    topic = await _topic(kafka_admin)
    name = f"{topic}:0"
    subscriber = kafka_rig.broker.subscriber(Subscription(kafka_rig.group, (topic,), 100, 1 << 20))
    kafka_rig.opened.append(subscriber)
    await kafka_rig.publish_all([kafka_rig.message(number, address=topic) for number in range(6)])
    listener = Listener()
    await subscriber.start(listener)
    *settled, running = await receive(subscriber, 6)
    subscriber.acknowledge(settled)
    await eventually(lambda: subscriber.marks[name].position == 5)
    listener.noted = {name: Bookmark(5)}
    made_anew = threading.Thread(
        target=asyncio.run, args=(_make_anew(kafka_server.bootstrap, topic, range(10, 20)),)
    )
    made_anew.start()
    made_anew.join()  # while the member's loop stands still
    subscriber.acknowledge([running])
    await eventually(lambda: name in subscriber.marks and subscriber.marks[name].refusal is not None)
    listener.noted = {name: Bookmark(5, word=0)}
    wanted = range(10, 20)
    received = await receive_rest(subscriber, wanted=wanted)
    assert set(wanted) <= set(numbers(received))


async def test_a_drain_that_takes_too_long_does_not_hold_up_the_group(kafka_rig: Rig) -> None:
    """S2: at most 0.6 of the rebalance timeout, then the partitions go."""
    await kafka_rig.publish_all([kafka_rig.message(number, f"k{number}") for number in range(8)])
    listener = Listener()
    first = await kafka_rig.subscribe(listener=listener)
    received = await receive(first, 8)
    forever = asyncio.Event()

    async def never() -> None:
        await forever.wait()

    listener.while_revoking = never
    second = await kafka_rig.subscribe()
    assert max(listener.seconds) <= 6
    first.acknowledge(received)
    of_second, of_first = await receive_shared(8, second, first)
    assert sorted(numbers(of_second + of_first)) == list(range(8)), "the late acknowledgements were stale"


async def test_members_that_come_and_go_lose_and_double_nothing(kafka_rig: Rig, scale: float) -> None:
    """S1: every message is acknowledged at least once, and after the last commit none is left."""
    count = int(2000 * scale)
    await kafka_rig.publish_all([kafka_rig.message(number, f"k{number % 50}") for number in range(count)])
    settled: dict[int, int] = {}
    stop = asyncio.Event()

    async def member() -> None:
        subscriber = await kafka_rig.subscribe(max_in_flight=50, is_waiting=False)
        while not stop.is_set():
            batch = await subscriber.receive(20, timeout_seconds=0.1)
            await asyncio.sleep(0.002)
            for delivery in batch:
                if subscriber.is_current(delivery):
                    settled[int(delivery.value or b"")] = settled.get(int(delivery.value or b""), 0) + 1
            subscriber.acknowledge(batch)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(member())
            await asyncio.sleep(0.7)
        leaver = kafka_rig.opened[0]
        await leaver.aclose()
        await eventually(lambda: len(settled) == count, timeout_seconds=60)
        stop.set()
    for subscriber in kafka_rig.opened:
        await subscriber.aclose()
    assert set(settled) == set(range(count))
    assert await receive_rest(await kafka_rig.subscribe(), 1.5) == []


async def test_a_consumer_that_stopped_fetching_is_replaced(
    kafka_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: the library's fetcher is stopped behind its back."""
    monkeypatch.setattr(watchdog_module, "_STALL_SECONDS", 3.0)
    monkeypatch.setattr(watchdog_module, "_ALIVE_SECONDS", 2.0)
    subscriber = _opened(await kafka_rig.subscribe())
    session = subscriber._session
    assert session is not None
    assert session._consumer is not None
    session._consumer.pause(*session._consumer.assignment())
    await kafka_rig.publish_all([kafka_rig.message(1)])
    assert numbers(await receive(subscriber, 1)) == [1]
    assert subscriber._session is not session


async def test_a_consumer_whose_poll_fails_is_replaced(
    kafka_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: whatever the library raises, with `last_error` telling why meanwhile."""
    subscriber = _opened(await kafka_rig.subscribe())
    session = subscriber._session
    assert session is not None

    async def fail(*_: object, **__: object) -> None:
        raise kafka_errors.CorruptRecordException("Invalid CRC")

    monkeypatch.setattr(session._consumer, "getmany", fail)
    await eventually(lambda: subscriber._session is not session)
    await kafka_rig.publish_all([kafka_rig.message(1)])
    assert numbers(await receive(subscriber, 1)) == [1]


async def test_a_bug_in_the_poll_loop_is_raised_to_whoever_receives(
    kafka_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: the member ends with it, instead of waiting for ever."""
    subscriber = _opened(await kafka_rig.subscribe())
    session = subscriber._session
    assert session is not None

    async def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(session._consumer, "getmany", fail)
    with pytest.raises(ZeroDivisionError):
        await receive(subscriber, 1)


@pytest.fixture
async def guarded_kafka() -> AsyncIterator[str]:
    """host:port of a broker that wants a user name and a password."""
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    settings = {
        "listener.security.protocol.map": "DIRECT:PLAINTEXT,PROXIED:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.proxied.plain.sasl.jaas.config": f'{module} required user_alice="secret";',
    }
    with KafkaServer(settings=settings) as server:
        async with TcpProxy("127.0.0.1", server.proxied_port, port=server.advertised_port) as proxy:
            yield f"127.0.0.1:{proxy.port}"


async def test_refused_credentials_are_a_configuration_failure(guarded_kafka: str) -> None:
    """O2: the client library hides them behind a failed connection."""
    topic, group = f"t{uuid.uuid4().hex[:8]}", f"g{uuid.uuid4().hex[:8]}"
    for password, is_right in (("secret", True), ("wrong", False)):
        broker = broker_from_url(f"kafka://alice:{password}@{guarded_kafka}", KAFKA_OPTIONS)
        admin, publisher = broker.admin(), broker.publisher()
        subscriber = broker.subscriber(Subscription(group, (topic,), 10, 1000))
        expected = nullcontext() if is_right else pytest.raises(ConfigurationError, match="password")
        with expected:
            await admin.apply([topic], [], partitions=1)
        with expected:
            await publisher.start()
        with expected:
            await subscriber.start(Listener())
        for each in (admin, publisher, subscriber):
            await each.aclose()


async def test_the_embedded_broker_works_without_idempotence(embedded_kafka: EmbeddedKafka) -> None:
    """The broker of the demo: in order, with headers, redelivered and committed."""
    options = {**KAFKA_OPTIONS, "enable_idempotence": False}
    broker = broker_from_url(f"kafka://{embedded_kafka.bootstrap}", options)
    topic, group = f"t{uuid.uuid4().hex[:8]}", f"g{uuid.uuid4().hex[:8]}"
    admin = broker.admin()
    await admin.apply([topic], [], partitions=3)
    await admin.aclose()
    publisher = broker.publisher()
    headers = (("h", b"\xff"), ("h", b""))
    window = [
        OutboundMessage(uuid.uuid4(), number, topic, "t", f"k{number % 5}", 0, headers, b"%d" % number)
        for number in range(50)
    ]
    assert (await publisher.publish(window, timeout_seconds=60)).acknowledged == set(range(50))
    await publisher.aclose()
    subscriber = broker.subscriber(Subscription(group, (topic,), 100, 1 << 20))
    await subscriber.start(Listener())
    received = await receive(subscriber, 50)
    for key in range(5):
        assert [n for n in numbers(received) if n % 5 == key] == list(range(key, 50, 5))
    assert received[0].headers == (("h", b"\xff"), ("h", b""))
    subscriber.acknowledge(received[:10])
    await subscriber.aclose()
    subscriber = broker.subscriber(Subscription(group, (topic,), 100, 1 << 20))
    await subscriber.start(Listener())
    again = await receive(subscriber, 40)
    assert not set(numbers(again)) & set(numbers(received[:10]))
    await subscriber.aclose()


async def test_an_idempotent_producer_on_the_embedded_broker_names_the_option(
    embedded_kafka: EmbeddedKafka,
) -> None:
    """O2."""
    publisher = broker_from_url(f"kafka://{embedded_kafka.bootstrap}").publisher()
    with pytest.raises((BrokerUnavailable, ConfigurationError), match="enable_idempotence"):
        await publisher.start()
    await publisher.aclose()
