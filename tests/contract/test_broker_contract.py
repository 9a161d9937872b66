"""What every broker adapter does alike: publishing, receiving, settling, sharing, outages."""

import asyncio
import time

import pytest

from tests.contract.rigs import Listener, Rig, eventually, numbers, receive, receive_rest, receive_shared
from towpath.brokers.ports import Delivery, GroupTopology, Mark, Subscriber, Subscription, dead_letter_address
from towpath.errors import BrokerUnavailable, TopologyError

BINARY = bytes(range(256))


async def test_messages_of_a_key_arrive_in_the_order_they_were_published(rig: Rig) -> None:
    """Order per key, over several windows."""
    publisher = rig.broker.publisher()
    for start in range(0, 300, 100):
        window = [rig.message(number, f"key-{number % 7}") for number in range(start, start + 100)]
        result = await publisher.publish(window, timeout_seconds=60)
        assert result.acknowledged == set(range(100))
    await publisher.aclose()
    subscriber = await rig.subscribe()
    by_key: dict[str | None, list[int]] = {}
    for delivery in await receive(subscriber, 300):
        by_key.setdefault(delivery.key, []).append(int(delivery.value or b""))
    assert {f"key-{k}": list(range(k, 300, 7)) for k in range(7)} == by_key


async def test_headers_keep_repeats_and_binary_values(rig: Rig) -> None:
    """R17: names may repeat, values are bytes, the order of repeats counts."""
    headers = (
        ("z", b"last name first"),
        ("repeated", b"1"),
        ("repeated", b"\xff\x00\xfe"),
        ("binary", BINARY),
        ("empty", b""),
        ("text", "Zürich".encode()),
        ("repeated", b"3"),
    )
    await rig.publish_all([rig.message(0, headers=headers)])
    (delivery,) = await receive(await rig.subscribe(), 1)
    assert headers == delivery.headers


async def test_headers_without_repeats_arrive_unchanged(rig: Rig) -> None:
    """R17: as a set; other clients of RabbitMQ sort them."""
    headers = (("ce_id", b"1"), ("ce_type", b"order.placed"), ("binary", BINARY), ("a", b""))
    await rig.publish_all([rig.message(0, headers=headers)])
    (delivery,) = await receive(await rig.subscribe(), 1)
    assert sorted(headers) == sorted(delivery.headers)


async def test_missing_and_empty_payloads_and_keys_stay_distinct(rig: Rig) -> None:
    """C11, P11: a null value is None, an empty one is empty; the same for keys."""
    cases: dict[str, tuple[str | None, bytes | None]] = {
        "null": ("k", None),
        "empty": ("k", b""),
        "binary": ("ключ", BINARY),
        "no key": (None, b"x"),
        "empty key": ("", b"x"),
    }
    messages = [
        rig.message(0, key, payload=payload, headers=(("case", case.encode()),))
        for case, (key, payload) in cases.items()
    ]
    await rig.publish_all(messages)
    received = await receive(await rig.subscribe(), len(cases))
    assert cases == {dict(each.headers)["case"].decode(): (each.key, each.value) for each in received}


async def test_a_delivery_says_where_and_when_it_came_from(rig: Rig) -> None:
    """R26: the timestamp is the time of publishing."""
    before = time.time()
    await rig.publish_all([rig.message(0)])
    (delivery,) = await receive(await rig.subscribe(), 1)
    assert delivery.source == rig.address
    assert rig.address in delivery.partition
    assert not delivery.is_redelivered
    assert delivery.timestamp is not None
    assert before - 2 < delivery.timestamp.timestamp() < time.time() + 2


async def test_a_message_that_is_too_large_is_refused_and_its_neighbours_arrive(rig: Rig) -> None:
    """R8, R23, D7: only what follows in its key waits for the decision."""
    too_large = b"x" * (rig.broker.max_message_bytes + 1)
    window = [
        rig.message(0, "a"),
        rig.message(1, "b", payload=too_large),
        rig.message(2, "b"),
        rig.message(3, None, payload=too_large),
        rig.message(4, None),
        rig.message(5, "c"),
    ]
    result = await rig.publish(window)
    assert result.acknowledged == {0, 4, 5}
    reasons = {index: refusal.reason for index, refusal in result.refused.items()}
    assert reasons == {1: "too_large", 3: "too_large"}
    assert result.unavailable is None
    assert sorted(numbers(await receive(await rig.subscribe(), 3))) == [0, 4, 5]


async def test_many_messages_travel_in_the_time_of_one_acknowledgement(rig: Rig) -> None:
    """R16: twenty and more, for 10,000 a second at 2 ms; here each takes a hundred times as long."""
    publisher, acknowledgement_seconds, count = rig.broker.publisher(), 0.2, 4000
    await publisher.publish([rig.message(0, f"k{number}") for number in range(100)], timeout_seconds=60)
    await rig.delay(acknowledgement_seconds / 2)
    began = time.monotonic()
    for _ in range(2):
        window = [rig.message(number, f"k{number}") for number in range(count // 2)]
        result = await publisher.publish(window, timeout_seconds=60)
        assert result.acknowledged == set(range(count // 2))
    assert time.monotonic() - began < count / 20 * acknowledgement_seconds
    await publisher.aclose()


async def test_the_largest_permitted_message_arrives(rig: Rig) -> None:
    """The limit is usable up to its last byte."""
    payload = b"x" * (rig.broker.max_message_bytes - 1)
    await rig.publish_all([rig.message(0, "k", payload=payload)])
    (delivery,) = await receive(await rig.subscribe(), 1)
    assert delivery.value == payload


async def test_a_missing_address_is_a_configuration_failure_and_others_arrive(rig: Rig) -> None:
    """R9, O2: never silently lost, and never a reason to publish the neighbours twice."""
    window = [rig.message(0, "a"), rig.message(1, "a", address="nowhere"), rig.message(2, "b")]
    result = await rig.publish(window)
    assert result.acknowledged == {0, 2}
    assert not result.refused
    assert isinstance(result.configuration, TopologyError)
    assert "nowhere" in str(result.configuration)
    with pytest.raises(TopologyError, match="nowhere"):
        await rig.publish(window[1:2])


async def test_an_address_made_later_is_found(rig: Rig) -> None:
    """A missing address is asked for again on the next call."""
    publisher = rig.broker.publisher()
    later = f"{rig.address}.later"
    with pytest.raises(TopologyError):
        await publisher.publish([rig.message(0, address=later)], timeout_seconds=60)
    admin = rig.broker.admin()
    await admin.apply([], [GroupTopology(rig.group, (later,))], partitions=1)
    await admin.aclose()
    result = await publisher.publish([rig.message(0, address=later)], timeout_seconds=60)
    await publisher.aclose()
    assert result.acknowledged == {0}


async def test_a_hanging_broker_is_reported_within_the_deadline(rig: Rig) -> None:
    """R6, R7: what has an unknown outcome is neither acknowledged nor refused."""
    publisher = rig.broker.publisher()
    await publisher.start()
    assert (await publisher.publish([rig.message(0)], timeout_seconds=60)).acknowledged == {0}
    await rig.hang()
    started_at = time.monotonic()
    result = await publisher.publish([rig.message(1), rig.message(2, "x")], timeout_seconds=2)
    took = time.monotonic() - started_at
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert result.acknowledged == set()
    assert result.refused == {}
    assert took < 20, "not when the broker goes on"
    await rig.restore()
    result = await publisher.publish([rig.message(3)], timeout_seconds=60)
    assert result.acknowledged == {0}
    await publisher.aclose()


async def test_a_broken_link_is_reported_and_the_next_publish_recovers(rig: Rig) -> None:
    """R7: a broker that is away is not the message's fault."""
    publisher = rig.broker.publisher()
    await publisher.start()
    await rig.cut()
    result = await publisher.publish([rig.message(1)], timeout_seconds=3)
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert not result.acknowledged
    await rig.restore()
    assert (await publisher.publish([rig.message(2)], timeout_seconds=60)).acknowledged == {0}
    await publisher.aclose()


async def test_what_is_sent_again_after_no_answer_came_keeps_its_order(rig: Rig) -> None:
    """R6: a half-open link; the broker has the messages, and nobody hears of it."""
    publisher = rig.broker.publisher()
    await publisher.start()
    assert (await publisher.publish([rig.message(0)], timeout_seconds=60)).acknowledged == {0}
    window = [rig.message(number) for number in range(1, 6)]
    await rig.mute()
    result = await publisher.publish(window, timeout_seconds=2)
    assert (type(result.unavailable), result.acknowledged) == (BrokerUnavailable, set())
    await rig.restore()
    assert (await publisher.publish(window, timeout_seconds=60)).acknowledged == set(range(5))
    await publisher.aclose()
    received = numbers(await receive_rest(await rig.subscribe(), wanted=range(6)))
    assert list(dict.fromkeys(received)) == list(range(6))


async def test_connections_that_died_silently_are_replaced(rig: Rig) -> None:
    """R6, S5: as after a failover of an address; nobody resets them."""
    publisher = rig.broker.publisher()
    await publisher.start()
    subscriber = await rig.subscribe()
    await rig.strand()
    result = await publisher.publish([rig.message(1)], timeout_seconds=2)
    assert rig.name == "memory" or isinstance(result.unavailable, BrokerUnavailable)
    assert (await publisher.publish([rig.message(2)], timeout_seconds=60)).acknowledged == {0}
    await publisher.aclose()
    assert 2 in numbers(await receive_rest(subscriber, wanted=[2]))


async def test_starting_without_a_broker_says_that_it_is_away(rig: Rig) -> None:
    """O2: for publishers and subscribers alike."""
    await rig.cut()
    publisher = rig.broker.publisher()
    with pytest.raises(BrokerUnavailable):
        await publisher.start()
    await publisher.aclose()
    subscriber = rig.broker.subscriber(Subscription(rig.group, (rig.address,), 10, 1000))
    with pytest.raises(BrokerUnavailable):
        await subscriber.start(Listener())
    assert not subscriber.is_connected
    await subscriber.aclose()


async def test_subscribing_to_a_missing_address_is_a_configuration_failure(rig: Rig) -> None:
    """O2: at the start, with the address named."""
    subscriber = rig.broker.subscriber(Subscription(rig.group, ("nowhere",), 10, 1000))
    with pytest.raises(TopologyError, match="nowhere"):
        await subscriber.start(Listener())
    await subscriber.aclose()


async def test_what_was_not_acknowledged_comes_again_to_the_next_member(rig: Rig) -> None:
    """C3."""
    await rig.publish_all([rig.message(number, f"k{number}") for number in range(10)])
    first = await rig.subscribe()
    await receive(first, 10)
    await first.aclose()
    second = await rig.subscribe()
    assert sorted(numbers(await receive(second, 10))) == list(range(10))


async def test_what_was_acknowledged_does_not_come_again(rig: Rig) -> None:
    """C3: also in any order of acknowledgements."""
    await rig.publish_all([rig.message(number, f"k{number % 3}") for number in range(30)])
    first = await rig.subscribe()
    received = await receive(first, 30)
    first.acknowledge(reversed(received))
    await first.aclose()
    await rig.publish_all([rig.message(99)])
    second = await rig.subscribe()
    assert numbers(await receive_rest(second, wanted=[99])) == [99]


async def test_acknowledging_twice_changes_nothing(rig: Rig) -> None:
    """A repeat is neither an error nor counted."""
    await rig.publish_all([rig.message(number) for number in range(4)])
    subscriber = await rig.subscribe(max_in_flight=2)
    received = await receive(subscriber, 2)
    subscriber.acknowledge(received)
    subscriber.acknowledge(received)
    subscriber.release(received)
    assert numbers(await receive(subscriber, 2)) == [2, 3]
    assert await receive_rest(subscriber, 0.5) == []


async def test_released_deliveries_come_again_and_settled_ones_do_not(rig: Rig) -> None:
    """S4: what was handed back is delivered again, in order, perhaps with what was not settled either."""
    await rig.publish_all([rig.message(number) for number in range(10)])
    subscriber = await rig.subscribe()
    received = await receive(subscriber, 10)
    subscriber.acknowledge(received[:3])
    subscriber.release([received[5], received[7]])
    subscriber.acknowledge([received[6], received[9]])
    again = await receive_rest(subscriber, wanted=[5, 7])
    assert {5, 7} <= set(numbers(again)) <= {3, 4, 5, 7, 8}
    assert numbers(again) == sorted(numbers(again))
    assert all(delivery.is_redelivered for delivery in again)
    subscriber.acknowledge([received[3], received[4], received[8], *again])
    await subscriber.aclose()
    assert await receive_rest(await rig.subscribe()) == []


async def test_released_deliveries_reach_the_next_member_when_the_first_leaves(rig: Rig) -> None:
    """S4."""
    await rig.publish_all([rig.message(number) for number in range(6)])
    first = await rig.subscribe()
    received = await receive(first, 6)
    first.acknowledge(received[:2])
    first.release(received[2:])
    await first.aclose()
    assert sorted(numbers(await receive(await rig.subscribe(), 4))) == [2, 3, 4, 5]


@pytest.mark.parametrize("is_closed", [False, True])
async def test_what_is_handed_back_comes_before_what_came_after_it(rig: Rig, is_closed: bool) -> None:
    """C10, S4: to the same member or to the next one, while later messages are on their way."""
    await rig.publish_all([rig.message(number) for number in range(300)])
    subscriber = await rig.subscribe(max_in_flight=50)
    received = await receive(subscriber, 40)
    for delivery in received[:20]:
        subscriber.acknowledge([delivery])
        await asyncio.sleep(0.005)  # room for others, which arrive behind these
    subscriber.release(received[20:])
    if is_closed:
        await subscriber.aclose()
        subscriber = await rig.subscribe(max_in_flight=50)
    started: list[int] = []
    while len(started) < 280:
        current = [each for each in await receive(subscriber, 1) if subscriber.is_current(each)]
        subscriber.acknowledge(current)
        started += numbers(current)
    assert started == list(range(20, 300))


async def test_intake_is_bounded_by_number(rig: Rig) -> None:
    """C16: no more than `max_in_flight` until something is settled."""
    await rig.publish_all([rig.message(number, f"k{number % 5}") for number in range(60)])
    subscriber = await rig.subscribe(max_in_flight=10)
    held = [*await receive(subscriber, 10), *await receive_rest(subscriber)]
    assert len(held) == 10
    subscriber.acknowledge(held)
    rest = [held]
    while sum(map(len, rest)) < 60:
        batch = await receive(subscriber, 1)
        assert len(batch) <= 10
        subscriber.acknowledge(batch)
        rest.append(batch)
    assert sorted(number for batch in rest for number in numbers(batch)) == list(range(60))


async def test_intake_is_bounded_in_bytes(rig: Rig) -> None:
    """C16: large messages pause the intake long before their number does."""
    payload = b"x" * 50_000
    await rig.publish_all([rig.message(number, f"k{number}", payload=payload) for number in range(60)])
    subscriber = await rig.subscribe(max_in_flight=1000, max_in_flight_bytes=500_000)
    held = await receive_rest(subscriber)
    while not (current := [each for each in held if subscriber.is_current(each)]):
        held = await receive_rest(subscriber)  # RabbitMQ begins again with a smaller window
    assert len(current) <= 20
    settled = 0
    deadline = time.monotonic() + 60
    while settled < 60:
        assert time.monotonic() < deadline
        settled += len(current)
        subscriber.acknowledge(current)
        current = list(await subscriber.receive(100, timeout_seconds=1))


async def test_receive_gives_up_after_its_timeout_and_may_be_cancelled(rig: Rig) -> None:
    """A cancelled `receive` loses nothing."""
    subscriber = await rig.subscribe()
    assert await subscriber.receive(10, timeout_seconds=0.1) == []
    waiting = asyncio.create_task(subscriber.receive(10, timeout_seconds=60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await rig.publish_all([rig.message(1)])
    assert numbers(await receive(subscriber, 1)) == [1]


async def test_two_members_of_a_group_share_the_work_or_take_it_over(rig: Rig) -> None:
    """S1: everything arrives once while both live; the leaver's messages go to the other."""
    first = await rig.subscribe()
    second = await rig.subscribe()
    if rig.shares_partitions:
        await eventually(lambda: first.is_connected and second.is_connected)
        await _settle_sharing(rig, first, second)
    await rig.publish_all([rig.message(number, f"k{number}") for number in range(80)])
    of_first, of_second = await receive_shared(80, first, second)
    assert sorted(numbers(of_first) + numbers(of_second)) == list(range(80))
    if rig.shares_partitions:
        assert of_first
        assert of_second
    first.acknowledge(of_first[:10])
    await first.aclose()
    settled = numbers(of_first[:10])
    left = set(range(80)) - set(settled) - set(numbers(of_second))
    deadline = time.monotonic() + 60
    while left:
        assert time.monotonic() < deadline
        left -= set(numbers(await second.receive(100, timeout_seconds=0.5)))


async def _settle_sharing(rig: Rig, *members: Subscriber) -> None:
    """Until each gets something: a rebalance takes its time. Nothing of it is left on its way."""
    for round_ in range(1, 61):
        window = [rig.message(10_000 * round_ + number, f"s{number}") for number in range(40)]
        await rig.publish_all(window)
        missing, got = {message.sequence for message in window}, set[Subscriber]()
        deadline = time.monotonic() + 60
        while missing:
            assert time.monotonic() < deadline, f"{missing} never came"
            for member in members:
                batch = await member.receive(100, timeout_seconds=0.3)
                member.acknowledge(batch)
                missing -= set(numbers(batch))
                if batch:
                    got.add(member)
        if len(got) == len(members):
            return
    pytest.fail("the members never shared")


async def test_groups_do_not_disturb_each_other(rig: Rig) -> None:
    """Every group gets every message."""
    other = f"{rig.group}-other"
    admin = rig.broker.admin()
    await admin.apply([], [GroupTopology(other, (rig.address,))], partitions=4)
    await admin.aclose()
    await rig.publish_all([rig.message(number) for number in range(5)])
    mine = await rig.subscribe()
    theirs = rig.broker.subscriber(Subscription(other, (rig.address,), 100, 1 << 20))
    rig.opened.append(theirs)
    await theirs.start(Listener())
    assert numbers(await receive(mine, 5)) == numbers(await receive(theirs, 5))


async def test_a_stale_delivery_changes_nothing(rig: Rig) -> None:
    """S1: once its partition or channel is gone, settling it is a no-op and it comes again."""
    await rig.publish_all([rig.message(number, f"k{number}") for number in range(12)])
    subscriber = await rig.subscribe()
    stale = await receive(subscriber, 12)
    assert all(subscriber.is_current(delivery) for delivery in stale)
    await _lose_hold(rig)
    await eventually(lambda: not any(subscriber.is_current(delivery) for delivery in stale))
    subscriber.acknowledge(stale)
    subscriber.release(stale)
    if rig.shares_partitions:
        await rig.opened[-1].aclose()
    await rig.restore()
    again: list[Delivery] = []
    while {int(each.value or b"") for each in again if subscriber.is_current(each)} < set(range(12)):
        again += await receive(subscriber, 1)


async def _lose_hold(rig: Rig) -> None:
    """Bring a rebalance about, or where there is none cut the link."""
    if rig.shares_partitions:
        await rig.subscribe(is_waiting=False)
    else:
        await rig.cut()


async def test_acknowledgements_made_while_revoking_still_count(rig: Rig) -> None:
    """S2: the drain runs outside the poll loop, and what it finishes is committed."""
    if not rig.shares_partitions:
        return  # nothing is revoked from a living member where queues have a single active consumer
    await rig.publish_all([rig.message(number, f"k{number}") for number in range(12)])
    listener = Listener()
    first = await rig.subscribe(listener=listener)
    received = await receive(first, 12)

    async def finish() -> None:
        await asyncio.sleep(0.1)
        first.acknowledge(received)

    listener.while_revoking = finish
    second = await rig.subscribe()
    assert listener.revoked
    assert listener.revoked[0] >= {delivery.partition for delivery in received}
    assert await receive_rest(first) + await receive_rest(second) == []


async def test_is_connected_tells_the_truth(rig: Rig) -> None:
    """S5: readiness rests on it."""
    subscriber = rig.broker.subscriber(Subscription(rig.group, (rig.address,), 10, 100_000))
    rig.opened.append(subscriber)
    assert not subscriber.is_connected
    await subscriber.start(Listener())
    await eventually(lambda: subscriber.is_connected)
    await rig.hang()
    await eventually(lambda: not subscriber.is_connected)
    assert await subscriber.receive(10, timeout_seconds=0.1) == []
    await rig.restore()
    await eventually(lambda: subscriber.is_connected)
    await rig.publish_all([rig.message(7)])
    assert numbers(await receive(subscriber, 1)) == [7]
    await subscriber.aclose()
    assert not subscriber.is_connected


async def test_consumption_resumes_after_a_broken_link(rig: Rig) -> None:
    """S5: without anybody's help; what was not acknowledged comes again."""
    await rig.publish_all([rig.message(number) for number in range(4)])
    subscriber = await rig.subscribe()
    received = await receive(subscriber, 4)
    subscriber.acknowledge(received[:2])
    for _ in range(50):  # so that the acknowledgements have left, whatever the machine does
        await asyncio.sleep(0.01)
    await eventually(lambda: not subscriber.marks or Mark(2) in subscriber.marks.values())
    await rig.cut()
    await eventually(lambda: not subscriber.is_connected)
    await rig.restore()
    await rig.publish_all([rig.message(4)])
    pending = {2, 3, 4} if any(not subscriber.is_current(each) for each in received[2:]) else {4}
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while not pending <= seen:
        assert time.monotonic() < deadline
        seen |= set(numbers(await subscriber.receive(10, timeout_seconds=0.5)))
    assert not seen & {0, 1}


async def test_closing_is_bounded_and_idempotent_while_the_broker_hangs(rig: Rig) -> None:
    """S4: shutdown does not wait for a dead broker."""
    await rig.publish_all([rig.message(number) for number in range(4)])
    publisher = rig.broker.publisher()
    await publisher.start()
    subscriber = await rig.subscribe()
    subscriber.acknowledge(await receive(subscriber, 4))
    await rig.hang()
    started_at = time.monotonic()
    await subscriber.aclose()
    await publisher.aclose()
    await subscriber.aclose()
    await publisher.aclose()
    assert time.monotonic() - started_at < 60


async def test_a_cancelled_publish_writes_nothing_later(rig: Rig) -> None:
    """R5: cancelling counts as the deadline."""
    if rig.name == "memory":
        return  # its publish does not wait
    publisher = rig.broker.publisher()
    await publisher.start()
    await rig.hang()
    publishing = asyncio.create_task(publisher.publish([rig.message(1)], timeout_seconds=30))
    await asyncio.sleep(0.5)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await publisher.aclose()
    await rig.restore()
    await rig.publish_all([rig.message(2)])


async def test_applying_says_what_it_made_and_check_finds_what_is_missing(rig: Rig) -> None:
    """O2, O3."""
    address, group = f"{rig.address}.new", f"{rig.group}-new"
    topology = [GroupTopology(group, (address,))]
    admin = rig.broker.admin()
    problems = await admin.check([address], topology)
    assert any(address in problem for problem in problems)
    created = await admin.apply([address], topology, partitions=2)
    assert any(dead_letter_address(group, address) in line for line in created)
    assert await admin.check([address], topology) == []
    assert await admin.apply([address], topology, partitions=2) == []
    await admin.aclose()
    await admin.aclose()


async def test_copies_of_dead_letters_have_somewhere_to_go(rig: Rig) -> None:
    """D6, D7: `apply` makes the group's dead-letter address."""
    await rig.publish_all([rig.message(0, address=dead_letter_address(rig.group, rig.address))])
