"""The buffer between a client library and the engine."""

import asyncio

import pytest

from towpath.brokers.intake import Intake
from towpath.brokers.ports import Delivery


def _delivery(offset: int, *, partition: str = "t:0", epoch: int = 1, size: int = 10) -> Delivery:
    return Delivery(
        source="t",
        partition=partition,
        offset=offset,
        key=None,
        headers=(),
        value=b"x" * size,
        timestamp=None,
        is_redelivered=False,
        epoch=epoch,
    )


async def test_deliveries_come_out_in_the_order_they_came_in() -> None:
    """Order within a partition is the broker's."""
    intake = Intake(100, 10_000)
    arrivals = [_delivery(offset) for offset in range(5)]
    for delivery in arrivals:
        intake.add(delivery)
    assert await intake.take(3, timeout_seconds=1) == arrivals[:3]
    assert await intake.take(3, timeout_seconds=1) == arrivals[3:]
    assert await intake.take(3, timeout_seconds=0) == []


async def test_it_is_full_by_number_or_by_bytes_until_settled_well_below() -> None:
    """C16: high and low watermark."""
    intake = Intake(4, 100)
    arrivals = [_delivery(offset) for offset in range(4)]
    for delivery in arrivals:
        assert not intake.is_full
        intake.add(delivery)
    assert intake.is_full
    assert (intake.count, intake.size_bytes) == (4, 40)
    await intake.take(4, timeout_seconds=1)
    assert intake.is_full, "taken is not settled"
    intake.settle(arrivals[0])
    assert not intake.is_full
    large = _delivery(9, size=70)
    intake.add(large)
    assert intake.is_full
    assert not intake.has_room
    intake.settle(large)
    assert intake.has_room


async def test_waiting_for_room_ends_when_there_is_room() -> None:
    """The poll loop sleeps meanwhile."""
    intake = Intake(1, 100)
    delivery = _delivery(1)
    intake.add(delivery)
    waiting = asyncio.create_task(intake.wait_for_room(timeout_seconds=30))
    await asyncio.sleep(0)
    assert not waiting.done()
    intake.settle(delivery)
    await asyncio.wait_for(waiting, 5)
    intake.add(delivery)
    await intake.wait_for_room(timeout_seconds=0.01)


async def test_a_lost_partition_takes_its_counts_with_it() -> None:
    """S1: in-flight counters return to zero."""
    intake = Intake(100, 10_000)
    lost = [_delivery(offset, partition="t:1") for offset in range(4)]
    kept = _delivery(7)
    for delivery in (*lost, kept):
        intake.add(delivery)
    taken = await intake.take(2, timeout_seconds=1)
    assert intake.purge("t:1", 1) == lost[2:]
    assert intake.count == 3
    intake.forget("t:1", 1)
    assert (intake.count, intake.size_bytes) == (1, 10)
    intake.settle(taken[0])
    assert intake.count == 1
    assert await intake.take(10, timeout_seconds=0) == [kept]


async def test_room_is_estimated_from_the_sizes_seen_lately() -> None:
    """C16: a fetch of many large messages would overshoot."""
    intake = Intake(1000, 1_000_000)
    assert intake.free_count == 61
    for offset in range(200):
        delivery = _delivery(offset, size=100)
        intake.add(delivery)
        intake.settle(delivery)
    assert intake.free_count == 1000
    for offset in range(200):
        delivery = _delivery(offset, size=100_000)
        intake.add(delivery)
        intake.settle(delivery)
    assert 9 <= intake.free_count <= 11


async def test_a_cancelled_take_loses_nothing() -> None:
    """`receive` is safe to cancel."""
    intake = Intake(10, 1000)
    waiting = asyncio.create_task(intake.take(1, timeout_seconds=60))
    await asyncio.sleep(0)
    delivery = _delivery(1)
    intake.add(delivery)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await intake.take(1, timeout_seconds=1) == [delivery]
