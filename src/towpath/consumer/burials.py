"""Messages that no handler gets to see: unreadable, unstorable, or dead-lettered by the broker itself."""

import asyncio
from typing import Final

import asyncpg

from towpath.app import App
from towpath.brokers.ports import BrokerDeath
from towpath.consumer.endings import Endings
from towpath.consumer.held import Held
from towpath.consumer.intake import origin_of
from towpath.consumer.lanes import Received
from towpath.consumer.reporting import Report
from towpath.consumer.running import Runner
from towpath.consumer.settling import until_available
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import DecodeError
from towpath.failures import Failure
from towpath.store.broker_deaths import BrokerDeathStore
from towpath.store.settles import SettleStore
from towpath.store.work import Standing, Work

UNSTORABLE: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)
"""What the database says about one message of a batch."""
_TROUBLE_SECONDS: Final = 5.0
_OUTAGE_SECONDS: Final = 0.5
_WRONG_DATABASE: Final = (
    "the task's row is in another installation's database: submit works within one database, send between two"
)


class Burials:
    """Brings them into the catalog, then acknowledges them."""

    def __init__(
        self,
        app: App,
        settles: SettleStore,
        deaths: BrokerDeathStore,
        *,
        installation: str,
        held: Held,
        runner: Runner,
        endings: Endings,
        report: Report,
    ) -> None:
        self._app = app
        self._settles = settles
        self._deaths = deaths
        self._installation = installation
        self._held = held
        self._runner = runner
        self._endings = endings
        self._report = report

    def is_of_another_database(self, work: Work, standing: Standing) -> bool:
        """Whether its body is in a row that this database never had."""
        if standing is not Standing.MISSING or work.envelope is None or work.envelope.body != "row":
            return False
        return work.envelope.installation != self._installation

    async def bury_foreign(self, received: Received) -> None:
        """Bury what is of another database."""
        await self.bury(received, DecodeError("wrong_database", _WRONG_DATABASE))

    async def bury(self, received: Received, error: Exception) -> None:
        """A message that no claim can hold goes to the catalog as it is."""
        work = received.work
        cause = error if isinstance(error, DecodeError) else DecodeError("not_storable", str(error))
        failure = self._app.classifier.classify(cause)
        if not isinstance(error, DecodeError):
            work.type, work.key, work.headers = "undecodable", None, ()
        try:
            await until_available(
                lambda: self._settles.dead_on_arrival(work, failure, origin=origin_of(received.delivery))
            )
        except Exception as trouble:  # noqa: BLE001 - the catalog refuses it: nothing is lost, it waits
            await self._wait(received, trouble)
            return
        self._endings.died(work, failure, "decode")
        crash_point(CrashPoint.BURIED_BEFORE_ACK)
        self._held.finish([received])

    async def ingest(self, received: Received, death: BrokerDeath) -> None:
        """The broker dead-lettered it by itself: into the catalog, unless its task goes on without it."""
        work = received.work
        failure = Failure(
            "dead",
            f"broker_{death.reason}",
            error_class="BrokerDeadLetter",
            error_message=f"the broker took it from {death.queue or 'a queue'}: {death.reason}",
            fingerprint=f"broker_{death.reason}",
        )
        try:
            standing = await until_available(
                lambda: self._deaths.take(work, failure, origin=origin_of(received.delivery))
            )
        except Exception as trouble:  # noqa: BLE001 - the catalog refuses it: nothing is lost, it waits
            await self._wait(received, trouble)
            return
        if standing is None:
            self._report.died(work, failure, "broker")
            crash_point(CrashPoint.BURIED_BEFORE_ACK)
            self._held.finish([received])
        elif self.is_of_another_database(work, standing):
            await self.bury_foreign(received)
        elif self._runner.may_acknowledge(work, standing):
            self._held.finish([received])
        else:
            self._held.hold(received, _OUTAGE_SECONDS)

    async def _wait(self, received: Received, trouble: Exception) -> None:
        self._report.trouble(received.work, trouble)
        await asyncio.sleep(_TROUBLE_SECONDS)
        self._held.hold(received, _OUTAGE_SECONDS)
