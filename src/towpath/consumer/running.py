"""One claimed message from its handler to a durable outcome."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from towpath.app import App
from towpath.brokers.ports import BrokerDeath, Delivery
from towpath.consumer.breakers import Breakers
from towpath.consumer.effects.batch import Member
from towpath.consumer.effects.executions import Committed, Done, Dropped, Execution, Failed, InDoubt
from towpath.consumer.execution import Executor
from towpath.consumer.intake import origin_of
from towpath.consumer.pauses import Pauses
from towpath.consumer.policy import End, Wait, decide
from towpath.consumer.reporting import Report
from towpath.consumer.runs import Phase, Run, by_owner
from towpath.consumer.settling import GroupCommit, Success, until_available
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import DecodeError
from towpath.failures import Failure
from towpath.handlers import Handler
from towpath.states import TaskState, WaitingFor
from towpath.store.broker_deaths import BrokerDeathStore
from towpath.store.claims import ClaimStore
from towpath.store.deaths import Stage
from towpath.store.doubts import DoubtStore
from towpath.store.settles import SettleStore, Waits
from towpath.store.work import Standing, Work
from towpath.telemetry.metrics import Telemetry
from towpath.telemetry.tracing import ProcessSpan, process_span

_TROUBLE_SECONDS: Final = 5.0


class Runner:
    """Runs claimed work of one worker and settles it, whatever happens."""

    def __init__(
        self,
        app: App,
        claims: ClaimStore,
        settles: SettleStore,
        doubts: DoubtStore,
        broker_deaths: BrokerDeathStore,
        group_commit: GroupCommit,
        executor: Executor,
        breakers: Breakers,
        pauses: Pauses,
        telemetry: Telemetry,
        broker_labels: Mapping[str, str | int],
        wake_due_after: Callable[[float], None],
        max_deliveries: int,
    ) -> None:
        self._app = app
        self._claims = claims
        self._settles = settles
        self._doubts = doubts
        self._broker_deaths = broker_deaths
        self._group_commit = group_commit
        self._executor = executor
        self._breakers = breakers
        self._pauses = pauses
        self._report = Report(app.name, telemetry)
        self._broker_labels = broker_labels
        self._wake_due_after = wake_due_after
        self._max_deliveries = max_deliveries

    def claimed(self, runs: Sequence[Run]) -> None:
        """Their attempts begin."""
        self._report.claimed([run.work for run in runs])

    def begin(self, run: Run) -> Failed | None:
        """Open its span. Failed: its handler must not run."""
        work = run.work
        run.began_at = time.monotonic()
        headers = work.headers if work.trace is None else (("traceparent", work.trace.encode()),)
        run.span = span = process_span(
            headers,
            destination=work.source,
            group=self._app.name,
            message_id=work.id,
            type_=work.type,
            attempt=work.attempt + 1,
            run_no=work.run_no,
            trigger=work.trigger,
            labels=self._broker_labels,
        )
        work.trace = work.trace or span.traceparent
        if work.deliveries > self._max_deliveries:
            return Failed(_exhausted_deliveries(work.deliveries - 1), 0)
        if work.is_cancel_requested or run.phase is Phase.CANCELLED:
            return Failed(CANCELLED, 0)
        run.phase = Phase.HANDLING
        return None

    async def handle(self, run: Run) -> Execution:
        """What comes of the handler. Only cancellation is raised, and then nothing was settled."""
        execution = self.begin(run) or await self._guarded(run, self._executor.execute(run.work))
        run.phase = Phase.SETTLING
        crash_point(CrashPoint.HANDLED_BEFORE_SETTLE)
        return execution

    async def try_alone(self, run: Run, handler: Handler, member: Member, failed: Failed) -> None:
        """A member of a batch failed for a clearly transient reason: try it by itself, then settle."""
        trying = self._executor.again_in_place(handler, run.work, member.payload, failed)
        await self.conclude(run, await self._guarded(run, trying))

    async def _guarded(self, run: Run, act: Coroutine[Any, Any, Execution]) -> Execution:
        """Cancellation on request becomes a failure of its own; any other ends the run."""
        span = span_of(run)
        try:
            with span.current:
                return await act
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError) or run.phase is not Phase.CANCELLED:
                span.abort(error)
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return InDoubt(CANCELLED) if run.work.is_effect_begun else Failed(CANCELLED, 0)

    async def conclude(self, run: Run, execution: Execution) -> None:
        """Settle one, and tell its owner."""
        run.phase = Phase.SETTLING
        run.owner.handled([run])
        work, span = run.work, span_of(run)
        delivery = None if run.received is None else run.received.delivery
        try:
            with span.current:
                outcome = await self._settle(work, execution, span, delivery)
        except BaseException as error:
            span.abort(error)
            raise
        span.end()
        if outcome is not None:
            error_class = execution.failure.error_class if isinstance(execution, Failed) else None
            self._report.settled([run], outcome, error_class)
            run.owner.settled([run])
            return
        if await self._is_over_for(work):
            run.owner.settled([run])
        else:
            run.owner.unsettled(run)

    async def postpone(self, work: Work) -> bool:
        """Let it wait in the database, unspent, until its handler is not paused any more.

        True: its broker message may be acknowledged.
        """
        why = _STOPPED if self._pauses.holds(work.type) else _PAUSED
        delay = self._breakers.waits(work.type, _PAUSED) or timedelta(0)
        rest = Wait(delay, WaitingFor.RETRY, spent=0, counts_towards_age=False)
        waits = await until_available(lambda: self._store_wait(work, rest, why))
        if waits is None:
            return await self._is_over_for(work)
        self._report.postponed(work, why.reason_code)
        return True

    async def _is_over_for(self, work: Work) -> bool:
        """The token is gone: whether its broker message may be acknowledged all the same."""
        self._report.dropped(work)
        findings = await until_available(lambda: self._claims.findings([work.id]))
        return self.may_acknowledge(work, findings[work.id].standing)

    async def conclude_all(self, succeeded: Sequence[tuple[Run, Done]]) -> None:
        """Settle successes of one owner in one go; whom the database refuses goes its own way."""
        if not succeeded:
            return
        succeeded[0][0].owner.handled([run for run, _ in succeeded])
        successes = [Success(run.work, done.result) for run, done in succeeded]
        await self._group_commit.settle(successes)
        outcomes = list(zip([run for run, _ in succeeded], successes, strict=True))
        self._have_succeeded([run for run, success in outcomes if success.outcome is True])
        for run, success in outcomes:
            if isinstance(success.outcome, Exception):
                await self.conclude(run, Failed(self._app.classifier.classify(success.outcome)))
            elif not success.outcome:
                await self.conclude(run, Dropped())

    def committed(self, runs: Sequence[Run], promoted_count: int) -> None:
        """Successes that a handler's transaction has settled."""
        if promoted_count:
            self._wake_due_after(0.0)
        self._have_succeeded(runs)

    def _have_succeeded(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._succeeded(run.work)
            span = span_of(run)
            self._report.ended(run.work, span, TaskState.SUCCEEDED, None)
            span.end()
        self._report.settled(runs, "succeeded", None)
        for owner, own in by_owner(runs):
            owner.settled(own)

    def may_acknowledge(self, work: Work, standing: Standing) -> bool:
        """Whether a message that was not won or lost its token needs no more of this member."""
        if standing is Standing.MISSING and work.envelope is not None and work.envelope.body == "row":
            self._report.row_missing(work)
            return True
        return standing is Standing.SETTLED

    async def bury(self, work: Work, error: Exception, delivery: Delivery) -> bool:
        """A message that no claim can hold goes to the catalog as it is. False: try again later."""
        cause = error if isinstance(error, DecodeError) else DecodeError("not_storable", str(error))
        failure = self._app.classifier.classify(cause)
        if not isinstance(error, DecodeError):
            work.type, work.key, work.headers = "undecodable", None, ()
        try:
            await until_available(
                lambda: self._settles.dead_on_arrival(work, failure, origin=origin_of(delivery))
            )
        except Exception as trouble:  # noqa: BLE001 - the catalog refuses it: nothing is lost, it waits
            self._report.trouble(work, trouble)
            await asyncio.sleep(_TROUBLE_SECONDS)
            return False
        self._died(work, failure, "decode")
        crash_point(CrashPoint.BURIED_BEFORE_ACK)
        return True

    async def ingest(self, work: Work, death: BrokerDeath, delivery: Delivery) -> Standing:
        """A message that the broker dead-lettered by itself goes to the catalog, and its task ends DEAD.

        SETTLED: it is there, or its task ended or goes on from the database. BUSY: ask again later.
        """
        failure = Failure(
            "dead",
            f"broker_{death.reason}",
            error_class="BrokerDeadLetter",
            error_message=f"the broker took it from {death.queue or 'a queue'}: {death.reason}",
            fingerprint=f"broker_{death.reason}",
        )
        try:
            standing = await until_available(
                lambda: self._broker_deaths.take(work, failure, origin=origin_of(delivery))
            )
        except Exception as trouble:  # noqa: BLE001 - the catalog refuses it: nothing is lost, it waits
            self._report.trouble(work, trouble)
            await asyncio.sleep(_TROUBLE_SECONDS)
            return Standing.BUSY
        if standing is not None:
            return standing
        self._report.died(work, failure, "broker")
        crash_point(CrashPoint.BURIED_BEFORE_ACK)
        return Standing.SETTLED

    async def _settle(
        self, work: Work, execution: Execution, span: ProcessSpan, delivery: Delivery | None
    ) -> str | None:
        """Make the outcome durable. Its name; None: the token is gone."""
        match execution:
            case Dropped():
                return None
            case Committed(state=state, promoted_count=promoted, reason_code=reason):
                self._succeeded(work)
                if promoted:
                    self._wake_due_after(0.0)
                return self._report.ended(work, span, state, reason)
            case Done(state=TaskState.SUCCEEDED):
                success = Success(work, execution.result)
                await self._group_commit.settle([success])
                if isinstance(success.outcome, Exception):  # the database refuses this row's result
                    failure = self._app.classifier.classify(success.outcome)
                    return await self._settle(work, Failed(failure), span, delivery)
                if not success.outcome:
                    return None
                self._succeeded(work)
                return self._report.ended(work, span, TaskState.SUCCEEDED, None)
            case Done(reason_code=reason):
                failure = Failure("reject", reason or "rejected", error_message=execution.detail or "")
                return await self._settle(work, Failed(failure), span, delivery)
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
        waits = await self._store_wait(work, decision, failure)
        if waits is None:
            return None
        return self._report.waits(work, waits, decision.delay, decision.waiting_for, failure, span)

    async def _store_wait(self, work: Work, decision: Wait, failure: Failure) -> Waits | None:
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
        if promoted:
            self._wake_due_after(0.0)
        if state is TaskState.DEAD:
            self._died(work, failure, stage)
            crash_point(CrashPoint.BURIED_BEFORE_ACK)
        return self._report.ended(work, span, state, failure.reason_code)

    def _succeeded(self, work: Work) -> None:
        """A message ended well, or was rejected by a handler that worked."""
        breaker = self._breakers.note_success(work.type)
        if breaker is not None:
            self._wake_due_after(0.0)
            self._report.breaker(breaker, len(self._breakers.opened()))

    def _failed(self, work: Work, failure: Failure) -> None:
        """A handler raised: perhaps its dependency is away for everybody."""
        if failure.kind == "reject":
            self._succeeded(work)
            return
        breaker = self._breakers.note_failure(work.type, work, work.lane or work.id, failure)
        self._report.breaker(breaker, len(self._breakers.opened()))

    def _died(self, work: Work, failure: Failure, stage: Stage) -> None:
        self._report.died(work, failure, stage)
        breaker = self._breakers.note_death(work.type, work, failure.reason_code)
        self._report.breaker(breaker, len(self._breakers.opened()))


def span_of(run: Run) -> ProcessSpan:
    """The span of a run that has begun."""
    if run.span is None:
        raise ValueError(f"{run.work.id} was never handled")
    return run.span


def _exhausted_deliveries(count: int) -> Failure:
    return Failure(
        kind="dead",
        reason_code="deliveries_exhausted",
        error_class="DeliveriesExhausted",
        error_message=f"started {count} times without an outcome: its handler may kill the process",
        fingerprint="deliveries_exhausted",
    )


_PAUSED: Final = Failure(
    "retry",
    "breaker_open",
    scope="infrastructure",
    error_class="BreakerOpen",
    error_message="its handler is paused: see what made the breaker open",
    fingerprint="breaker_open",
)
_STOPPED: Final = Failure(
    "retry",
    "paused",
    scope="infrastructure",
    error_class="Paused",
    error_message="somebody paused its type: towpath worker status",
    fingerprint="paused",
)
CANCELLED: Final = Failure("dead", "cancelled", error_class="Cancelled", error_message="cancelled on request")
