"""Every log event: dotted past-tense facts, with the fields each may carry.

Fields hold ids, counts, codes and durations in seconds. Payloads, keys' contents beyond the key
itself, and secrets are never fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One kind of fact."""

    name: str
    description: str
    fields: tuple[str, ...] = ()


def _event(name: str, description: str, fields: str) -> LogEvent:
    return LogEvent(name, description, tuple(fields.split()))


_EVENTS: Final = (
    _event("service.started", "A process is ready to work.", "service version pid"),
    _event("service.draining", "It was asked to stop and takes nothing new.", "service signal"),
    _event("service.stopped", "It has let go of everything.", "service seconds"),
    _event(
        "service.crashed", "An error that nobody handled ended the process, or one of its threads.", "thread"
    ),
    _event("telemetry.started", "Exporters run.", "traces metrics traces_file"),
    _event("telemetry.export_failed", "Spans could not be written; work goes on.", "error count"),
    _event("relay.lease_acquired", "Shards are ours.", "relay shards epoch"),
    _event("relay.lease_lost", "Somebody else owns the shards now; buffers dropped.", "relay shards"),
    _event("relay.progress_reloaded", "Memory was dropped and the journal read again.", "relay reason"),
    _event(
        "relay.broker_unavailable", "Backing off; nothing is spent.", "relay error backoff_seconds failures"
    ),
    _event("relay.broker_recovered", "Publishing again.", "relay seconds"),
    _event(
        "relay.wakeup_changed",
        "An idle relay is notified of rows from now on (`notify`), or only polls for the reason given.",
        "relay mode reason",
    ),
    _event("relay.store_unavailable", "The database is away.", "relay error backoff_seconds"),
    _event(
        "relay.message_refused",
        "One message was put aside; by its policy nothing waits (`park`), its key or its shard.",
        "message_id destination type reason attempts policy",
    ),
    _event(
        "relay.gate_released",
        "What waited for a refused message, or for a paused destination, was sent; empty gates are gone.",
        "relay shard count removed closed_again",
    ),
    _event(
        "relay.pauses_changed",
        "A person paused publishing or resumed it: to these destinations nothing is sent now; `*` is all.",
        "relay destinations",
    ),
    _event("relay.slot_cleared", "A slot of the outbox ring was truncated.", "relay slot bytes seconds"),
    _event(
        "relay.slot_blocked",
        "A slot could be cleared and cannot: `unsent` rows of these shards, or `locked` by these backends.",
        "relay slot reason shards holders",
    ),
    _event(
        "relay.canary_missing",
        "A canary was not confirmed for ten minutes; another one is tried.",
        "relay shard message_id",
    ),
    _event(
        "relay.slot_thinned",
        "Sent rows of a slot blocked for a rotation were deleted one by one.",
        "relay slot count seconds",
    ),
    _event("worker.registered", "A worker has its lease.", "group worker"),
    _event(
        "worker.handlers_differ",
        "A living member handles other types: a deployment rolls, or another app has this group's name.",
        "group host only_here only_there",
    ),
    _event("worker.ordering_changed", "Nothing was under way in the old order.", "group before ordering"),
    _event(
        "worker.outdated", "The schema is not one this towpath works with any more: it drains.", "group error"
    ),
    _event("worker.loop_blocked", "A handler kept the event loop to itself.", "group handler seconds"),
    _event("worker.lease_lost", "The worker lapsed; it starts again under a new id.", "group worker"),
    _event(
        "worker.pauses_changed",
        "A person paused the group or resumed it: of these types nothing is started now; `*` is all.",
        "group types",
    ),
    _event("worker.store_unavailable", "Intake is paused, nothing is spent.", "group error"),
    _event("worker.store_recovered", "Intake goes on.", "group seconds"),
    _event("broker.disconnected", "The client lost the broker and reconnects.", "group error"),
    _event("broker.partitions_assigned", "This member reads these.", "group partitions"),
    _event("broker.partitions_revoked", "These leave this member.", "group partitions seconds"),
    _event("broker.drain_timed_out", "Work went on when its partitions left.", "group partitions"),
    _event("broker.commit_failed", "Offsets were not committed; their messages come again.", "group error"),
    _event(
        "broker.leave_failed", "The member could not leave in order; the broker times it out.", "group error"
    ),
    _event(
        "broker.partition_refused",
        "Not read until a person says where to go on: `offset_missing` or `offset_out_of_range`.",
        "group partition reason offset fix",
    ),
    _event("broker.offset_given", "A person said where to go on.", "group partition offset"),
    _event(
        "broker.records_lost",
        "The broker deleted records that were not read yet; the group goes on behind them.",
        "group partition first_offset count",
    ),
    _event("broker.intake_reduced", "Large messages: fewer are prefetched now.", "group prefetch"),
    _event(
        "task.retry_scheduled",
        "An attempt failed; it comes again.",
        "group message_id type attempt reason delay_seconds fingerprint",
    ),
    _event(
        "task.snoozed",
        "It asked to come again; no attempt spent.",
        "group message_id type reason delay_seconds",
    ),
    _event("task.rejected", "A business decision ended it.", "group message_id type reason"),
    _event(
        "task.died",
        "It is in the dead-letter catalog.",
        "group message_id type attempt reason stage fingerprint",
    ),
    _event("task.expired", "Its deadline passed.", "group message_id type"),
    _event("task.unknown", "Its at-most-once effect may have happened.", "group message_id type reason"),
    _event("task.reconciled", "What became of its effect was found out.", "group message_id type outcome"),
    _event("task.reconcile_failed", "Asking what became of it failed.", "group message_id type error"),
    _event("breaker.opened", "A dependency fails for everybody; it is probed.", "group scope reason"),
    _event("breaker.closed", "A probe succeeded.", "group scope"),
    _event("task.parked", "It waits behind another message of its key.", "group message_id type"),
    _event("task.result_dropped", "Somebody else took it over.", "group message_id type"),
    _event(
        "task.settle_failed", "The database refused its outcome; it comes again.", "group message_id type"
    ),
    _event(
        "task.raised_after_settling",
        "A handler went on after its `call.transaction()` and failed: the task stays as it ended there.",
        "group message_id type",
    ),
    _event(
        "task.row_missing",
        "A submitted task's row is gone: it ended and expired. Acknowledged.",
        "group message_id type",
    ),
    _event("task.reaped", "Tasks that nobody ran any more were taken back.", "group count reason"),
    _event("dlq.replayed", "Dead letters were sent back to work.", "group count actor audit_id"),
)
EVENTS: Final[Mapping[str, LogEvent]] = MappingProxyType({event.name: event for event in _EVENTS})
