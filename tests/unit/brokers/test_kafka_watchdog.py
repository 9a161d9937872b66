"""When a Kafka consumer counts as dead, stuck, or merely busy."""

import asyncio
import time
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from towpath.brokers.intake import Intake
from towpath.brokers.kafka import watchdog as module
from towpath.brokers.kafka.assignments import Assignments
from towpath.brokers.kafka.watchdog import Watchdog
from towpath.brokers.ports import Delivery
from towpath.errors import BrokerUnavailable, TopologyError

PARTITION = TopicPartition("t", 0)


class _Consumer:
    """What the watchdog asks a consumer."""

    def __init__(self) -> None:
        self.partitions: set[int] | None = {0}
        self.does_answer = True
        self.fetched_at_ms = 1  # long ago
        self._client: Any = type("Client", (), {"_conns": {}})()

    def assignment(self) -> set[TopicPartition]:
        return {PARTITION}

    def last_poll_timestamp(self, partition: TopicPartition) -> int:
        return self.fetched_at_ms

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self.partitions

    async def topics(self) -> set[str]:
        if not self.does_answer:
            raise OSError("away")
        return {"t"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter scale."""
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(module, "_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(module, "_STALL_SECONDS", 0.3)


def _watchdog(intake: Intake, *, join_seconds: float = 0.1, topic_id: str = "") -> Watchdog:
    assignments = Assignments(intake)
    assignments.assign([PARTITION])
    for held in assignments.unplaced:
        assignments.place(held, 0, committed=0, topic_id=topic_id)
    return Watchdog(assignments, intake, silence_seconds=0.1, join_seconds=join_seconds)


async def _watch(watchdog: Watchdog, consumer: _Consumer, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        await watchdog.watch(cast("AIOKafkaConsumer", consumer), ("t",))


@pytest.mark.usefixtures("quick")
async def test_a_consumer_that_fetches_nothing_while_the_broker_answers_is_stuck() -> None:
    """S6."""
    watchdog = _watchdog(Intake(10, 1000))
    watchdog.joined()
    assert watchdog.is_alive
    with pytest.raises(BrokerUnavailable, match="stopped fetching"):
        await _watch(watchdog, _Consumer())


@pytest.mark.usefixtures("quick")
async def test_a_consumer_that_stops_fetching_is_stuck_also_when_the_wall_clock_was_set_back() -> None:
    """S6: its last fetch then lies in the future for as long as the clock went back."""
    watchdog, consumer = _watchdog(Intake(10, 1000)), _Consumer()
    consumer.fetched_at_ms = round(time.time() * 1000) + 3_600_000
    watchdog.joined()
    with pytest.raises(BrokerUnavailable, match="stopped fetching"):
        await _watch(watchdog, consumer)


@pytest.mark.usefixtures("quick")
async def test_a_consumer_with_a_full_intake_is_busy_and_not_stuck() -> None:
    """C1: a slow handler replaces nothing, also not in the moment when there is room again."""
    intake = Intake(1, 1000)
    delivery = Delivery("t", "t:0", 1, None, (), b"", None, is_redelivered=False, epoch=1)
    intake.add(delivery)
    watchdog = _watchdog(intake)
    watchdog.joined()
    with pytest.raises(TimeoutError):
        await _watch(watchdog, _Consumer(), seconds=1)
    intake.settle(delivery)
    with pytest.raises(TimeoutError):
        await _watch(watchdog, _Consumer(), seconds=0.15)


@pytest.mark.usefixtures("quick")
async def test_a_silent_broker_is_not_alive_and_after_long_the_consumer_begins_anew() -> None:
    """S5."""
    watchdog, consumer = _watchdog(Intake(10, 1000)), _Consumer()
    consumer.does_answer = False
    watchdog.joined()
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        await _watch(watchdog, consumer)
    assert not watchdog.is_alive


@pytest.mark.usefixtures("quick")
async def test_a_join_that_never_ends_is_begun_anew() -> None:
    """S6: rebalances may take long, but not for ever."""
    watchdog = _watchdog(Intake(10, 1000))
    assert not watchdog.is_alive
    with pytest.raises(BrokerUnavailable, match="joined"):
        await _watch(watchdog, _Consumer())


@pytest.mark.usefixtures("quick")
async def test_a_deleted_topic_is_named() -> None:
    """O2."""
    watchdog, consumer = _watchdog(Intake(10, 1000)), _Consumer()
    watchdog.joined()
    consumer.partitions = None
    with pytest.raises(TopologyError, match="'t' was deleted"):
        await _watch(watchdog, consumer)


@pytest.mark.usefixtures("quick")
async def test_a_topic_that_was_made_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: the client would read on in the new one; a mirrored cluster is another matter."""
    known = {"t": "cluster/one"}

    async def known_topics(*_: object) -> dict[str, str]:
        return known

    monkeypatch.setattr(module, "known_topics", known_topics)
    watchdog, consumer = _watchdog(Intake(10, 1000), topic_id="cluster/one"), _Consumer()
    watchdog.joined()
    for same in ("cluster/one", "other/two", ""):
        known["t"] = same
        await watchdog._raise_if_made_anew(cast("AIOKafkaConsumer", consumer))
    known["t"] = "cluster/two"
    with pytest.raises(TopologyError, match="'t' was deleted and made again"):
        await _watch(watchdog, consumer)
