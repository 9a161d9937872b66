"""From a delivery to a unit of work: read the envelope, apply foreign rules, choose the lane."""

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final
from uuid import UUID, uuid5

from towpath.app import App, Foreign
from towpath.brokers.ports import Delivery, Headers
from towpath.errors import DecodeError
from towpath.messages import Envelope, read_envelope
from towpath.messages.headers import CE_ID, TRACEPARENT
from towpath.messages.limits import check_type
from towpath.store.work import Work

_NAMESPACE: Final = UUID("6f0d5d0e-6a5b-5a0c-9d3f-3b7a3d6f2a10")
"""Names messages that bring no id of their own."""
_KEY_LIMIT_BYTES: Final = 512
_UNDECODABLE: Final = "undecodable"


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A delivery that no handler can be found for: bytes for the catalog and the reason."""

    work: Work
    error: DecodeError


def read(
    app: App, delivery: Delivery, received_at: datetime, *, destination: str | None = None
) -> Work | Undecodable:
    """The work a delivery asks for. Never raises for what is in the message.

    `destination` is the name that the delivery's address has in this installation, where it has one.
    """
    key = _storable_key(delivery.key)
    lane = lane_of(app, key, delivery.partition)
    foreign = app.foreign_rule(destination or delivery.source)
    try:
        if foreign is not None and not any(name == CE_ID for name, _ in delivery.headers):
            envelope = _read_foreign(foreign, delivery, received_at)
        else:
            envelope = read_envelope(delivery.headers)
    except DecodeError as error:
        id_, trace = _id_without_envelope(delivery), _trace(delivery.headers)
        work = _work(delivery, id_, _UNDECODABLE, "event", key, None, None, None, trace)
        return Undecodable(work, error)
    position = envelope.sequence
    if position is None and delivery.death is None:
        position = delivery.offset
    work = _work(
        delivery,
        envelope.message_id,
        envelope.type,
        envelope.kind,
        key,
        lane,
        position,
        envelope.content_type,
        _trace(envelope.headers),
    )
    work.envelope = envelope
    work.has_body = envelope.body == "inline"
    if not work.has_body:
        work.headers = envelope.headers
    return work


def skipped(app: App, delivery: Delivery, asked: Work | Undecodable, destination: str) -> str | None:
    """Why the group passes over a message on purpose; None: it does not."""
    if delivery.value is None and destination in app.destinations_without_nulls:
        is_in_its_row = isinstance(asked, Work) and not asked.has_body
        return None if is_in_its_row else "null_value"
    return "ignored_type" if isinstance(asked, Work) and asked.type in app.ignored_types else None


def lane_of(app: App, key: str | None, partition: str) -> str | None:
    """What a message is ordered by in this group; None: nothing."""
    if app.ordering == "key":
        return key
    return partition if app.ordering == "partition" else None


def origin_of(delivery: Delivery | None) -> str | None:
    """Where a message came from, as JSON for the catalog."""
    if delivery is None:
        return None
    origin: dict[str, object] = {"partition": delivery.partition, "offset": delivery.offset}
    if delivery.death is not None:
        origin |= asdict(delivery.death)
    return json.dumps(origin)


def _work(
    delivery: Delivery,
    id_: UUID,
    type_: str,
    kind: str,
    key: str | None,
    lane: str | None,
    position: int | None,
    content_type: str | None,
    trace: str | None,
) -> Work:
    return Work(
        id=id_,
        type=type_,
        kind="task" if kind == "task" else "event",
        source=delivery.source,
        key=key,
        lane=lane,
        position=position,
        payload=delivery.value,
        content_type=content_type,
        headers=delivery.headers,
        trace=trace,
    )


def _trace(headers: Headers) -> str | None:
    for name, value in headers:
        if name == TRACEPARENT:
            return value.decode("ascii", "replace")[:100].replace("\0", "")
    return None


def _storable_key(key: str | None) -> str | None:
    """Keys beyond the limit are hashed; NUL cannot be stored in text."""
    if key is None:
        return None
    clean = key.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    if len(clean) <= _KEY_LIMIT_BYTES:
        return clean.decode()
    return f"sha256:{hashlib.sha256(clean).hexdigest()}"


def _read_foreign(foreign: Foreign, delivery: Delivery, received_at: datetime) -> Envelope:
    try:
        type_ = check_type(foreign.type if isinstance(foreign.type, str) else foreign.type(delivery))
        given = foreign.id(delivery) if foreign.id is not None else delivery.coordinates
        id_ = given if isinstance(given, UUID) else uuid5(_NAMESPACE, f"{delivery.source}\n{given}")
    except Exception as error:  # the group's own function on a foreign message: the message is at fault
        raise DecodeError("foreign_rule", f"{type(error).__name__}: {error}") from error
    if given is None:
        raise DecodeError(
            "no_message_id", f"app.foreign({foreign.destination!r}, id=…) must derive one on this broker"
        )
    return Envelope(
        message_id=id_,
        type=type_,
        source=f"/foreign/{delivery.source}",
        occurred_at=delivery.timestamp or received_at,
        content_type=foreign.content_type,
        headers=delivery.headers,
    )


def _id_without_envelope(delivery: Delivery) -> UUID:
    """A repeat of the same bytes is the same dead letter."""
    if delivery.coordinates is not None:
        return uuid5(_NAMESPACE, delivery.coordinates)
    digest = hashlib.sha256(delivery.value or b"")
    for name, value in delivery.headers:
        digest.update(name.encode("utf-8", "backslashreplace") + b"\0" + value + b"\0")
    return uuid5(_NAMESPACE, f"{delivery.source}\n{digest.hexdigest()}")
