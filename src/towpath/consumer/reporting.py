"""What a consumer says about outcomes: log events, metrics, the attributes of the span."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from towpath.consumer.breakers import Breaker
from towpath.consumer.runs import Run
from towpath.failures import Failure
from towpath.states import TaskState, WaitingFor
from towpath.store.settles import Waits
from towpath.store.work import Work
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import Telemetry
from towpath.telemetry.tracing import ProcessSpan

log = event_logger(__name__)


class Report:
    """Speaks for one consumer group."""

    def __init__(self, group: str, telemetry: Telemetry) -> None:
        self._group = group
        self._telemetry = telemetry
        telemetry.set(names.BREAKERS_OPEN, 0, group=group)
        # An increase is seen only in what was there before.
        telemetry.add(names.WORKER_LEASES_LOST, 0, group=group)

    def claimed(self, works: Sequence[Work]) -> None:
        """Attempts begin."""
        for trigger, amount in Counter(work.trigger for work in works).items():
            self._telemetry.add(names.TASKS_CLAIMED, amount, group=self._group, trigger=trigger)

    def settled(self, runs: Sequence[Run], outcome: str, error_class: str | None) -> None:
        """Attempts ended in `outcome`; the database knows."""
        now = time.monotonic()
        seconds: dict[tuple[str, str], list[float]] = {}
        for run in runs:
            seconds.setdefault((run.work.source, run.work.type), []).append(now - run.began_at)
        for (source, type_), values in seconds.items():
            self._telemetry.record_all(
                names.PROCESS_DURATION,
                values,
                operation="process",
                destination=source,
                group=self._group,
                type=type_,
                error_type=error_class,
            )
            self._telemetry.add(
                names.TASKS_SETTLED, len(values), group=self._group, type=type_, outcome=outcome
            )

    def dropped(self, work: Work) -> None:
        """The result found its token gone."""
        log.info("task.result_dropped", group=self._group, message_id=str(work.id), type=work.type)

    def row_missing(self, work: Work) -> None:
        """A submitted task's row is gone."""
        log.warning("task.row_missing", group=self._group, message_id=str(work.id), type=work.type)

    def waits(
        self,
        work: Work,
        waits: Waits,
        delay: timedelta,
        waiting_for: WaitingFor,
        failure: Failure,
        span: ProcessSpan,
    ) -> str:
        """It comes again."""
        seconds = delay.total_seconds()
        labels = {"group": self._group, "type": work.type}
        span.retry_scheduled(delay)
        if waiting_for is WaitingFor.SNOOZE:
            log.info(
                "task.snoozed",
                **labels,
                message_id=str(work.id),
                reason=failure.reason_code,
                delay_seconds=round(seconds, 3),
            )
        else:
            self._telemetry.add(names.TASK_RETRIES, 1, **labels, reason=failure.reason_code)
            log.info(
                "task.retry_scheduled",
                **labels,
                message_id=str(work.id),
                attempt=waits.attempt,
                reason=failure.reason_code,
                delay_seconds=round(seconds, 3),
                fingerprint=failure.fingerprint,
            )
        span.settled(waiting_for.value, failure.reason_code)
        return waiting_for.value

    def postponed(self, work: Work, reason: str) -> None:
        """Its handler is paused: it waits in the database. No log event, there are thousands of them."""
        self._telemetry.add(names.TASK_RETRIES, 1, group=self._group, type=work.type, reason=reason)

    def ended(self, work: Work, span: ProcessSpan, state: TaskState, reason: str | None) -> str:
        """It is over, or in doubt. Returns the outcome's name."""
        outcome = state.value.lower()
        span.settled(outcome, reason)
        if state is TaskState.SUCCEEDED:
            return outcome
        labels = {"group": self._group, "message_id": str(work.id), "type": work.type}
        if state is TaskState.FAILED:
            log.info("task.rejected", **labels, reason=reason)
        elif state is TaskState.EXPIRED:
            log.warning("task.expired", **labels)
        elif state is TaskState.UNKNOWN:
            log.warning("task.unknown", **labels, reason=reason)
        return outcome

    def died(self, work: Work, failure: Failure, stage: str) -> None:
        """It is in the catalog."""
        self._telemetry.add(names.DEAD_LETTERS, 1, group=self._group, stage=stage, reason=failure.reason_code)
        log.warning(
            "task.died",
            group=self._group,
            message_id=str(work.id),
            type=work.type,
            attempt=work.attempt + 1,
            reason=failure.reason_code,
            stage=stage,
            fingerprint=failure.fingerprint,
        )

    def trouble(self, work: Work, error: Exception) -> None:
        """The database refused an outcome."""
        log.error("task.settle_failed", exc=error, group=self._group, message_id=str(work.id), type=work.type)

    def breaker(self, breaker: Breaker | None, open_count: int) -> None:
        """A breaker opened or closed; None: nothing happened."""
        if breaker is None:
            return
        self._telemetry.set(names.BREAKERS_OPEN, open_count, group=self._group)
        if breaker.is_open:
            log.error("breaker.opened", group=self._group, scope=breaker.scope, reason=breaker.reason)
        else:
            log.info("breaker.closed", group=self._group, scope=breaker.scope)
