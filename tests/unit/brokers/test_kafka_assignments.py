"""What a member knows of its partitions, where records are released and read again."""

import asyncio

from aiokafka import ConsumerRecord, TopicPartition

from towpath.brokers.intake import Intake
from towpath.brokers.kafka.assignments import Assignments

PARCELS = TopicPartition("parcels", 0)


def record(offset: int) -> "ConsumerRecord[bytes, bytes]":
    return ConsumerRecord("parcels", 0, offset, 1, 0, None, b"", None, 0, 0, ())


async def test_a_release_reads_again_what_was_in_the_buffer_before_it() -> None:
    """S3: 5 had come again and was not taken yet when 7, which was out all the time, was released."""
    intake = Intake(100, 1_000_000)
    assignments = Assignments(intake)
    assignments.assign([PARCELS])
    (held,) = assignments.unplaced
    assignments.place(held, 5, committed=5)
    for offset in (5, 6, 7):
        assignments.arrive(record(offset))
    async with asyncio.timeout(5):
        first, _, last = await intake.take(10, timeout_seconds=1)
    assert {PARCELS: 5} == assignments.release([first])
    assignments.arrive(record(5))
    assert {PARCELS: 5} == assignments.release([last])
    for offset in (5, 6, 7):
        assignments.arrive(record(offset))
    assert [5, 7] == [delivery.offset for delivery in await intake.take(10, timeout_seconds=1)]
