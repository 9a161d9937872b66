"""One member of a consumer group on RabbitMQ: a connection, a channel per queue, a loop that renews them.

A `ConsumerSession` is one connection from its opening to its end. When it ends, the broker puts what
was not acknowledged back into the queues; the deliveries still in our hands are stale from then on.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from towpath.backoff import RetryPolicy
from towpath.brokers.intake import Intake
from towpath.brokers.ports import Delivery, GroupListener, Mark, Subscription
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.session import ConsumerSession, GivenBack, IntakeOverflow
from towpath.errors import BrokerUnavailable, ConfigurationError, TowpathError
from towpath.telemetry.logging import event_logger

_log: Final = event_logger(__name__)
_BACKOFF: Final = RetryPolicy(base="200ms", cap="5s")
_STEADY_SECONDS: Final = 30.0
_MAX_PREFETCH: Final = 65_535


class RabbitSubscriber:
    """The subscriber port over aio-pika."""

    def __init__(self, config: RabbitConfig, subscription: Subscription) -> None:
        self._config = config
        self._subscription = subscription
        self._intake = Intake(subscription.max_in_flight, subscription.max_in_flight_bytes)
        self._prefetch = min(_MAX_PREFETCH, subscription.max_in_flight)
        self._epoch = 0
        self._session: ConsumerSession | None = None
        self._runner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.last_error: TowpathError | None = None
        """Why the last session ended, for readiness texts; None while all is well."""

    async def start(self, listener: GroupListener) -> None:  # noqa: ARG002
        """Connect and consume. Raises BrokerUnavailable or ConfigurationError.

        The listener is not called: a queue moves to another member only when this one's channel has
        ended, and then there is nothing left to wait for.
        """
        session = self._new_session()
        await session.open()
        self._session = session
        self._runner = asyncio.create_task(self._run(session), name="rabbitmq-subscriber")

    def _new_session(self) -> ConsumerSession:
        return ConsumerSession(
            self._config, self._subscription, self._intake, prefetch=self._prefetch, new_epoch=self._new_epoch
        )

    def _new_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    async def _run(self, session: ConsumerSession) -> None:
        """Keep one session after another until closed."""
        failures = 0
        while True:
            started_at = time.monotonic()
            try:
                self._session = session  # its first queue delivers while the others are being opened
                if not session.is_open:
                    await session.open()
                self.last_error = None
                await session.run()
            except IntakeOverflow as overflow:
                self._prefetch = overflow.prefetch
                group = self._subscription.group
                _log.warning("broker.intake_reduced", group=group, prefetch=overflow.prefetch)
                failures = -1
            except GivenBack:
                await session.close()
                failures = -1
            except (BrokerUnavailable, ConfigurationError) as error:
                if self._closing.is_set():
                    return
                self.last_error = error
                _log.warning("broker.disconnected", group=self._subscription.group, error=str(error))
            finally:
                await session.abandon()
            failures = 0 if time.monotonic() - started_at > _STEADY_SECONDS else failures + 1
            await asyncio.sleep(_BACKOFF.delay(failures).total_seconds() if failures else 0)
            session = self._new_session()

    async def receive(self, max_count: int, *, timeout_seconds: float) -> Sequence[Delivery]:
        """Up to `max_count` deliveries in queue order; empty after the timeout.

        After a release it renews the connection: who receives no more, since it is about to close,
        keeps what it has until then.
        """
        if self._session is not None:
            self._session.end_if_given_back()
        if self._runner is not None and self._runner.done() and not self._closing.is_set():
            self._runner.result()  # a bug ended it: nothing would come any more
        return await self._intake.take(max_count, timeout_seconds=timeout_seconds)

    def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """Have them acknowledged by the session's settle task; stale ones are ignored."""
        if self._session is not None:
            for delivery in deliveries:
                self._session.acknowledge(delivery)

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Have them delivered again, before all that came after them."""
        if self._session is not None:
            for delivery in deliveries:
                self._session.release(delivery)

    def pause(self) -> None:
        """Fetch nothing more."""
        self._intake.pause()

    def resume(self) -> None:
        """Fetch again."""
        self._intake.resume()

    def is_current(self, delivery: Delivery) -> bool:
        """Whether the channel the delivery came by is still open."""
        return self._session is not None and self._session.holds(delivery)

    @property
    def is_connected(self) -> bool:
        """Whether every queue is consumed on an open channel and the broker answered lately."""
        return not self._closing.is_set() and self._session is not None and self._session.is_alive

    @property
    def marks(self) -> Mapping[str, Mark]:
        """None: this broker keeps no offsets that could be lost."""
        return {}

    async def aclose(self) -> None:
        """Send the acknowledgements, close; what was not acknowledged goes back. Bounded."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
