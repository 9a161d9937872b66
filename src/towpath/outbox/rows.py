"""From a payload to the row that is inserted: every check happens here, before the database is asked."""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
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
from towpath.messages.headers import TRACEPARENT
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

    def outbox_row(self) -> OutboxRow:
        """The message that tells the group; the body stays in the task's row."""
        return OutboxRow(
            self.id, "task", self.destination, self.type, self.key, self.content_type, self.headers, None
        )


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say beside the payload."""

    key: Key | Declared = DECLARED
    headers: HeadersInput | None = None
    destination: str | None = None
    message_id: UUID | None = None


def event_row(payload: object, options: Options, max_payload_bytes: int) -> OutboxRow:
    """The row of an event. Raises UsageError."""
    if not isinstance(payload, RawMessage) and spec_of(payload).kind != "event":
        name = type(payload).__qualname__
        raise InvalidMessage(f"{name} is a task: submit it, or send it to a group with another database")
    return _row("event", payload, options, max_payload_bytes)[0]


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
    deadline_at, deadline_seconds = _deadline(deadline)
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
    row = OutboxRow(str(message_id), kind, destination, type_, key, content_type, dump_headers(headers), data)
    return row, headers


def _deadline(deadline: datetime | timedelta | str | None) -> tuple[datetime | None, float | None]:
    """An instant, or seconds from now by the database's clock."""
    if deadline is None:
        return None, None
    if isinstance(deadline, datetime):
        if deadline.utcoffset() is None:
            raise InvalidMessage(
                "the deadline is a naive datetime: give it a time zone, or say how long from now"
            )
        return deadline, None
    try:
        return None, parse_duration(deadline).total_seconds()
    except ValueError as error:
        raise InvalidMessage(f"the deadline is refused: {error}") from error


def _request_hash(spec: MessageSpec, payload: object, dedupe_key: str | None) -> bytes | None:
    """What makes a repeat a repeat, within a group and an owner. None: every submit is a new task."""
    if dedupe_key is not None:
        parts = (b"key", check_dedupe_key(dedupe_key).encode())
    elif spec.unique:
        parts = (b"fields", canonical_fields(payload, spec.unique))
    else:
        return None
    return hashlib.sha256(b"\0".join((spec.type.encode(), *parts))).digest()
