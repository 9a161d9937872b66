"""What is known of a window when the client answers for some of its partitions only."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from aiokafka import errors as kafka
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import DefaultRecordBatch

from towpath.brokers.kafka import publisher
from towpath.brokers.kafka.murmur2 import partition_of
from towpath.brokers.kafka.publisher import KafkaPublisher
from towpath.brokers.ports import OutboundMessage
from towpath.errors import BrokerUnavailable

PARTITIONS = 3
WINDOW = [OutboundMessage(UUID(int=n), n, "orders", "t", f"k{n}", 0, (), b"x") for n in range(30)]


class Client:
    """As much of a producer as one window needs; `answers` has what each partition's batch comes to."""

    def __init__(self, answers: dict[int, Callable[["asyncio.Future[None]"], object]]) -> None:
        self._answers = answers
        self.sent: list[bytes] = []
        cluster = SimpleNamespace(partitions_for_topic=lambda _: set(range(PARTITIONS)))
        self.client = SimpleNamespace(cluster=cluster)

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(1_000_000, 0)

    async def send_batch(self, batch: BatchBuilder, _topic: str, *, partition: int) -> "asyncio.Future[None]":
        self.sent.extend(bytes(record.value) for record in DefaultRecordBatch(bytearray(batch._build())))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[partition](answer)
        return answer


def fails(_: object) -> None:
    raise kafka.NotLeaderForPartitionError


@pytest.mark.parametrize(
    "last",
    [
        lambda _: None,
        lambda answer: answer.cancel(),
        lambda answer: answer.set_exception(kafka.RequestTimedOutError()),
        fails,
    ],
    ids=["silent", "given up", "refused", "not taken"],
)
async def test_partitions_that_answered_count_whatever_becomes_of_the_last(
    last: Callable[["asyncio.Future[None]"], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6, R10: only what has no answer is published again."""

    async def bury(*_: object) -> None: ...

    monkeypatch.setattr(publisher, "bury", bury)
    monkeypatch.setattr(publisher, "end_producer", lambda _: None)
    config = SimpleNamespace(max_message_bytes=1_000_000)
    subject = KafkaPublisher(cast(Any, config))
    subject._producer = cast(
        Any,
        Client(
            {0: last, 1: lambda answer: answer.set_result(None), 2: lambda answer: answer.set_result(None)}
        ),
    )
    result = await subject.publish(WINDOW, timeout_seconds=0.5)
    answered = {n for n, message in enumerate(WINDOW) if partition_of(f"k{n}".encode(), PARTITIONS) != 0}
    assert 0 < len(answered) < len(WINDOW)
    assert (result.acknowledged, result.refused) == (answered, {})
    assert isinstance(result.unavailable, BrokerUnavailable)
    await subject.aclose()


async def test_what_is_too_large_is_taken_out_of_the_batch_that_it_was_written_to() -> None:
    """R8: it is refused wherever it stands, later ones of its key wait, neighbours are sent once."""
    payloads = [b"small"] * 12
    payloads[4] = payloads[9] = b"x" * 2_000
    window = [
        OutboundMessage(UUID(int=n), n, "orders", "t", f"k{n % 5}", 0, (), b"%d " % n + payload)
        for n, payload in enumerate(payloads)
    ]
    client = Client(dict.fromkeys(range(PARTITIONS), lambda answer: answer.set_result(None)))
    subject = KafkaPublisher(cast(Any, SimpleNamespace(max_message_bytes=1_000)))
    subject._producer = cast(Any, client)
    result = await subject.publish(window, timeout_seconds=5)
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {4: "too_large"}
    assert result.acknowledged == set(range(12)) - {4, 9}
    assert sorted(client.sent) == sorted(window[index].payload or b"" for index in result.acknowledged)
