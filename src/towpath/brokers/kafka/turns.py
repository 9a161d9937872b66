"""Partitions by turns: the library hands out all that it has fetched of one before it turns to the next.

An intake full of one or two partitions holds few keys, and a key's messages run one after another.
"""

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition


class Turns:
    """Which partitions of one consumer had their turn. One caller at a time."""

    def __init__(self) -> None:
        self._served: set[TopicPartition] = set()

    async def fetch(
        self, consumer: AIOKafkaConsumer, *, max_records: int, timeout_ms: int
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Of those whose turn it is, else of any; empty after the timeout. Raises what `getmany` does.

        Nothing is awaited behind the library's last answer.
        """
        others = consumer.assignment() - self._served if self._served else set()
        fetched = await consumer.getmany(*others, max_records=max_records) if others else {}
        if not fetched:
            self._served.clear()
            fetched = await consumer.getmany(timeout_ms=timeout_ms, max_records=max_records)
        self._served.update(fetched)
        return fetched
