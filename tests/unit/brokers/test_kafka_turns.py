"""C16: what a bounded intake holds comes from all partitions, not from those that were fetched first."""

from collections import Counter
from typing import Any, cast

from aiokafka import AIOKafkaConsumer, TopicPartition

from towpath.brokers.kafka.turns import Turns

Offsets = dict[TopicPartition, list[int]]


class _Consumer:
    """Hands out what it has fetched as the library does: all of one partition before the next."""

    def __init__(self, fetched: Offsets) -> None:
        self.fetched = fetched

    def assignment(self) -> set[TopicPartition]:
        return set(self.fetched)

    async def getmany(self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int) -> Offsets:
        drained: Offsets = {}
        for partition, offsets in self.fetched.items():
            if (partitions and partition not in partitions) or not offsets or not max_records:
                continue
            drained[partition], self.fetched[partition] = offsets[:max_records], offsets[max_records:]
            max_records -= len(drained[partition])
        return drained


async def _fetch(consumer: _Consumer, count: int) -> tuple[Counter[int], list[tuple[int, int]]]:
    """How many of each partition came in so many fetches of 100, and all in their order."""
    turns, came = Turns(), list[tuple[int, int]]()
    for _ in range(count):
        asked = cast("AIOKafkaConsumer", consumer)
        fetched: Any = await turns.fetch(asked, max_records=100, timeout_ms=0)
        came += [
            (partition.partition, offset) for partition, offsets in fetched.items() for offset in offsets
        ]
    return Counter(partition for partition, _ in came), came


async def test_all_partitions_have_a_turn_before_one_has_another() -> None:
    """C16: six fetches of three partitions that all have more take two of each; offsets stay in order."""
    consumer = _Consumer({TopicPartition("t", number): list(range(1_000)) for number in range(3)})
    counts, came = await _fetch(consumer, 6)
    assert counts == {0: 200, 1: 200, 2: 200}
    for number in range(3):
        assert [offset for partition, offset in came if partition == number] == list(range(200))


async def test_a_partition_alone_gives_all_it_has() -> None:
    """C16: those that have nothing cost the others no turn, and one that is taken away is not waited for."""
    consumer = _Consumer({TopicPartition("t", 0): list(range(500)), TopicPartition("t", 1): []})
    assert (await _fetch(consumer, 3))[0] == {0: 300}
    del consumer.fetched[TopicPartition("t", 1)]
    assert (await _fetch(consumer, 2))[0] == {0: 200}
