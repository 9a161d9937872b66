"""What only RabbitMQ does: routing, confirms, channels, queues with a single active consumer."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import aio_pika
import aiormq
import pytest
from aiormq import spec

from tests.contract.rigs import RABBIT_OPTIONS, Listener, Rig, eventually, numbers, receive, receive_rest
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology, PublishResult, Subscription, dead_letter_address
from towpath.brokers.rabbitmq.confirms import ConfirmChannel
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.session import ConsumerSession
from towpath.brokers.rabbitmq.subscriber import RabbitSubscriber
from towpath.brokers.rabbitmq.topology import broker_dead_letter_address, group_queue
from towpath.errors import BrokerUnavailable, ConfigurationError, TopologyError
from towpath.testing.proxy import Direction, TcpProxy
from towpath.testing.services import RabbitServer

pytestmark = pytest.mark.services


@pytest.fixture
async def raw_channel(rabbit_url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """The library's own channel."""
    connection = await aiormq.connect(rabbit_url)
    yield await connection.channel()
    await connection.close()


async def _exchange(channel: aiormq.abc.AbstractChannel) -> str:
    name = f"x.{uuid.uuid4().hex[:8]}"
    await channel.exchange_declare(name, exchange_type="topic", durable=True)
    return name


async def _take(channel: aiormq.abc.AbstractChannel, queue: str) -> aiormq.abc.DeliveredMessage:
    """One message, unsettled: a queue with a single active consumer cannot be asked for one."""
    taken: asyncio.Queue[aiormq.abc.DeliveredMessage] = asyncio.Queue()
    await channel.basic_consume(queue, taken.put)
    return await asyncio.wait_for(taken.get(), 60)


async def test_an_unroutable_message_is_refused_and_its_neighbours_arrive(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """R9, R23: mandatory, and nothing of its key is confirmed behind it."""
    nowhere = await _exchange(raw_channel)
    window = [
        rabbit_rig.message(0, "a"),
        rabbit_rig.message(1, "b", address=nowhere),
        rabbit_rig.message(2, "b", address=nowhere),
        rabbit_rig.message(3, "b"),
        rabbit_rig.message(4, None, address=nowhere),
    ]
    result = await rabbit_rig.publish(window)
    assert result.acknowledged == {0, 3}, "the order of a key is kept per address"
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {
        1: "unroutable",
        4: "unroutable",
    }


async def test_a_message_that_a_full_queue_rejects_is_refused(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """R23: nacks count like returns."""
    exchange = await _exchange(raw_channel)
    await raw_channel.queue_declare(
        exchange, durable=True, arguments={"x-max-length": 2, "x-overflow": "reject-publish"}
    )
    await raw_channel.queue_bind(exchange, exchange, routing_key="#")
    window = [rabbit_rig.message(number, "k", address=exchange) for number in range(6)]
    result = await rabbit_rig.publish(window)
    assert [refusal.reason for refusal in result.refused.values()] == ["nacked"]
    (first_refused,) = result.refused
    assert result.acknowledged == set(range(first_refused))


async def test_a_message_for_which_the_broker_closes_the_connection_is_found(
    rabbit_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: not taken for an outage; the neighbours arrive, followers of its key wait."""
    monkeypatch.setattr(Link, "frame_max_bytes", 1 << 20)
    window = [rabbit_rig.message(number, f"k{number % 5}") for number in range(15)]
    window[6] = rabbit_rig.message(6, "k1", headers=(("big", b"x" * 150_000),))
    result = await rabbit_rig.publish(window, timeout_seconds=60)
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {6: "refused_by_broker"}
    assert result.acknowledged == set(range(15)) - {6, 11}
    arriving = set(range(15)) - {6, 11}
    assert set(numbers(await receive_rest(await rabbit_rig.subscribe(), wanted=arriving))) == arriving


async def test_a_message_for_which_the_broker_closes_the_channel_is_found(
    rabbit_rig: Rig, rabbit_server: RabbitServer
) -> None:
    """R25: a body beyond the broker's own limit."""
    limit = "application:{}_env(rabbit, max_message_size{})."
    rabbit_server.ctl("eval", limit.format("set", ", 50000"))
    try:
        window = [rabbit_rig.message(number, None) for number in range(10)]
        window[4] = rabbit_rig.message(4, None, payload=b"x" * 60_000)
        result = await rabbit_rig.publish(window, timeout_seconds=60)
    finally:
        rabbit_server.ctl("eval", limit.format("set", ", 134217728"))
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {4: "refused_by_broker"}
    assert result.acknowledged == set(range(10)) - {4}


async def test_the_culprit_is_found_by_halves(
    rabbit_rig: Rig, rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: a thousand neighbours do not go one by one, and nothing of a key overtakes."""
    opened = 0
    open_channel = Link.confirm_channel

    async def count(link: Link) -> ConfirmChannel:
        nonlocal opened
        opened += 1
        return await open_channel(link)

    monkeypatch.setattr(Link, "confirm_channel", count)
    limit = "application:{}_env(rabbit, max_message_size{})."
    rabbit_server.ctl("eval", limit.format("set", ", 50000"))
    try:
        window = [rabbit_rig.message(number, f"k{number % 500}") for number in range(1000)]
        window[321] = rabbit_rig.message(321, "k321", payload=b"x" * 60_000)
        result = await rabbit_rig.publish(window, timeout_seconds=60)
    finally:
        rabbit_server.ctl("eval", limit.format("set", ", 134217728"))
    assert [*result.refused] == [321]
    assert result.acknowledged == set(range(1000)) - {321, 821}
    assert opened <= 12
    first_seen: dict[str | None, list[int]] = {}
    for delivery in await receive_rest(await rabbit_rig.subscribe(max_in_flight=5000)):
        number = int(delivery.value or b"")
        if number not in (of_key := first_seen.setdefault(delivery.key, [])):
            of_key.append(number)
    assert all(of_key == sorted(of_key) for of_key in first_seen.values())


async def test_an_exchange_that_may_not_be_written_to_is_a_configuration_failure(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """R25: the broker closes the channel for it; the neighbours arrive."""
    forbidden = f"x.{uuid.uuid4().hex[:8]}"
    await raw_channel.exchange_declare(forbidden, exchange_type="topic", durable=True)
    await raw_channel.exchange_delete(forbidden)
    await raw_channel.rpc(
        spec.Exchange.Declare(exchange=forbidden, exchange_type="topic", durable=True, internal=True)
    )
    window = [rabbit_rig.message(number, f"k{number}") for number in range(20)]
    window[7] = rabbit_rig.message(7, "k7", address=forbidden)
    result = await rabbit_rig.publish(window)
    assert result.acknowledged == set(range(20)) - {7}
    assert not result.refused
    assert isinstance(result.configuration, ConfigurationError)
    assert forbidden in str(result.configuration)


async def _count(channel: aiormq.abc.AbstractChannel, rig: Rig) -> int:
    """Messages that wait in the group's queue."""
    declared = await channel.queue_declare(group_queue(rig.group, rig.address, 0), passive=True)
    return declared.message_count or 0


async def test_a_window_does_not_wait_for_single_confirms(
    rabbit_rig: Rig, rabbit_proxy: TcpProxy, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """R16: a thousand are outstanding before the first is confirmed."""
    publisher = rabbit_rig.broker.publisher()
    await publisher.publish([rabbit_rig.message(0)], timeout_seconds=60)
    await rabbit_proxy.hang(Direction.REPLIES)
    window = [rabbit_rig.message(number, f"k{number}") for number in range(1000)]
    publishing = asyncio.create_task(publisher.publish(window, timeout_seconds=60))
    while await _count(raw_channel, rabbit_rig) < 1001:
        assert not publishing.done()
    await rabbit_proxy.restore()
    assert (await publishing).acknowledged == set(range(1000))
    await publisher.aclose()


@pytest.mark.parametrize("fault", ["cut", "hang", "half open", "slow"])
async def test_a_fault_in_the_middle_of_a_window_loses_and_reorders_nothing(
    rabbit_rig: Rig, rabbit_proxy: TcpProxy, raw_channel: aiormq.abc.AbstractChannel, fault: str
) -> None:
    """R4, R6, R10: acknowledged is at the broker; what is published again is a duplicate, in order."""
    publisher = rabbit_rig.broker.publisher()
    await publisher.publish([rabbit_rig.message(0, None)], timeout_seconds=60)
    window = [rabbit_rig.message(number, f"k{number % 20}", payload="number") for number in range(2000)]
    result = PublishResult()
    while result.unavailable is None and not result.acknowledged:
        before = await _count(raw_channel, rabbit_rig)
        seconds = 2 if fault != "slow" else 60
        publishing = asyncio.create_task(publisher.publish(window, timeout_seconds=seconds))
        while await _count(raw_channel, rabbit_rig) < before + 100 and not publishing.done():
            pass
        match fault:
            case "cut":
                await rabbit_proxy.drop_connections()
            case "hang":
                await rabbit_proxy.hang()
            case "half open":
                await rabbit_proxy.hang(Direction.REPLIES)
            case "slow":
                await rabbit_proxy.delay(0.01)
        result = await publishing
        if fault != "slow" and result.unavailable is None:  # the window was through before
            result = PublishResult()
            await rabbit_proxy.restore()
    if fault == "slow":
        assert result.acknowledged == set(range(2000))
    else:
        assert isinstance(result.unavailable, BrokerUnavailable)
        assert len(result.acknowledged) <= await _count(raw_channel, rabbit_rig)
    await rabbit_proxy.restore()
    rest = [message for index, message in enumerate(window) if index not in result.acknowledged]
    if rest:
        again = await publisher.publish(rest, timeout_seconds=60)
        assert len(again.acknowledged) == len(rest)
    await publisher.aclose()
    first_seen: dict[int, list[int]] = {}
    subscriber = await rabbit_rig.subscribe(max_in_flight=10_000)
    for number in numbers(await receive_rest(subscriber, wanted=range(2000))):
        if number not in (of_key := first_seen.setdefault(number % 20, [])):
            of_key.append(number)
    assert first_seen == {key: list(range(key, 2000, 20)) for key in range(20)}


async def test_a_broker_that_does_not_read_bounds_what_is_buffered(
    rabbit_rig: Rig, rabbit_proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: what waits in this process is one write, not the window."""
    buffered: list[int] = []
    write = ConfirmChannel.write

    def measure(channel: ConfirmChannel, numbers: Iterable[int], pieces: Iterable[bytes]) -> None:
        write(channel, numbers, pieces)
        buffered.append(channel._writer.transport.get_write_buffer_size())

    publisher = rabbit_rig.broker.publisher()
    await publisher.publish([rabbit_rig.message(0)], timeout_seconds=60)
    monkeypatch.setattr(ConfirmChannel, "write", measure)
    await rabbit_proxy.hang(Direction.REQUESTS)
    payload = b"x" * 190_000
    window = [rabbit_rig.message(number, f"k{number}", payload=payload) for number in range(300)]
    result = await publisher.publish(window, timeout_seconds=2)
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert 100_000 < max(buffered) < 1_000_000, f"57 MB were to be sent, {len(buffered)} writes"
    await publisher.aclose()


@pytest.fixture
def alarmed_server(rabbit_server: RabbitServer) -> Iterator[RabbitServer]:
    """A server with too little memory; it gets it back whatever happens."""
    rabbit_server.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    yield rabbit_server
    rabbit_server.ctl("set_vm_memory_high_watermark", "0.4")


async def test_an_alarm_of_the_broker_is_an_outage_that_ends_by_itself(
    rabbit_rig: Rig, alarmed_server: RabbitServer
) -> None:
    """R7: nothing is refused, and nothing more is written once the broker has said so."""
    publisher = rabbit_rig.broker.publisher()
    result = await publisher.publish([rabbit_rig.message(0)], timeout_seconds=2)
    while result.unavailable is None:  # the broker tells whoever publishes
        result = await publisher.publish([rabbit_rig.message(0)], timeout_seconds=2)
    assert not result.refused
    publishing = asyncio.create_task(publisher.publish([rabbit_rig.message(1)], timeout_seconds=60))
    await asyncio.to_thread(alarmed_server.ctl, "set_vm_memory_high_watermark", "0.4")
    assert (await publishing).acknowledged == {0}
    await publisher.aclose()


@pytest.mark.parametrize("size", [100_000, 131_072, 200_000])
async def test_bodies_of_several_frames_arrive(rabbit_rig: Rig, size: int) -> None:
    """Only headers must fit into one frame."""
    await rabbit_rig.publish_all([rabbit_rig.message(0, payload=b"x" * (size - 1))])
    (delivery,) = await receive(await rabbit_rig.subscribe(), 1)
    assert delivery.value == b"x" * (size - 1)


async def test_headers_beyond_a_frame_are_refused_before_they_are_sent(rabbit_rig: Rig) -> None:
    """R25."""
    window = [
        rabbit_rig.message(0, "a", headers=tuple((f"h{number}", b"x" * 1000) for number in range(135))),
        rabbit_rig.message(1, "b", headers=tuple((f"h{number}", b"x" * 1000) for number in range(110))),
    ]
    result = await rabbit_rig.publish(window)
    assert result.acknowledged == {1}
    assert result.refused[0].reason == "too_large"


async def test_an_exchange_deleted_meanwhile_is_a_configuration_failure(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """The broker closes the channel; the neighbours arrive over a new one."""
    gone = await _exchange(raw_channel)
    await raw_channel.queue_declare(gone, durable=True)
    await raw_channel.queue_bind(gone, gone, routing_key="#")
    publisher = rabbit_rig.broker.publisher()
    window = [rabbit_rig.message(0, "a"), rabbit_rig.message(1, "b", address=gone)]
    assert (await publisher.publish(window, timeout_seconds=60)).acknowledged == {0, 1}
    await raw_channel.exchange_delete(gone)
    result = await publisher.publish(window, timeout_seconds=60)
    await publisher.aclose()
    assert result.acknowledged == {0}
    assert isinstance(result.configuration, TopologyError)
    assert gone in str(result.configuration)


async def test_a_confirm_that_never_comes_leaves_the_message_unknown(
    rabbit_rig: Rig, rabbit_proxy: TcpProxy
) -> None:
    """R4: the broker has it, we do not know; published again it is a duplicate with the same id."""
    publisher = rabbit_rig.broker.publisher()
    await publisher.start()
    message = rabbit_rig.message(1)
    assert (await publisher.publish([rabbit_rig.message(0)], timeout_seconds=60)).acknowledged == {0}
    await rabbit_proxy.hang(Direction.REPLIES)
    result = await publisher.publish([message], timeout_seconds=1)
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert not result.acknowledged
    await rabbit_proxy.restore()
    assert (await publisher.publish([message], timeout_seconds=60)).acknowledged == {0}
    await publisher.aclose()
    received = await receive(await rabbit_rig.subscribe(), 3)
    assert numbers(received) == [0, 1, 1]
    assert received[1].coordinates == received[2].coordinates


async def test_the_same_message_twice_in_a_window_is_settled_twice(rabbit_rig: Rig) -> None:
    """Returns are matched by message id, so such a window goes out one by one."""
    message = rabbit_rig.message(1, None)
    await rabbit_rig.publish_all([message, message, message])


async def test_other_clients_find_the_usual_properties(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """A message can be read, routed and searched without knowing this library."""
    headers = (("content-type", b"application/json"), ("text", b"plain"))
    message = rabbit_rig.message(3, "key", headers=headers)
    await rabbit_rig.publish_all([message])
    received = await _take(raw_channel, group_queue(rabbit_rig.group, rabbit_rig.address, 0))
    properties = received.header.properties
    assert properties.message_id == str(message.message_id)
    assert properties.content_type == "application/json"
    assert properties.message_type == "order.placed"
    assert properties.delivery_mode == 2
    assert properties.timestamp is not None
    assert properties.headers == {"content-type": "application/json", "text": "plain", "towpath-key": "key"}
    assert received.routing_key == "3.order.placed"
    assert received.exchange == rabbit_rig.address


async def test_a_message_of_another_client_is_received(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """Without headers of ours, with a content type as a property, and with or without an id."""
    for message_id in ("order-17", None):
        message = aio_pika.Message(b"{}", content_type="application/json", message_id=message_id)
        properties = message.properties
        await raw_channel.basic_publish(
            b"{}", exchange=rabbit_rig.address, routing_key="other", properties=properties
        )
    with_id, _ = await receive(await rabbit_rig.subscribe(), 2)
    assert (with_id.key, with_id.value, with_id.timestamp) == (None, b"{}", None)
    assert with_id.headers == (("content-type", b"application/json"),)
    assert with_id.coordinates == f"{rabbit_rig.address}:order-17"


async def test_the_next_active_consumer_gets_what_was_open_first_and_in_order(rabbit_rig: Rig) -> None:
    """C10: scattered acknowledgements do not disturb the order of a key."""
    await rabbit_rig.publish_all([rabbit_rig.message(number) for number in range(100)])
    first = await rabbit_rig.subscribe()
    second = await rabbit_rig.subscribe()
    received = await receive(first, 60)
    first.acknowledge(received[::3])
    await asyncio.sleep(0.3)
    await first.aclose()
    settled = set(numbers(received[::3]))
    taken_over = await receive(second, 100 - len(settled))
    assert numbers(taken_over) == [number for number in range(100) if number not in settled]
    assert taken_over[0].is_redelivered


async def test_a_cancelled_consumer_comes_back_when_its_queue_is_there_again(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """S5: the broker cancels a consumer whose queue is deleted."""
    subscriber = await rabbit_rig.subscribe()
    assert isinstance(subscriber, RabbitSubscriber)
    await raw_channel.queue_delete(group_queue(rabbit_rig.group, rabbit_rig.address, 0))
    await eventually(lambda: not subscriber.is_connected)
    await eventually(lambda: isinstance(subscriber.last_error, TopologyError))
    await rabbit_rig.apply()
    await eventually(lambda: subscriber.is_connected)
    await rabbit_rig.publish_all([rabbit_rig.message(5)])
    assert numbers(await receive(subscriber, 1)) == [5]


async def test_what_arrives_while_a_connection_is_renewed_is_ours(
    rabbit_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3, S5: the first queue delivers before the others are consumed; nothing of it is left lying."""
    await rabbit_rig.publish_all([rabbit_rig.message(0)])
    subscriber = await rabbit_rig.subscribe()
    await receive(subscriber, 1)
    is_opened = asyncio.Event()
    consume = ConsumerSession._consume

    async def consume_and_wait(session: ConsumerSession, *arguments: Any, **options: Any) -> None:
        await consume(session, *arguments, **options)
        await is_opened.wait()

    monkeypatch.setattr(ConsumerSession, "_consume", consume_and_wait)
    await rabbit_rig.cut()
    await rabbit_rig.restore()

    (again,) = await receive(subscriber, 1)

    assert subscriber.is_current(again)
    subscriber.acknowledge([again])
    is_opened.set()
    await eventually(lambda: subscriber.is_connected)
    await subscriber.aclose()
    monkeypatch.undo()
    assert await receive_rest(await rabbit_rig.subscribe()) == []


async def test_a_rejected_message_goes_to_the_brokers_dead_letter_queue(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """D6: whoever rejects it."""
    await rabbit_rig.publish_all([rabbit_rig.message(1)])
    received = await _take(raw_channel, group_queue(rabbit_rig.group, rabbit_rig.address, 0))
    await raw_channel.basic_reject(received.delivery_tag or 0, requeue=False)
    queue = broker_dead_letter_address(rabbit_rig.group, rabbit_rig.address)
    assert (await _take(raw_channel, queue)).body == b"1"


async def test_shares_of_the_keys_go_to_queues_of_their_own(rabbit_rig: Rig, rabbit_url: str) -> None:
    """`queues_per_group`: each slot has its queue, and together they get everything once."""
    broker = broker_from_url(rabbit_url, {**RABBIT_OPTIONS, "queues_per_group": 3})
    group = f"{rabbit_rig.group}-shared"
    admin = broker.admin()
    await admin.apply([], [GroupTopology(group, (rabbit_rig.address,))], partitions=1)
    assert await admin.check([], [GroupTopology(group, (rabbit_rig.address,))]) == []
    await admin.aclose()
    await rabbit_rig.publish_all([rabbit_rig.message(number, f"k{number}") for number in range(64)])
    subscriber = broker.subscriber(Subscription(group, (rabbit_rig.address,), 100, 1 << 20))
    rabbit_rig.opened.append(subscriber)
    await subscriber.start(Listener())
    received = await receive(subscriber, 64)
    for delivery in received:
        assert delivery.partition == f"{group}.{rabbit_rig.address}.{int(delivery.value or b'') % 64 % 3}"
    subscriber.acknowledge(received)
    assert await receive_rest(subscriber, 0.5) == []


async def test_a_queue_with_other_arguments_is_named(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """O2, O3: apply refuses, check tells."""
    address, group = f"{rabbit_rig.address}.other", f"{rabbit_rig.group}-other"
    queue = group_queue(group, address, 0)
    await raw_channel.queue_declare(queue, durable=True)
    admin = rabbit_rig.broker.admin()
    with pytest.raises(TopologyError, match=queue):
        await admin.apply([], [GroupTopology(group, (address,))], partitions=1)
    problems = await admin.check([], [GroupTopology(group, (address,))])
    assert any(queue in problem and "other arguments" in problem for problem in problems)
    await admin.aclose()
    await raw_channel.queue_delete(queue)


async def test_refused_credentials_are_a_configuration_failure(rabbit_rig: Rig, rabbit_url: str) -> None:
    """O2: no use in trying again."""
    broker = broker_from_url(rabbit_url.replace("guest:guest", "guest:wrong"), RABBIT_OPTIONS)
    publisher, admin = broker.publisher(), broker.admin()
    subscriber = broker.subscriber(Subscription(rabbit_rig.group, (rabbit_rig.address,), 10, 1000))
    with pytest.raises(ConfigurationError):
        await publisher.start()
    with pytest.raises(ConfigurationError):
        await publisher.publish([rabbit_rig.message(0)], timeout_seconds=60)
    with pytest.raises(ConfigurationError):
        await subscriber.start(Listener())
    with pytest.raises(ConfigurationError):
        await admin.apply([rabbit_rig.address], [], partitions=1)
    for each in (publisher, subscriber, admin):
        await each.aclose()


async def test_copies_of_dead_letters_wait_in_a_queue_of_their_own(
    rabbit_rig: Rig, raw_channel: aiormq.abc.AbstractChannel
) -> None:
    """D7: for alerts and other tools."""
    address = dead_letter_address(rabbit_rig.group, rabbit_rig.address)
    await rabbit_rig.publish_all([rabbit_rig.message(0, address=address)])
    assert (await _take(raw_channel, address)).body == b"0"


async def test_a_bug_in_the_session_is_raised_to_whoever_receives(rabbit_rig: Rig) -> None:
    """S6: the member ends with it, instead of waiting for ever."""
    subscriber = await rabbit_rig.subscribe()
    assert isinstance(subscriber, RabbitSubscriber)
    assert subscriber._session is not None
    subscriber._session._failure.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await receive(subscriber, 1)


@pytest.fixture
def frozen_server(rabbit_server: RabbitServer) -> Iterator[RabbitServer]:
    """A server that a test suspends; it is resumed whatever happens."""
    yield rabbit_server
    rabbit_server.resume()


async def test_a_frozen_server_is_noticed_and_survived(rabbit_rig: Rig, frozen_server: RabbitServer) -> None:
    """S5, R6: SIGSTOP keeps every connection open."""
    publisher = rabbit_rig.broker.publisher()
    await publisher.start()
    subscriber = await rabbit_rig.subscribe()
    frozen_server.suspend()
    started_at = time.monotonic()
    result = await publisher.publish([rabbit_rig.message(1)], timeout_seconds=2)
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert time.monotonic() - started_at < 20, "not when the server goes on"
    await eventually(lambda: not subscriber.is_connected)
    frozen_server.resume()
    assert (await publisher.publish([rabbit_rig.message(2)], timeout_seconds=60)).acknowledged == {0}
    await publisher.aclose()
    await eventually(lambda: subscriber.is_connected)
    assert 2 in numbers(await receive_rest(subscriber, wanted=[2]))
