"""What the relay tells the outside: spans, metrics and log events. The engine works without."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.errors import MessageRefused
from towpath.failures import redact
from towpath.relay.progress import Batch, boot_time
from towpath.relay.status import Figures
from towpath.store.backlog import Backlog
from towpath.store.outbox import CREATED_AT
from towpath.telemetry import names
from towpath.telemetry.logging import event_logger
from towpath.telemetry.metrics import NO_TELEMETRY, Telemetry
from towpath.telemetry.sending import SendTracer, SentWindow

_EPOCH_SECONDS: Final = 946_684_800
"""Of 2000-01-01, from which Postgres counts."""

log: Final = event_logger("towpath.relay")


class RelayHooks:
    """Reports for one relay. Never raises, never blocks."""

    def __init__(
        self, relay: UUID, labels: Mapping[str, str | int], telemetry: Telemetry = NO_TELEMETRY
    ) -> None:
        self.figures = Figures()
        self._relay = str(relay)
        self._telemetry = telemetry
        self._tracer = SendTracer(labels)
        telemetry.add(names.RELAY_LEASES_LOST, 0)  # an increase is seen only in what was there before

    @contextmanager
    def window(self, messages: Sequence[OutboundMessage]) -> Iterator[SentWindow]:
        """Around one publish; to be told what became of it."""
        with self._tracer.window(messages) as sent:
            yield sent

    def sent(
        self,
        batch: Batch,
        offered: Iterable[int],
        result: PublishResult,
        error: str | None,
        seconds: float,
    ) -> None:
        """A window is settled as far as it was; `offered` are the indexes that went to the broker."""
        telemetry, messages, figures = self._telemetry, batch.messages, self.figures
        age = max(0.0, time.time() - _EPOCH_SECONDS - batch.rows[0][CREATED_AT] / 1_000_000)
        figures.window_rows, figures.publish_latency_seconds = len(messages), age
        if telemetry is NO_TELEMETRY:
            return
        fates: Counter[tuple[str, str | None]] = Counter()
        for index in offered:
            if index in result.acknowledged:
                fates[messages[index].address, None] += 1
            else:
                refusal = result.refused.get(index)
                fates[messages[index].address, error if refusal is None else refusal.reason] += 1
        for (address, problem), count in fates.items():
            telemetry.add(
                names.SENT_MESSAGES, count, operation="send", destination=address, error_type=problem
            )
        telemetry.record(
            names.OPERATION_DURATION, seconds, operation="send", operation_type="send", error_type=error
        )
        telemetry.record(names.RELAY_WINDOW_ROWS, len(messages))
        telemetry.record(names.OUTBOX_PUBLISH_LATENCY, age)

    def backlog(self, backlog: Backlog, transaction_seconds: float) -> None:
        """What the database knows of the broker's shards, and of its own oldest transaction."""
        figures = self.figures
        figures.pending_count, figures.unowned_shard_count = backlog.pending_count, backlog.unowned_count
        figures.oldest_unsent_seconds = backlog.oldest_unsent_seconds
        figures.oldest_transaction_seconds, figures.seen_at = transaction_seconds, boot_time()
        self._telemetry.set(names.OUTBOX_PENDING, backlog.pending_count)
        self._telemetry.set(names.SHARDS_UNOWNED, backlog.unowned_count)
        self._telemetry.set(names.OUTBOX_OLDEST_AGE, backlog.oldest_unsent_seconds)
        self._telemetry.set(names.DEAD_LETTERS_OPEN, backlog.dead_letter_count)
        self._telemetry.set(names.OLDEST_TRANSACTION_AGE, transaction_seconds)

    def journal_lag(self, seconds: float) -> None:
        """How long something has been published and not written down."""
        self._telemetry.set(names.JOURNAL_LAG, seconds)

    def lease_acquired(self, epochs: dict[int, int], owned: int) -> None:
        """Shards are ours."""
        self._telemetry.set(names.RELAY_SHARDS_OWNED, owned)
        log.info("relay.lease_acquired", relay=self._relay, shards=sorted(epochs), epoch=max(epochs.values()))

    def lease_lost(self, shards: Iterable[int], owned: int) -> None:
        """Somebody else owns the shards, or may."""
        lost = sorted(shards)
        self._telemetry.add(names.RELAY_LEASES_LOST, len(lost))
        self._telemetry.set(names.RELAY_SHARDS_OWNED, owned)
        log.warning("relay.lease_lost", relay=self._relay, shards=lost)

    def reloaded(self, reason: str) -> None:
        """Memory was dropped."""
        log.info("relay.progress_reloaded", relay=self._relay, reason=reason)

    def store_unavailable(self, error: BaseException, wait_seconds: float) -> None:
        """The database is away."""
        self._telemetry.add(names.RELAY_BACKOFFS, 1, reason="store_unavailable")
        log.warning(
            "relay.store_unavailable", relay=self._relay, error=error, backoff_seconds=round(wait_seconds, 3)
        )

    def wakeup_changed(self, obstacle: str | None, *, is_demanded: bool) -> None:
        """The relay is notified from now on, or only polls because of an obstacle."""
        if obstacle is None:
            log.info("relay.wakeup_changed", relay=self._relay, mode="notify")
        elif is_demanded:
            log.warning("relay.wakeup_changed", relay=self._relay, mode="poll", reason=obstacle)
        else:
            log.info("relay.wakeup_changed", relay=self._relay, mode="poll", reason=obstacle)

    def broker_unavailable(self, error: BaseException, failures: int, wait_seconds: float) -> None:
        """The broker is away or cannot be used."""
        reason = getattr(error, "code", "broker.unavailable").replace(".", "_")
        self._telemetry.add(names.RELAY_BACKOFFS, 1, reason=reason)
        log.warning(
            "relay.broker_unavailable",
            relay=self._relay,
            error=error,
            failures=failures,
            backoff_seconds=round(wait_seconds, 3),
        )

    def broker_recovered(self, seconds: float) -> None:
        """Publishing again."""
        log.info("relay.broker_recovered", relay=self._relay, seconds=round(seconds, 3))

    def put_aside(
        self,
        message: OutboundMessage,
        refusal: MessageRefused,
        attempts: int,
        policy: str,
        *,
        is_buried: bool,
    ) -> None:
        """A message is not published: it is in the catalog, or skipped where it has no business there."""
        if is_buried:
            self._telemetry.add(names.DEAD_LETTERS, 1, stage="publish", reason=refusal.reason)
        log.error(
            "relay.message_refused",
            message_id=message.message_id,
            destination=message.address,
            type=message.type,
            reason=redact(refusal.reason),
            attempts=attempts,
            policy=policy,
        )

    def pauses(self, destinations: int, *, is_everything: bool) -> None:
        """How much is paused."""
        self._telemetry.set(names.OUTBOX_PAUSES, destinations, scope="destination")
        self._telemetry.set(names.OUTBOX_PAUSES, is_everything, scope="everything")

    def pauses_changed(self, paused: Sequence[str]) -> None:
        """Somebody paused publishing, or resumed it."""
        log.warning("relay.pauses_changed", relay=self._relay, destinations=list(paused))

    def gates(self, count: int, blocked: int) -> None:
        """A look at the gates of the shards owned."""
        self._telemetry.set(names.RELAY_GATES_CLOSED, count)
        self._telemetry.set(names.RELAY_SHARDS_BLOCKED, blocked)

    def gate_released(self, shard: int, sent: int, removed: int, closed_again: int) -> None:
        """What waited behind gates that a person opened was sent."""
        log.info(
            "relay.gate_released",
            relay=self._relay,
            shard=shard,
            count=sent,
            removed=removed,
            closed_again=closed_again,
        )

    def canary(self, seconds: float) -> None:
        """Time since delivery was last proved for every shard."""
        self._telemetry.set(names.CANARY_AGE, seconds)

    def canary_missing(self, shard: int, message_id: UUID) -> None:
        """A canary was never confirmed; another one is tried."""
        log.error("relay.canary_missing", relay=self._relay, shard=shard, message_id=message_id)

    def ring(self, free: int, blocked: int) -> None:
        """A look at the outbox ring."""
        self.figures.slots_free_count, self.figures.slots_blocked_count = free, blocked
        self._telemetry.set(names.OUTBOX_SLOTS_FREE, free)
        self._telemetry.set(names.OUTBOX_SLOTS_BLOCKED, blocked)

    def slot_cleared(self, slot: int, size: int, seconds: float) -> None:
        """A slot is empty again."""
        self._telemetry.add(names.OUTBOX_SLOTS_CLEARED, 1)
        log.info("relay.slot_cleared", relay=self._relay, slot=slot, bytes=size, seconds=round(seconds, 3))

    def slot_blocked(self, slot: int, reason: str, unsent: Sequence[int], holders: Sequence[str]) -> None:
        """A slot could go and cannot; told once for each reason."""
        log.warning(
            "relay.slot_blocked",
            relay=self._relay,
            slot=slot,
            reason=reason,
            shards=list(unsent),
            holders=list(holders),
        )

    def slot_thinned(self, slot: int, count: int, seconds: float) -> None:
        """Rows of a blocked slot are gone."""
        log.info("relay.slot_thinned", relay=self._relay, slot=slot, count=count, seconds=round(seconds, 3))
