"""One claimed message from its handler to a durable outcome."""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from towpath.app import App
from towpath.consumer.breakers import Breakers
from towpath.consumer.effects.batch import Member
from towpath.consumer.effects.executions import Done, Dropped, Execution, Failed, InDoubt
from towpath.consumer.endings import CANCELLED, Endings
from towpath.consumer.execution import Executor
from towpath.consumer.pauses import Pauses
from towpath.consumer.policy import Wait
from towpath.consumer.reporting import Report
from towpath.consumer.runs import Phase, Run, by_owner
from towpath.consumer.settling import GroupCommit, Success, until_available
from towpath.crashpoints import CrashPoint, crash_point
from towpath.failures import Failure
from towpath.handlers import Handler
from towpath.states import TaskState, WaitingFor
from towpath.store.claims import ClaimStore
from towpath.store.work import Standing, Work
from towpath.telemetry.context import has_sdk
from towpath.telemetry.tracing import ProcessSpan, process_span


class Runner:
    """Runs claimed work of one worker and settles it, whatever happens."""

    def __init__(
        self,
        app: App,
        claims: ClaimStore,
        executor: Executor,
        endings: Endings,
        group_commit: GroupCommit,
        breakers: Breakers,
        pauses: Pauses,
        report: Report,
        broker_labels: Mapping[str, str | int],
        max_deliveries: int,
    ) -> None:
        self._app = app
        self._claims = claims
        self._executor = executor
        self._endings = endings
        self._group_commit = group_commit
        self._breakers = breakers
        self._pauses = pauses
        self._report = report
        self._broker_labels = broker_labels
        self._max_deliveries = max_deliveries
        self._is_traced = has_sdk()

    def claimed(self, runs: Sequence[Run]) -> None:
        """Their attempts begin."""
        self._is_traced = has_sdk()
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
            is_traced=self._is_traced,
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
                outcome = await self._endings.settle(work, execution, span, delivery)
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
        waits = await until_available(lambda: self._endings.store_wait(work, rest, why))
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
        """Settle successes in one go; whom the database refuses goes its own way."""
        if not succeeded:
            return
        for owner, own in by_owner(run for run, _ in succeeded):
            owner.handled(own)
        for run, execution in await self.settle_all(succeeded):
            await self.conclude(run, execution)

    async def settle_all(self, succeeded: Sequence[tuple[Run, Done]]) -> list[tuple[Run, Execution]]:
        """Settle successes whose owners know that they are handled. Returns whom the database refuses."""
        successes = [Success(run.work, done.result) for run, done in succeeded]
        await self._group_commit.settle(successes)
        settled: list[Run] = []
        refused: list[tuple[Run, Execution]] = []
        for (run, _), success in zip(succeeded, successes, strict=True):
            if success.outcome is True:
                settled.append(run)
            elif isinstance(success.outcome, Exception):
                refused.append((run, Failed(self._app.classifier.classify(success.outcome))))
            else:
                refused.append((run, Dropped()))
        self._have_succeeded(settled)
        return refused

    def committed(self, runs: Sequence[Run], promoted_count: int) -> None:
        """Successes that a handler's transaction has settled."""
        self._endings.promoted(promoted_count)
        self._have_succeeded(runs)

    def _have_succeeded(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._endings.succeeded(run.work)
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
