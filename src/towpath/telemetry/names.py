"""Every span, metric, attribute and log event, spelled once. `docs/telemetry.md` is made from here.

Source: OpenTelemetry semantic conventions for messaging spans and metrics, version 1.44.0
(https://opentelemetry.io/docs/specs/semconv/messaging/; status "development"); what they do not name
starts with `towpath.`. One difference is meant: on RabbitMQ the destination is the exchange alone, as
messages are addressed here; routing keys are towpath's own business.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

SCOPE: Final = "towpath"
"""The instrumentation scope of every tracer and meter."""

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

OUTBOX_SYSTEM: Final = "towpath"
"""The messaging system as a producer knows it: the outbox, whichever broker its messages go to."""

ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "system": "messaging.system",
        "server_address": "server.address",
        "server_port": "server.port",
        "operation": "messaging.operation.name",
        "operation_type": "messaging.operation.type",
        "destination": "messaging.destination.name",
        "group": "messaging.consumer.group.name",
        "message_id": "messaging.message.id",
        "batch_count": "messaging.batch.message_count",
        "error_type": "error.type",
        "type": "towpath.message.type",
        "trigger": "towpath.trigger",
        "attempt": "towpath.task.attempt",
        "run_no": "towpath.task.run_no",
        "state": "towpath.task.state",
        "outcome": "towpath.outcome",
        "reason": "towpath.reason_code",
        "stage": "towpath.dead_letter.stage",
        "actor": "towpath.actor",
        "scope": "towpath.pause.scope",
    }
)
"""The short names used in code, and the attribute keys they stand for."""

SpanKindName: TypeAlias = Literal["producer", "client", "consumer", "internal"]
MetricKind: TypeAlias = Literal["counter", "histogram", "gauge"]

_CONVENTIONAL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_SECONDS: Final = (0.001, 0.0025, *_CONVENTIONAL_SECONDS, 30, 60, 300)
"""The boundaries of the conventions, and some at both ends."""
_LONG_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """A span: `name` is the template of its name."""

    name: str
    kind: SpanKindName
    description: str
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """An instrument. Its attributes have few values: never an id, a key or a message."""

    name: str
    kind: MetricKind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


_BROKER: Final = ("system", "server_address", "server_port")
"""Which broker; the address where there is one server and not a list."""

CREATE: Final = SpanSpec(
    "create {destination}",
    "producer",
    "A message was written into the outbox. Its context is stored with the row and travels in the headers.",
    ("system", "operation", "operation_type", "destination", "message_id", "type"),
)
SEND: Final = SpanSpec(
    "send {destination}",
    "client",
    "The relay published one window of messages; `send` alone when they had several destinations. Below the "
    "creation context of the first sampled message, and linked to that of every one, as far as the SDK "
    "keeps links (`OTEL_SPAN_LINK_COUNT_LIMIT`, 128); a link carries `messaging.message.id`, the "
    "destination where they differ, and `error.type` where the broker refused the message.",
    (*_BROKER, "operation", "operation_type", "destination", "batch_count", "error_type"),
)
PROCESS: Final = SpanSpec(
    "process {destination}",
    "consumer",
    "One attempt of a consumer group at one message. `trigger` tells what started it: `broker` or why "
    "it had waited (`retry`, `snooze`, `delay`, `replay`, `promoted`, `lost`).",
    (
        *_BROKER,
        "operation",
        "operation_type",
        "destination",
        "group",
        "message_id",
        "type",
        "trigger",
        "attempt",
        "run_no",
        "outcome",
        "reason",
        "error_type",
    ),
)
REPLAY: Final = SpanSpec(
    "replay {destination}",
    "internal",
    "An operator sent a dead letter back to work.",
    ("destination", "group", "message_id", "type", "actor"),
)
SPANS: Final = (CREATE, SEND, PROCESS, REPLAY)

SENT_MESSAGES: Final = Metric(
    "messaging.client.sent.messages",
    "counter",
    "{message}",
    "Messages the relay sent; with `error.type` where the broker refused one, or did not confirm it.",
    (*_BROKER, "operation", "destination", "error_type"),
)
OPERATION_DURATION: Final = Metric(
    "messaging.client.operation.duration",
    "histogram",
    "s",
    "From handing a window to the broker's client until everything in it is confirmed or given up.",
    (*_BROKER, "operation", "operation_type", "error_type"),
    _SECONDS,
)
CONSUMED_MESSAGES: Final = Metric(
    "messaging.client.consumed.messages",
    "counter",
    "{message}",
    "Messages delivered to this process by the broker, repeats included.",
    (*_BROKER, "operation", "destination", "group"),
)
SKIPPED_MESSAGES: Final = Metric(
    "towpath.messages.skipped",
    "counter",
    "{message}",
    "Messages acknowledged without a task because the group ignores them: `ignored_type`, `null_value`.",
    ("destination", "group", "reason"),
)
PROCESS_DURATION: Final = Metric(
    "messaging.process.duration",
    "histogram",
    "s",
    "One attempt of a handler, from claim to settled.",
    (*_BROKER, "operation", "destination", "group", "type", "error_type"),
    _SECONDS,
)
OUTBOX_OLDEST_AGE: Final = Metric(
    "towpath.outbox.oldest_unsent.age",
    "gauge",
    "s",
    "Age of the oldest committed row that the journal does not call sent; 0 when there is none. Not of what "
    "waits behind a gate. Every relay reports it: take the maximum.",
)
OUTBOX_PENDING: Final = Metric(
    "towpath.outbox.pending",
    "gauge",
    "{message}",
    "Committed rows of the broker that the journal does not call sent; counted up to 10,000. Not what waits "
    "behind a gate. Every relay reports it: take the maximum.",
)
SHARDS_UNOWNED: Final = Metric(
    "towpath.shards.unowned",
    "gauge",
    "{shard}",
    "Shards of the broker that no relay holds. Every relay reports it: take the maximum.",
)
OLDEST_TRANSACTION_AGE: Final = Metric(
    "towpath.database.oldest_transaction.age",
    "gauge",
    "s",
    "Time for which the transaction with the oldest id (`xmin`) has been open since this relay saw it first; "
    "0 when none is. Of any database of the cluster, but only of those that wrote something: one that merely "
    "reads is counted where the relay's login may see it (a member of `pg_read_all_stats`).",
)
JOURNAL_LAG: Final = Metric(
    "towpath.relay.journal.lag",
    "gauge",
    "s",
    "Time for which this relay has published without writing its progress down: a crash repeats that.",
)
OUTBOX_PUBLISH_LATENCY: Final = Metric(
    "towpath.outbox.publish.latency",
    "histogram",
    "s",
    "From the insert into the outbox to the broker's confirmation.",
    ("system",),
    _LONG_SECONDS,
)
OUTBOX_SLOTS_FREE: Final = Metric(
    "towpath.outbox.slots.free",
    "gauge",
    "{slot}",
    "Empty slots of the outbox ring; 0 for longer than a rotation: the outbox only grows.",
)
OUTBOX_SLOTS_BLOCKED: Final = Metric(
    "towpath.outbox.slots.blocked",
    "gauge",
    "{slot}",
    "Slots that are due to be cleared and cannot be, as the relay that clears the ring sees it.",
)
OUTBOX_SLOTS_CLEARED: Final = Metric(
    "towpath.outbox.slots.cleared", "counter", "{slot}", "Slots of the outbox ring truncated."
)
CANARY_AGE: Final = Metric(
    "towpath.canary.age",
    "gauge",
    "s",
    "Time since a canary was last confirmed, of the shard of the broker where that is longest. "
    "Every relay reports it: take the maximum.",
)
RELAY_WINDOW_ROWS: Final = Metric(
    "towpath.relay.window.rows",
    "histogram",
    "{row}",
    "Rows in one published window.",
    ("system",),
    (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
)
RELAY_BACKOFFS: Final = Metric(
    "towpath.relay.backoffs",
    "counter",
    "{backoff}",
    "Times the relay waited before trying again, by reason (`broker_unavailable`, `store_unavailable`, …).",
    ("reason",),
)
RELAY_SHARDS_OWNED: Final = Metric(
    "towpath.relay.shards.owned", "gauge", "{shard}", "Shards this relay holds a live lease of."
)
RELAY_SHARDS_BLOCKED: Final = Metric(
    "towpath.relay.shards.blocked",
    "gauge",
    "{shard}",
    "Shards of this relay that send nothing until a person decides about a refused message (`block`).",
)
RELAY_GATES_CLOSED: Final = Metric(
    "towpath.relay.gates.closed",
    "gauge",
    "{gate}",
    "Keys and shards of this relay that wait for a decision about a refused message, or are being caught up.",
)
OUTBOX_PAUSES: Final = Metric(
    "towpath.outbox.pauses",
    "gauge",
    "{pause}",
    "Where a person has stopped publishing: destinations, and whether that is everything. "
    "Every relay reports it: take the maximum.",
    ("scope",),
)
RELAY_LEASES_LOST: Final = Metric(
    "towpath.relay.leases.lost", "counter", "{lease}", "Times this relay found that its lease was gone."
)
TASKS_CLAIMED: Final = Metric(
    "towpath.tasks.claimed", "counter", "{task}", "Tasks started, by what started them.", ("group", "trigger")
)
TASKS_SETTLED: Final = Metric(
    "towpath.tasks.settled",
    "counter",
    "{task}",
    "Ends of attempts by outcome: `succeeded`, `failed`, `retry`, `snooze`, `dead`, `cancelled`, `expired`.",
    ("group", "type", "outcome"),
)
TASK_RETRIES: Final = Metric(
    "towpath.task.retries", "counter", "{retry}", "Retries scheduled, by reason.", ("group", "type", "reason")
)
DEAD_LETTERS: Final = Metric(
    "towpath.dead_letters",
    "counter",
    "{message}",
    "Messages put into the dead-letter catalog, by stage and reason.",
    ("group", "stage", "reason"),
)
RECORDS_LOST: Final = Metric(
    "towpath.records.lost",
    "counter",
    "{message}",
    "Records that Kafka deleted by its retention before the group had read them.",
    ("destination", "group"),
)
PARTITIONS_REFUSED: Final = Metric(
    "towpath.partitions.refused",
    "gauge",
    "{partition}",
    "Partitions of this member that wait for `towpath worker offsets`: the group's offset is gone.",
    ("group",),
)
WORKER_LEASES_LOST: Final = Metric(
    "towpath.worker.leases.lost",
    "counter",
    "{lease}",
    "Times a worker found its lease lapsed.",
    ("group",),
)
BREAKERS_OPEN: Final = Metric(
    "towpath.breakers.open",
    "gauge",
    "{breaker}",
    "Dependencies, or handlers with a storm of dead letters, that are probed one message at a time.",
    ("group",),
)
WORKER_PAUSES: Final = Metric(
    "towpath.worker.pauses",
    "gauge",
    "{pause}",
    "Where a person has stopped a group from starting work: types, and whether that is everything. "
    "Every member reports it: take the maximum.",
    ("group", "scope"),
)
TASKS_OPEN: Final = Metric(
    "towpath.tasks.open",
    "gauge",
    "{task}",
    "Tasks of the group that are not finished, by state, as the database has them; counted up to 10,000. "
    "Every member reports it: take the maximum.",
    ("group", "state"),
)
TASKS_DUE: Final = Metric(
    "towpath.tasks.due",
    "gauge",
    "{task}",
    "Waiting tasks whose time has come; counted up to 10,000. Every member reports it: take the maximum.",
    ("group",),
)
TASKS_OLDEST_DUE_AGE: Final = Metric(
    "towpath.tasks.oldest_due.age",
    "gauge",
    "s",
    "Time since the first of them was due; 0 when none is.",
    ("group",),
)
TASKS_OLDEST_RUNNING_AGE: Final = Metric(
    "towpath.tasks.oldest_running.age",
    "gauge",
    "s",
    "Time since the first start of the running task that started first; 0 when none runs.",
    ("group",),
)
DEAD_LETTERS_OPEN: Final = Metric(
    "towpath.dead_letters.open",
    "gauge",
    "{message}",
    "Dead letters of the group that nobody has replayed or discarded; from a relay, without a group, those "
    "of messages that were not published. Counted up to 10,000. Every process reports it: take the maximum.",
    ("group",),
)
TASKS_REAPED: Final = Metric(
    "towpath.tasks.reaped",
    "counter",
    "{task}",
    "Tasks taken back from dead workers.",
    ("group", "reason"),
)
METRICS: Final = (
    SENT_MESSAGES,
    OPERATION_DURATION,
    CONSUMED_MESSAGES,
    SKIPPED_MESSAGES,
    PROCESS_DURATION,
    OUTBOX_OLDEST_AGE,
    OUTBOX_PENDING,
    SHARDS_UNOWNED,
    OLDEST_TRANSACTION_AGE,
    JOURNAL_LAG,
    OUTBOX_PUBLISH_LATENCY,
    OUTBOX_SLOTS_FREE,
    OUTBOX_SLOTS_BLOCKED,
    OUTBOX_SLOTS_CLEARED,
    CANARY_AGE,
    RELAY_WINDOW_ROWS,
    RELAY_BACKOFFS,
    RELAY_SHARDS_OWNED,
    RELAY_SHARDS_BLOCKED,
    RELAY_GATES_CLOSED,
    OUTBOX_PAUSES,
    RELAY_LEASES_LOST,
    TASKS_CLAIMED,
    TASKS_SETTLED,
    TASK_RETRIES,
    DEAD_LETTERS,
    RECORDS_LOST,
    PARTITIONS_REFUSED,
    WORKER_LEASES_LOST,
    BREAKERS_OPEN,
    WORKER_PAUSES,
    TASKS_REAPED,
    TASKS_OPEN,
    TASKS_DUE,
    TASKS_OLDEST_DUE_AGE,
    TASKS_OLDEST_RUNNING_AGE,
    DEAD_LETTERS_OPEN,
)


def attributes(**values: str | float | bool | None) -> dict[str, str | int | float | bool]:
    """Attribute keys for short names; None is left out. Raises KeyError for a name not listed."""
    return {ATTRIBUTES[name]: value for name, value in values.items() if value is not None}
