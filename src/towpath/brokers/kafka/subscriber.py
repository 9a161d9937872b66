"""One member of a Kafka consumer group: polled, committed and watched over by tasks of its own.

The library's consumer is replaced, never repaired: a `_Session` is one consumer from its bootstrap
to its end, and the subscriber opens the next one after an error, with a pause that grows.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from towpath.backoff import RetryPolicy
from towpath.brokers.intake import Intake
from towpath.brokers.kafka.assignments import Assignments
from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.kafka.session import ConsumerSession
from towpath.brokers.ports import Delivery, GroupListener, Mark, Subscription
from towpath.errors import BrokerUnavailable, ConfigurationError, TowpathError
from towpath.telemetry.logging import event_logger

_log: Final = event_logger(__name__)
_BACKOFF: Final = RetryPolicy(base="200ms", cap="5s")
_STEADY_SECONDS: Final = 30.0


class KafkaSubscriber:
    """The subscriber port over aiokafka."""

    def __init__(self, config: KafkaConfig, subscription: Subscription) -> None:
        self._config = config
        self._subscription = subscription
        self._intake = Intake(subscription.max_in_flight, subscription.max_in_flight_bytes)
        self._assignments = Assignments(self._intake)
        self._session: ConsumerSession | None = None
        self._runner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.last_error: TowpathError | None = None
        """Why the last session ended, for readiness texts; None while all is well."""

    async def start(self, listener: GroupListener) -> None:
        """Connect; joining goes on in the background. Raises BrokerUnavailable or ConfigurationError."""
        session = self._new_session(listener)
        await session.open()
        self._session = session
        self._runner = asyncio.create_task(self._run(session, listener), name="kafka-subscriber")

    def _new_session(self, listener: GroupListener) -> ConsumerSession:
        return ConsumerSession(self._config, self._subscription, self._intake, self._assignments, listener)

    async def _run(self, first: ConsumerSession, listener: GroupListener) -> None:
        """Poll until closed; after an error end the session and open another."""
        session, failures = first, 0
        while not self._closing.is_set():
            started_at = time.monotonic()
            try:
                if not session.is_open:
                    await session.open()
                self._session, self.last_error = session, None
                await session.poll(self._closing)
            except (BrokerUnavailable, ConfigurationError) as error:
                self.last_error = error
                _log.warning("broker.disconnected", group=self._subscription.group, error=str(error))
            finally:
                if not self._closing.is_set():
                    await session.end()
            if self._closing.is_set():
                return
            failures = 0 if time.monotonic() - started_at > _STEADY_SECONDS else failures + 1
            try:
                async with asyncio.timeout(_BACKOFF.delay(failures).total_seconds()):
                    await self._closing.wait()
            except TimeoutError:
                session = self._new_session(listener)

    async def receive(self, max_count: int, *, timeout_seconds: float) -> Sequence[Delivery]:
        """Up to `max_count` deliveries in partition order; empty after the timeout."""
        if self._runner is not None and self._runner.done() and not self._closing.is_set():
            self._runner.result()  # a bug ended it: nothing would come any more
        return await self._intake.take(max_count, timeout_seconds=timeout_seconds)

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """Advance the watermarks; the session commits them soon."""
        for delivery in deliveries:
            self._assignments.acknowledge(delivery)

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Go back to the first of them, where the partition is still ours; else they were never committed."""
        first_offsets = self._assignments.release(deliveries)
        if self._session is not None and not self._closing.is_set():
            self._session.seek_back(first_offsets)

    def pause(self) -> None:
        """Fetch nothing more."""
        self._intake.pause()

    def resume(self) -> None:
        """Fetch again."""
        self._intake.resume()

    def is_current(self, delivery: Delivery) -> bool:
        """Whether the partition is still assigned to this member under the delivery's epoch."""
        return self._assignments.is_current(delivery)

    @property
    def is_connected(self) -> bool:
        """Whether the consumer has joined and knows where to read, and the broker answered lately."""
        is_alive = self._session is not None and self._session.is_alive
        return not self._closing.is_set() and is_alive and not self._assignments.is_placing

    @property
    def marks(self) -> Mapping[str, Mark]:
        """How far each partition held is committed, and which wait for a person's word."""
        return self._assignments.marks

    async def aclose(self) -> None:
        """Commit what was acknowledged, leave the group, close; each step is bounded."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
        self._assignments.clear()
