"""From a payload to the row that is inserted: every check happens here, before the database is asked."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

from uuid_utils.compat import uuid7

from towpath.backoff import parse_duration
from towpath.errors import InvalidMessage, PayloadTooLarge
from towpath.messages import (
    Headers,
    HeadersInput,
    Kind,
    MessageSpec,
    RawMessage,
    check_headers,
    dump_headers,
    encode,
    key_of,
    spec_of,
)
from towpath.messages.codecs import canonical_fields
from towpath.messages.headers import CAUSED_BY, TRACEPARENT
from towpath.messages.limits import (
    check_dedupe_key,
    check_destination,
    check_key,
    check_message_id,
    check_owner,
)
from towpath.telemetry.tracing import creation_headers, traceparent_of


class Declared:
    """The default of `key`: take it from the field that the message class declares."""

    def __repr__(self) -> str:
        return "DECLARED"


DECLARED: Final = Declared()
Key: TypeAlias = str | int | UUID | None


_cause: Final[ContextVar[UUID | None]] = ContextVar("towpath_cause", default=None)


class CausedBy:
    """Whatever is emitted or submitted inside the block says that it comes of this message."""

    __slots__ = ("_message_id", "_token")

    def __init__(self, message_id: UUID) -> None:
        self._message_id = message_id

    def __enter__(self) -> None:
        self._token = _cause.set(self._message_id)

    def __exit__(self, *_: object) -> None:
        _cause.reset(self._token)


class OutboxRow(NamedTuple):
    """One row of `insert_outbox`, in the order of the statement's parameters."""

    message_id: str
    kind: str
    destination: str
    type: str
    key: str | None
    content_type: str
    headers: str
    payload: bytes | None


class ScheduledRow(NamedTuple):
    """One row of `insert_scheduled`, in the order of the statement's parameters: an event for later."""

    message_id: str
    destination: str
    type: str
    key: str | None
    content_type: str
    headers: str
    payload: bytes | None
    due_at: str | None
    delay_seconds: str | None


EventRow: TypeAlias = OutboxRow | ScheduledRow


class Due(NamedTuple):
    """When a message is due: an instant, or seconds from the INSERT by the database's clock."""

    at: datetime | None
    delay_seconds: float | None


class TaskRow(NamedTuple):
    """The parameters of `accept_task`, in the statement's order."""

    group: str
    id: str
    type: str
    destination: str
    key: str | None
    owner: str
    request_hash: bytes | None
    deadline_at: datetime | None
    deadline_seconds: float | None
    payload: bytes
    content_type: str
    headers: str
    trace: str | None
    due_at: datetime | None
    delay_seconds: float | None

    def outbox_rows(self) -> list[OutboxRow]:
        """The message that tells the group; the body stays in the task's row. None for a delayed task."""
        if self.due_at is not None or self.delay_seconds is not None:
            return []
        return [
            OutboxRow(
                self.id, "task", self.destination, self.type, self.key, self.content_type, self.headers, None
            )
        ]


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say beside the payload."""

    key: Key | Declared = DECLARED
    headers: HeadersInput | None = None
    destination: str | None = None
    message_id: UUID | None = None
    due: Due | None = None
    """None: at once."""


def due_when(at: datetime | None, delay: str | timedelta | None) -> Due | None:
    """When a caller wants a message to be due. Raises InvalidMessage."""
    if at is not None and delay is not None:
        raise InvalidMessage("at and delay are both given: say when, or how long from now")
    if at is not None and not isinstance(at, datetime):
        raise InvalidMessage(f"at is a datetime with a time zone, got {at!r}; delay takes a duration")
    if isinstance(delay, datetime):
        raise InvalidMessage("delay is a duration such as '30m'; at takes an instant")
    if at is None and delay is None:
        return None
    return Due(*_moment("time", delay if at is None else at))


def event_row(payload: object, options: Options, max_payload_bytes: int) -> EventRow:
    """The row of an event. Raises UsageError."""
    if not isinstance(payload, RawMessage) and spec_of(payload).kind != "event":
        name = type(payload).__qualname__
        raise InvalidMessage(f"{name} is a task: submit it, or send it to a group with another database")
    row = _row("event", payload, options, max_payload_bytes)[0]
    return row if options.due is None else _scheduled(row, options.due)


def sent_row(payload: object, options: Options, max_payload_bytes: int) -> OutboxRow:
    """The row of a task whose body travels with its message. Raises UsageError."""
    _task_spec(payload)
    return _row("task", payload, options, max_payload_bytes)[0]


def task_row(
    payload: object,
    options: Options,
    max_payload_bytes: int,
    *,
    owner: str,
    deadline: datetime | timedelta | str | None,
    dedupe_key: str | None,
) -> TaskRow:
    """The row of a submitted task. Raises UsageError."""
    spec = _task_spec(payload)
    check_owner(owner)
    deadline_at, deadline_seconds = _moment("deadline", deadline)
    request_hash = _request_hash(spec, payload, dedupe_key)
    row, headers = _row("task", payload, options, max_payload_bytes)
    return TaskRow(
        group=spec.group or "",
        id=row.message_id,
        type=row.type,
        destination=row.destination,
        key=row.key,
        owner=owner,
        request_hash=request_hash,
        deadline_at=deadline_at,
        deadline_seconds=deadline_seconds,
        payload=row.payload or b"",
        content_type=row.content_type,
        headers=row.headers,
        trace=traceparent_of(headers),
        due_at=None if options.due is None else options.due.at,
        delay_seconds=None if options.due is None else options.due.delay_seconds,
    )


def _scheduled(row: OutboxRow, due: Due) -> ScheduledRow:
    """Numbers and times as text: in arrays, drivers disagree about them."""
    return ScheduledRow(
        row.message_id,
        row.destination,
        row.type,
        row.key,
        row.content_type,
        row.headers,
        row.payload,
        None if due.at is None else due.at.isoformat(),
        None if due.delay_seconds is None else repr(due.delay_seconds),
    )


def _task_spec(payload: object) -> MessageSpec:
    spec = spec_of(payload)
    if spec.kind != "task":
        raise InvalidMessage(f"{type(payload).__qualname__} is an event: emit it")
    return spec


def _row(kind: Kind, payload: object, options: Options, max_payload_bytes: int) -> tuple[OutboxRow, Headers]:
    if isinstance(payload, RawMessage):
        type_, destination, declared_key = payload.type, payload.destination, check_key(payload.key)
        data, content_type = payload.data, payload.content_type
    else:
        spec = spec_of(payload)
        type_, destination = spec.type, spec.destination
        declared_key = key_of(spec, payload) if isinstance(options.key, Declared) else None
        data, content_type = encode(payload)
    key = declared_key if isinstance(options.key, Declared) else check_key(options.key)
    if options.destination is not None:
        destination = check_destination(options.destination)
    message_id = uuid7() if options.message_id is None else check_message_id(options.message_id)
    headers = check_headers(options.headers)
    if len(data) > max_payload_bytes:
        raise PayloadTooLarge(type_, len(data), max_payload_bytes)
    if not any(name.lower() == TRACEPARENT for name, _ in headers):
        headers += creation_headers(destination=destination, type_=type_, message_id=message_id)
    if (cause := _cause.get()) is not None:
        headers = ((CAUSED_BY, str(cause).encode()), *headers)
    row = OutboxRow(str(message_id), kind, destination, type_, key, content_type, dump_headers(headers), data)
    return row, headers


def _moment(name: str, moment: datetime | timedelta | str | None) -> tuple[datetime | None, float | None]:
    """An instant, or seconds from now by the database's clock."""
    if moment is None:
        return None, None
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise InvalidMessage(
                f"the {name} is a naive datetime: give it a time zone, or say how long from now"
            )
        try:
            return moment.astimezone(UTC), None
        except OverflowError as error:
            raise InvalidMessage(f"the {name} is refused: {moment} is not a year of ours in UTC") from error
    try:
        return None, parse_duration(moment).total_seconds()
    except ValueError as error:
        raise InvalidMessage(f"the {name} is refused: {error}") from error


def _request_hash(spec: MessageSpec, payload: object, dedupe_key: str | None) -> bytes | None:
    """What makes a repeat a repeat, within a group and an owner. None: every submit is a new task."""
    if dedupe_key is not None:
        parts = (b"key", check_dedupe_key(dedupe_key).encode())
    elif spec.unique:
        parts = (b"fields", canonical_fields(payload, spec.unique))
    else:
        return None
    return hashlib.sha256(b"\0".join((spec.type.encode(), *parts))).digest()
