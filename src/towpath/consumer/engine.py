"""One consumer process: resources, connections, and one member after another until it is told to stop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from towpath.app import App
from towpath.brokers.ports import Broker, Subscription
from towpath.consumer.health import Health, round_seconds
from towpath.consumer.member import Member
from towpath.consumer.roster import cancel, wait_for
from towpath.consumer.slots import setting_problems
from towpath.errors import (
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    SchemaMismatch,
    StoreUnavailable,
    TowpathError,
)
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.database import Database, store_errors
from towpath.store.destinations import addresses_of, installation_of
from towpath.store.groups import GroupStore, Terms
from towpath.store.installed import ensure_installed
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import NO_TELEMETRY, Telemetry

_ACQUIRE_SECONDS: Final = 10.0

T = TypeVar("T")

log = event_logger(__name__)


class _Stopped(Exception):
    """Told to stop before it could begin."""


class Consumer:
    """Runs one group's app. `run` returns after `stop` was set and the drain ended."""

    def __init__(
        self,
        app: App,
        database: Database,
        broker: Broker,
        settings: WorkerSettings | None = None,
        *,
        outbox: Outbox | None = None,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        self._app = app
        self._database = database
        self._broker = broker
        self._settings = settings or WorkerSettings()
        self._outbox = outbox or Outbox(schema=database.schema)
        self._telemetry = telemetry
        self._terms = Terms(app.ordering, broker.queues_per_group, tuple(sorted(app.handlers)))
        self.health = Health(
            app.name,
            3 * self._settings.beat_every.total_seconds(),
            round_seconds(app.handlers, self._settings),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until told to stop.

        Raises ConfigurationError before the first message, SchemaMismatch also later, when the schema was
        changed into one this library cannot work with and what ran has ended, and bugs.
        """
        if problems := [*self._app.problems(), *setting_problems(self._app.handlers, self._settings)]:
            raise ConfigurationError("; ".join(problems))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._database.aclose)
            try:
                await self._persist(self._connect, stop)
                resources = {
                    cls: await stack.enter_async_context(factory())
                    for cls, factory in self._app.providers.items()
                }
                while not stop.is_set():
                    await self._run_member(resources, stop)
            except _Stopped:
                return
        if self.health.outdated is not None:
            raise self.health.outdated

    async def _connect(self) -> None:
        await self._database.start()
        with store_errors():
            async with self._database.pool.acquire(timeout=_ACQUIRE_SECONDS) as connection:
                await ensure_installed(connection, self._database.schema)

    async def _look_up(self) -> tuple[dict[str, str], str]:
        """The group's addresses and this installation's id. Raises GroupMismatch, before it joins."""
        pool, schema = self._database.pool, self._database.schema
        async with self._database.transaction() as connection:
            before = await GroupStore(self._app.name, schema).agree(connection, self._terms)
        if before is not None:
            log.warning(
                "worker.ordering_changed", group=self._app.name, before=before, ordering=self._app.ordering
            )
        addresses = await addresses_of(pool, self._app.destinations, schema)
        return addresses, await installation_of(self._database)

    async def _run_member(self, resources: Mapping[type, object], stop: asyncio.Event) -> None:
        """One incarnation: its own worker id and its own place in the group."""
        addresses, installation = await self._persist(self._look_up, stop)
        subscriber = self._broker.subscriber(
            Subscription(
                self._app.name,
                tuple(sorted(set(addresses.values()))),
                self._settings.max_in_flight,
                self._settings.max_in_flight_bytes,
            )
        )

        def outdated(error: SchemaMismatch) -> None:
            if self.health.outdated is None:
                log.error("worker.outdated", group=self._app.name, error=str(error))
            self.health.outdated = error
            stop.set()

        member = Member(
            self._app,
            self._database,
            subscriber,
            self._settings,
            terms=self._terms,
            installation=installation,
            destinations={address: name for name, address in addresses.items()},
            outbox=self._outbox,
            resources=resources,
            telemetry=self._telemetry,
            broker_labels=self._broker.labels,
            on_progress=self.health.note,
            on_outdated=outdated,
            on_paused=self.health.note_paused,
        )
        try:
            await self._persist(lambda: subscriber.start(member), stop)
            self.health.subscriber = subscriber
            await member.run(stop)
        except LeaseLost as error:
            self.health.error = error
            log.warning("worker.lease_lost", group=self._app.name, worker=str(member.id))
            self._telemetry.add(names.WORKER_LEASES_LOST, 1, group=self._app.name)
        except StoreUnavailable as error:
            self.health.error = error
            log.warning("worker.store_unavailable", group=self._app.name, error=error)
            await wait_for(stop, self._settings.due_poll_max.total_seconds())
        finally:
            self.health.subscriber = None
            self.health.paused = ()
            self.health.progressed_at.clear()
            await subscriber.aclose()

    async def _persist(self, act: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
        """Until it works, with back-off. Raises _Stopped when told to stop meanwhile, and wrong settings."""

        def note(state: RetryCallState) -> None:
            error = None if state.outcome is None else state.outcome.exception()
            self.health.error = error if isinstance(error, TowpathError) else None
            event = (
                "broker.disconnected" if isinstance(error, BrokerUnavailable) else "worker.store_unavailable"
            )
            log.warning(event, group=self._app.name, error=error)

        attempts = AsyncRetrying(
            retry=retry_if_exception_type((StoreUnavailable, BrokerUnavailable)),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            before_sleep=note,
        )
        acting = asyncio.create_task(_call(attempts, act))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({acting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not acting.done():
                raise _Stopped
            result = acting.result()
            self.health.error = None
            return result
        finally:
            await cancel([acting, stopping])


async def _call(attempts: AsyncRetrying, act: Callable[[], Awaitable[T]]) -> T:
    async def awaited() -> T:  # tenacity awaits coroutine functions only, not what a lambda returns
        return await act()

    return await attempts(awaited)
