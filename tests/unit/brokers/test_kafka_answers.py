"""What is known of a window when the client answers for some of its partitions only."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from aiokafka import errors as kafka

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
        cluster = SimpleNamespace(partitions_for_topic=lambda _: set(range(PARTITIONS)))
        self.client = SimpleNamespace(cluster=cluster)

    def create_batch(self) -> object:
        return SimpleNamespace(append=lambda **_: object())

    async def send_batch(self, _batch: object, _topic: str, *, partition: int) -> "asyncio.Future[None]":
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
