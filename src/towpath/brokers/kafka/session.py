"""One consumer of aiokafka from its bootstrap to its end.

The poll task is never cancelled while the consumer lives: a cancelled `getmany` spoils the library's
bookkeeping. It looks at a flag between polls; only when the consumer is thrown away is it cancelled.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka

from towpath.brokers.intake import Intake
from towpath.brokers.kafka.assignments import Assignments, UnassignedRecord, partition_name
from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.kafka.connection import bury_consumer, connection_error, stop_consumer
from towpath.brokers.kafka.errors import describe, translate
from towpath.brokers.kafka.placing import Placing
from towpath.brokers.kafka.turns import Turns
from towpath.brokers.kafka.watchdog import Watchdog
from towpath.brokers.ports import GroupListener, Subscription
from towpath.errors import BrokerUnavailable, ConfigurationError, TopologyError
from towpath.telemetry.logging import event_logger

_log: Final = event_logger(__name__)
_CLIENT_ERRORS: Final = (
    kafka.KafkaError,
    kafka.ConsumerStoppedError,
    kafka.IllegalOperation,
    UnassignedRecord,
    OSError,
    TimeoutError,
)
_NOWHERE: Final = TopicPartition("towpath-nothing", 0)
"""Polled while the intake is full: surfaces errors and leaves the prefetched records where they are.
(Pausing the partitions would throw them away.)"""
_POLL_MS: Final = 200
_POLL_RECORDS: Final = 500
_COMMIT_SECONDS: Final = 5.0
_LEAVE_SECONDS: Final = 2.0
_DRAIN_SHARE: Final = 0.6


class ConsumerSession:
    """A consumer with its poll, commit and watch tasks."""

    def __init__(
        self,
        config: KafkaConfig,
        subscription: Subscription,
        intake: Intake,
        assignments: Assignments,
        listener: GroupListener,
    ) -> None:
        self._config = config
        self._subscription = subscription
        self._intake = intake
        self._assignments = assignments
        self._listener = listener
        self._consumer: AIOKafkaConsumer | None = None
        self._commit_lock = asyncio.Lock()
        self._is_closing = False
        self._placing = Placing(config, subscription.group, assignments, listener)
        self._watchdog = Watchdog(
            assignments,
            intake,
            silence_seconds=config.request_timeout_seconds,
            join_seconds=config.rebalance_timeout_seconds,
        )

    @property
    def is_open(self) -> bool:
        """Whether there is a consumer."""
        return self._consumer is not None

    @property
    def is_alive(self) -> bool:
        """Whether the group was joined and the broker answered within the last seconds."""
        return self._watchdog.is_alive

    async def open(self) -> None:
        """Connect, check the topics, begin to join. Raises BrokerUnavailable or ConfigurationError."""
        consumer = AIOKafkaConsumer(
            group_id=self._subscription.group,
            fetch_max_bytes=max(1_048_576, min(52_428_800, self._subscription.max_in_flight_bytes)),
            **{**self._config.client, **self._config.consumer},
        )
        self._consumer = consumer
        try:
            async with asyncio.timeout(self._config.request_timeout_seconds):
                await consumer.start()
                known = await consumer.topics()
        except _CLIENT_ERRORS as error:
            await self.abandon()
            raise await connection_error(self._config, error) from error
        except BaseException:
            await self.abandon()
            raise
        missing = [address for address in self._subscription.addresses if address not in known]
        if missing:
            await self.abandon()
            raise TopologyError(
                f"Kafka topic {missing[0]!r} does not exist or may not be seen: "
                "create it (towpath broker apply)"
            )
        self._watchdog.answered()
        consumer.subscribe(list(self._subscription.addresses), listener=_Rebalance(self))

    async def poll(self, closing: asyncio.Event) -> None:
        """Run until `closing`; raises BrokerUnavailable or ConfigurationError when the session is over."""
        consumer = self._consumer
        if consumer is None:
            raise BrokerUnavailable("Kafka: the consumer is not open")
        addresses = self._subscription.addresses
        tasks = [
            asyncio.create_task(self._poll(consumer, closing), name="kafka-poll"),
            asyncio.create_task(self._commit_regularly(), name="kafka-commit"),
            asyncio.create_task(self._placing.run(consumer), name="kafka-place"),
            asyncio.create_task(self._watchdog.watch(consumer, addresses), name="kafka-watch"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():  # by the library: nobody here does it before the end
                    raise BrokerUnavailable("Kafka: the client cancelled what it was asked for")
                task.result()
        except _CLIENT_ERRORS as error:
            ours = translate(error)
            if isinstance(ours, (BrokerUnavailable, ConfigurationError)):
                raise ours from error
            raise BrokerUnavailable(str(ours)) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _poll(self, consumer: AIOKafkaConsumer, closing: asyncio.Event) -> None:
        is_full, turns = False, Turns()
        while not closing.is_set():
            is_full = self._intake.is_full or (is_full and not self._intake.has_room)
            if is_full:
                await self._intake.wait_for_room(timeout_seconds=_POLL_MS / 1000)
                await consumer.getmany(_NOWHERE)
                continue
            wanted = max(1, min(_POLL_RECORDS, self._intake.free_count))
            try:
                fetched = await turns.fetch(consumer, max_records=wanted, timeout_ms=_POLL_MS)
            except kafka.OffsetOutOfRangeError as error:
                self._placing.displace(consumer, error.args[0])
                continue
            # Nothing may be awaited from here on: a rebalance could come between a record and its epoch.
            for records in fetched.values():
                for record in records:
                    self._assignments.arrive(record)
            if fetched:
                await asyncio.sleep(0)

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._config.commit_interval_seconds)
            await self.commit(timeout_seconds=_COMMIT_SECONDS)

    async def commit(self, *, timeout_seconds: float) -> None:
        """Commit the watermarks that moved. A failure is logged: what is not committed comes again.

        Raises ConfigurationError where this user may not commit at all.
        """
        consumer = self._consumer
        if consumer is None:
            return
        try:
            async with asyncio.timeout(timeout_seconds), self._commit_lock:
                marks = self._assignments.committable()
                if not marks:
                    return
                await consumer.commit(marks)
                self._assignments.committed(marks)
                self._watchdog.answered()
        except _CLIENT_ERRORS as error:
            ours = translate(error)
            _log.info("broker.commit_failed", group=self._subscription.group, error=describe(error))
            if isinstance(ours, ConfigurationError):
                raise ours from error

    def seek_back(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these partitions again from the given offsets on."""
        consumer = self._consumer
        for topic_partition, offset in offsets.items():
            try:
                if consumer is not None:
                    consumer.seek(topic_partition, offset)
            except kafka.IllegalStateError:  # revoked meanwhile: not committed, so its next owner reads it
                continue

    async def revoking(self) -> None:
        """Drain within its share of the rebalance timeout, commit, hold nothing."""
        names = self._assignments.begin_revoking()
        started_at = time.monotonic()
        try:
            if names and not self._is_closing:
                budget = self._config.rebalance_timeout_seconds * _DRAIN_SHARE
                async with asyncio.timeout(budget + 1.0):
                    await self._listener.revoking(names, timeout_seconds=budget)
        except TimeoutError:
            _log.warning("broker.drain_timed_out", group=self._subscription.group, partitions=sorted(names))
        finally:
            try:
                budget = min(_COMMIT_SECONDS, self._config.rebalance_timeout_seconds / 10)
                await self.commit(timeout_seconds=budget)
            finally:
                self._assignments.clear()
                self._watchdog.left()
                if names:
                    _log.info(
                        "broker.partitions_revoked",
                        group=self._subscription.group,
                        partitions=sorted(names),
                        seconds=round(time.monotonic() - started_at, 3),
                    )

    def assigned(self, topic_partitions: set[TopicPartition]) -> None:
        """Hold these under a new epoch. They are read when their place is found."""
        self._assignments.assign(topic_partitions)
        if self._consumer is not None:
            self._placing.begin(self._consumer)
        names = sorted(partition_name(each) for each in topic_partitions)
        _log.info("broker.partitions_assigned", group=self._subscription.group, partitions=names)
        self._watchdog.joined()

    async def close(self) -> None:
        """Commit, leave, close; bounded, never raises for a dead broker."""
        await self._leave(timeout_seconds=_COMMIT_SECONDS)
        await self.abandon()

    async def end(self) -> None:
        """After an error: leave if the broker still answers, so that the others need not wait; close."""
        if self.is_alive:
            await self._leave(timeout_seconds=_LEAVE_SECONDS)
        await self.abandon()

    async def _leave(self, *, timeout_seconds: float) -> None:
        self._is_closing = True
        try:
            await self.commit(timeout_seconds=timeout_seconds)
        except ConfigurationError as error:
            _log.warning("broker.commit_failed", group=self._subscription.group, error=str(error))
        consumer = self._consumer
        if consumer is not None:
            try:
                await stop_consumer(consumer, timeout_seconds=timeout_seconds)
            except _CLIENT_ERRORS as error:
                _log.info("broker.leave_failed", group=self._subscription.group, error=describe(error))

    async def abandon(self) -> None:
        """Throw the consumer away without committing or leaving; bounded."""
        consumer, self._consumer = self._consumer, None
        self._watchdog.left()
        self._assignments.clear()
        if consumer is not None:
            await bury_consumer(consumer)


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]  # the library is not typed
    """Carries the library's callbacks to the session. They run in the coordinator's task."""

    def __init__(self, session: ConsumerSession) -> None:
        self._session = session

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:  # noqa: ARG002
        await self._session.revoking()

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._session.assigned(assigned)
