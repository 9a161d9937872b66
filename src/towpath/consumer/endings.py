"""From what came of a handler to a durable outcome, and what its breaker learns from it."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from towpath.app import App
from towpath.brokers.ports import Delivery
from towpath.consumer.breakers import Breakers
from towpath.consumer.effects.executions import Committed, Done, Dropped, Execution, Failed, InDoubt
from towpath.consumer.intake import origin_of
from towpath.consumer.policy import End, Wait, decide
from towpath.consumer.reporting import Report
from towpath.consumer.settling import GroupCommit, Success, until_available
from towpath.crashpoints import CrashPoint, crash_point
from towpath.failures import Failure
from towpath.states import TaskState, WaitingFor
from towpath.store.deaths import Stage
from towpath.store.doubts import DoubtStore
from towpath.store.settles import SettleStore, Waits
from towpath.store.work import Work
from towpath.telemetry.tracing import ProcessSpan

CANCELLED: Final = Failure("dead", "cancelled", error_class="Cancelled", error_message="cancelled on request")
_TROUBLE_SECONDS: Final = 5.0


class Endings:
    """Settles attempts of one worker, each by itself; successes in batches."""

    def __init__(
        self,
        app: App,
        settles: SettleStore,
        doubts: DoubtStore,
        group_commit: GroupCommit,
        breakers: Breakers,
        report: Report,
        wake_due_after: Callable[[float], None],
    ) -> None:
        self._app = app
        self._settles = settles
        self._doubts = doubts
        self._group_commit = group_commit
        self._breakers = breakers
        self._report = report
        self._wake_due_after = wake_due_after

    async def settle(
        self, work: Work, execution: Execution, span: ProcessSpan, delivery: Delivery | None
    ) -> str | None:
        """Make the outcome durable. Its name; None: the token is gone."""
        match execution:
            case Dropped():
                return None
            case Committed(state=state, promoted_count=promoted, reason_code=reason):
                self.succeeded(work)
                self.promoted(promoted)
                return self._report.ended(work, span, state, reason)
            case Done(state=TaskState.SUCCEEDED):
                success = Success(work, execution.result)
                await self._group_commit.settle([success])
                if isinstance(success.outcome, Exception):  # the database refuses this row's result
                    failure = self._app.classifier.classify(success.outcome)
                    return await self.settle(work, Failed(failure), span, delivery)
                if not success.outcome:
                    return None
                self.succeeded(work)
                return self._report.ended(work, span, TaskState.SUCCEEDED, None)
            case Done(reason_code=reason):
                failure = Failure("reject", reason or "rejected", error_message=execution.detail or "")
                return await self.settle(work, Failed(failure), span, delivery)
            case InDoubt(failure=failure):
                return await until_available(lambda: self._doubt(work, failure, span))
            case Failed() as failed:
                self._failed(work, failed.failure)
                try:
                    return await until_available(lambda: self._fail(work, failed, span, delivery))
                except Exception as trouble:  # noqa: BLE001 - nothing is lost: the row goes back
                    self._report.trouble(work, trouble)
                    await asyncio.sleep(_TROUBLE_SECONDS)
                    await until_available(lambda: self._settles.hand_back([work]))
                    return None

    async def _doubt(self, work: Work, failure: Failure, span: ProcessSpan) -> str | None:
        span.failed(failure)
        seconds = self._app.retry.base_delay.total_seconds()
        if not await self._doubts.doubt(work, failure, reconcile_after_seconds=seconds):
            return None
        return self._report.ended(work, span, TaskState.UNKNOWN, failure.reason_code)

    async def _fail(
        self, work: Work, failed: Failed, span: ProcessSpan, delivery: Delivery | None
    ) -> str | None:
        failure = failed.failure
        span.failed(failure)
        if failure is CANCELLED:
            return await self._end(work, TaskState.CANCELLED, failed, 0, span, delivery)
        free = self._breakers.waits(work.type, failure)
        if free is not None:
            rest = Wait(free, WaitingFor.RETRY, spent=0, counts_towards_age=False)
            return await self._wait(work, rest, failure, span)
        handler = self._app.handlers.get(work.type)
        age = timedelta(seconds=work.age_seconds + time.monotonic() - work.claimed_at)
        decision = decide(
            failure,
            self._app.retry if handler is None else handler.retry,
            attempts_before=work.attempt,
            version=work.version,
            tries=failed.tries,
            age=age,
        )
        if isinstance(decision, End):
            return await self._end(work, decision.state, failed, decision.spent, span, delivery)
        return await self._wait(work, decision, failure, span)

    async def _wait(self, work: Work, decision: Wait, failure: Failure, span: ProcessSpan) -> str | None:
        waits = await self.store_wait(work, decision, failure)
        if waits is None:
            return None
        return self._report.waits(work, waits, decision.delay, decision.waiting_for, failure, span)

    async def store_wait(self, work: Work, decision: Wait, failure: Failure) -> Waits | None:
        """Keep it in the database until it is due. None: the token is gone."""
        seconds = decision.delay.total_seconds()
        waits = await self._settles.wait(
            work,
            failure,
            delay_seconds=seconds,
            waiting_for=decision.waiting_for,
            spent=decision.spent,
            ageless_seconds=0.0 if decision.counts_towards_age else seconds,
        )
        if waits is not None:
            crash_point(CrashPoint.WAITING_BEFORE_ACK)
            self._wake_due_after(seconds)
        return waits

    async def _end(
        self,
        work: Work,
        state: TaskState,
        failed: Failed,
        spent: int,
        span: ProcessSpan,
        delivery: Delivery | None,
    ) -> str | None:
        failure, stage = failed.failure, failed.stage
        promoted = await self._settles.end(
            work, state, failure, spent=spent, stage=stage, origin=origin_of(delivery)
        )
        if promoted is None:
            return None
        self.promoted(promoted)
        if state is TaskState.DEAD:
            self.died(work, failure, stage)
            crash_point(CrashPoint.BURIED_BEFORE_ACK)
        return self._report.ended(work, span, state, failure.reason_code)

    def promoted(self, count: int) -> None:
        """So many followers are due now."""
        if count:
            self._wake_due_after(0.0)

    def succeeded(self, work: Work) -> None:
        """A message ended well, or was rejected by a handler that worked."""
        breaker = self._breakers.note_success(work.type)
        if breaker is not None:
            self._wake_due_after(0.0)
            self._report.breaker(breaker, len(self._breakers.opened()))

    def _failed(self, work: Work, failure: Failure) -> None:
        """A handler raised: perhaps its dependency is away for everybody."""
        if failure.kind == "reject":
            self.succeeded(work)
            return
        breaker = self._breakers.note_failure(work.type, work, work.lane or work.id, failure)
        self._report.breaker(breaker, len(self._breakers.opened()))

    def died(self, work: Work, failure: Failure, stage: Stage) -> None:
        """It is in the catalog."""
        self._report.died(work, failure, stage)
        breaker = self._breakers.note_death(work.type, work, failure.reason_code)
        self._report.breaker(breaker, len(self._breakers.opened()))
