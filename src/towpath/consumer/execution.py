"""Run one handler by the kind of its effect, and say what came of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tenacity import AsyncRetrying, retry_if_result, stop_after_attempt, wait_random_exponential

from towpath.app import App
from towpath.backoff import parse_duration
from towpath.consumer.effects.batch import Batching, Became, Member
from towpath.consumer.effects.calling import Caller, payload_of, seconds_left
from towpath.consumer.effects.executions import Execution, Failed, is_transient
from towpath.consumer.effects.idempotent import Idempotent
from towpath.consumer.effects.once import AtMostOnce
from towpath.consumer.effects.sync_transactional import SyncTransactional
from towpath.consumer.effects.transactional import Transactional
from towpath.consumer.policy import UNKNOWN_TYPE
from towpath.consumer.settling import until_available
from towpath.errors import DeadlinePassed, DecodeError
from towpath.failures import Failure
from towpath.handlers import Effect, Handler
from towpath.outbox import Outbox
from towpath.store.database import Database
from towpath.store.doubts import DoubtStore
from towpath.store.settles import SettleStore
from towpath.store.sync_settles import SyncSettleStore
from towpath.store.work import Work

_FREE_IN_PLACE_TRIES: Final = 3
"""Serialization failures and lock timeouts come again at once, whatever the policy says."""


class Executor:
    """Runs handlers of one group for one worker."""

    def __init__(
        self,
        app: App,
        database: Database,
        settles: SettleStore,
        sync_settles: SyncSettleStore,
        doubts: DoubtStore,
        outbox: Outbox,
        resources: Mapping[type, object],
        report_progress: Callable[[Work, Mapping[str, object]], None],
    ) -> None:
        self._app = app
        self.caller = caller = Caller(app, resources)
        """Also for those who ask what became of an effect."""
        self._transactional = Transactional(caller, database, settles, outbox)
        self._sync_transactional = SyncTransactional(caller, database, sync_settles, outbox)
        self._idempotent = Idempotent(caller, database, settles, outbox, report_progress)
        self._classifier = app.classifier
        self._batching = Batching(caller, database, settles, outbox, self._classifier)
        self._once = AtMostOnce(caller, doubts, self._classifier, report_progress, until_available)
        self._unknown_max_age = parse_duration(app.unknown_max_age)

    async def execute(self, work: Work) -> Execution:
        """What came of one attempt. Only cancellation is raised."""
        found = self._read(work)
        if isinstance(found, Failed):
            return found
        handler, payload = found
        execution = await self._try(handler, work, payload)
        if isinstance(execution, Failed) and execution.failure.in_place:
            return await self.again_in_place(handler, work, payload, execution)
        return execution

    def member(self, work: Work) -> Member | Failed:
        """The work as a member of a batch."""
        found = self._read(work)
        return found if isinstance(found, Failed) else Member(work, found[1])

    async def execute_batch(self, handler: Handler, members: Sequence[Member], became: Became) -> None:
        """What came of all, told as it is known. Only cancellation is raised."""
        await self._batching.run(handler, members, became)

    def _read(self, work: Work) -> tuple[Handler, object] | Failed:
        """Its handler and payload."""
        left = seconds_left(work)
        if left is not None and left <= 0:
            late = DeadlinePassed("the deadline passed before it could start")
            return Failed(self._classifier.classify(late), 0)
        handler = self._app.handlers.get(work.type)
        if handler is None:
            return Failed(self._unknown_type(work), 0)
        try:
            return handler, payload_of(handler, work)
        except DecodeError as error:
            return Failed(self._classifier.classify(error), 0, "decode")

    async def again_in_place(self, handler: Handler, work: Work, payload: object, first: Failed) -> Execution:
        """Clearly transient: a few tries at once, which count as attempts unless they are free."""
        spent = 0

        def note(failed: Execution) -> Execution:
            nonlocal spent
            spent += isinstance(failed, Failed) and not failed.failure.is_free
            return Failed(failed.failure, spent) if isinstance(failed, Failed) else failed

        async def one_try() -> Execution:
            return note(await self._try(handler, work, payload))

        last = note(first)
        left = handler.retry.attempts - work.attempt - 1
        limit = _FREE_IN_PLACE_TRIES if first.failure.is_free else min(handler.retry.in_place, left)
        if limit <= 0:
            return last
        retrying = AsyncRetrying(
            stop=stop_after_attempt(limit),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry=retry_if_result(is_transient),
            retry_error_callback=lambda state: None if state.outcome is None else state.outcome.result(),
        )
        execution: Execution = await retrying(one_try)
        return execution

    async def _try(self, handler: Handler, work: Work, payload: object) -> Execution:
        try:
            match handler.effect:
                case Effect.TRANSACTIONAL if handler.is_sync:
                    return await self._sync_transactional.run(handler, work, payload)
                case Effect.TRANSACTIONAL:
                    return await self._transactional.run(handler, work, payload)
                case Effect.IDEMPOTENT:
                    return await self._idempotent.run(handler, work, payload)
                case Effect.BATCH:
                    return await self._batching.run_alone(handler, Member(work, payload))
                case Effect.AT_MOST_ONCE:
                    return await self._once.run(handler, work, payload)
        except Exception as error:  # noqa: BLE001 - the edge: whatever a handler raises is classified
            return Failed(self._classifier.classify(error))

    def _unknown_type(self, work: Work) -> Failure:
        """Held for a rolling deploy, dead after a set age."""
        is_too_old = work.age_seconds >= self._unknown_max_age.total_seconds()
        return Failure(
            kind="dead" if is_too_old else "retry",
            scope="message" if is_too_old else "configuration",
            reason_code=UNKNOWN_TYPE,
            error_class="UnknownType",
            error_message=f"{self._app.name} has no handler for {work.type!r}: deploy one, or app.ignore it",
            fingerprint=f"{UNKNOWN_TYPE}:{work.type}"[:64],
        )
