"""A message on the wire: CloudEvents binary mode, the same `ce_…` headers on every broker.

Source: CloudEvents 1.0.2, Kafka protocol binding 3.2 (binary content mode).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, Literal, NoReturn, TypeVar, cast, get_args
from uuid import UUID

import msgspec
from asyncpg.pgproto import pgproto

from towpath.errors import DecodeError
from towpath.messages import headers as names
from towpath.messages.headers import Headers
from towpath.messages.limits import CONTENT_TYPE_LIMIT, TYPE_LIMIT

WireKind = Literal["event", "task", "copy"]
Body = Literal["inline", "row"]
T = TypeVar("T")

_KINDS: Final[tuple[str, ...]] = get_args(WireKind)
_BODIES: Final[tuple[str, ...]] = get_args(Body)
_SPECVERSION: Final = (names.CE_SPECVERSION, b"1.0")
_SEQUENCE_MAX: Final = 2**63 - 1
_UUID_LENGTH: Final = 36
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_SOURCE_LIMIT: Final = 500


class Envelope(msgspec.Struct, frozen=True):
    """Everything about a message but its payload and key."""

    message_id: UUID
    type: str
    source: str
    """CloudEvents source: a URI reference that names the producing installation and destination."""
    occurred_at: datetime
    """When it was emitted, aware UTC; not when it was published."""
    content_type: str
    kind: WireKind = "event"
    body: Body = "inline"
    """`row`: a submitted task; the body is in its row and the message carries none."""
    sequence: int | None = None
    """The outbox id: within a key it grows in commit order. None: not from an outbox."""
    installation: str | None = None
    headers: Headers = ()
    """The caller's headers with traceparent and tracestate, in their order."""


@dataclass(frozen=True, slots=True)
class Message(Generic[T]):
    """A payload with its metadata, for handlers annotated `Message[OrderPlaced]`."""

    payload: T
    key: str | None
    envelope: Envelope

    @property
    def id(self) -> UUID:
        """Stable over redelivery, retry and replay."""
        return self.envelope.message_id

    @property
    def type(self) -> str:
        """The wire type."""
        return self.envelope.type

    @property
    def occurred_at(self) -> datetime:
        """When it was emitted, aware UTC."""
        return self.envelope.occurred_at

    @property
    def sequence(self) -> int | None:
        """Grows in commit order within a key."""
        return self.envelope.sequence

    @property
    def headers(self) -> Headers:
        """The caller's headers with traceparent and tracestate."""
        return self.envelope.headers


def source_of(installation: str, destination: str) -> str:
    """The CloudEvents source of a destination: `/towpath/<installation>/<destination>`."""
    return f"/towpath/{installation}/{destination}"


def wire_headers(envelope: Envelope) -> Headers:
    """All headers of a message, in a fixed order; the caller's come last, unchanged.

    Names that are ours are left out of the caller's: a row written by hand may have them, and two of
    one name could not be read back.
    """
    own = [
        _SPECVERSION,
        (names.CE_ID, str(envelope.message_id).encode()),
        (names.CE_TYPE, envelope.type.encode()),
        (names.CE_SOURCE, envelope.source.encode()),
        (names.CE_TIME, _format_time(envelope.occurred_at)),
        (names.CONTENT_TYPE, envelope.content_type.encode()),
        (names.KIND, envelope.kind.encode()),
        (names.BODY, envelope.body.encode()),
    ]
    if envelope.sequence is not None:
        own.append((names.SEQUENCE, b"%d" % envelope.sequence))
    if envelope.installation is not None:
        own.append((names.INSTALLATION, envelope.installation.encode()))
    own.extend(pair for pair in envelope.headers if not names.is_reserved(pair[0]))
    return tuple(own)


def read_envelope(headers: Headers) -> Envelope:
    """The envelope from a message's headers, in any order.

    A CloudEvent of another producer is read as an inline event without sequence. Raises DecodeError
    `missing_header` or `malformed_header`, also when a header of ours is repeated.
    """
    own: dict[str, str] = {}
    rest: list[tuple[str, bytes]] = []
    for name, value in headers:
        lower = names.reserved_name(name)
        if lower is None:
            rest.append((name, value))
            continue
        if lower in own:
            raise DecodeError("malformed_header", f"{lower!r:.80} is repeated")
        try:
            own[lower] = value.decode()
        except UnicodeDecodeError as error:
            raise DecodeError("malformed_header", f"{lower!r:.80} is not UTF-8") from error
    kind = own.get(names.KIND, "event")
    body = own.get(names.BODY, "inline")
    if kind not in _KINDS:
        _malformed(names.KIND, kind)
    if body not in _BODIES:
        _malformed(names.BODY, body)
    return Envelope(
        message_id=_read_id(own),
        type=_read_text(own, names.CE_TYPE, TYPE_LIMIT),
        source=_read_text(own, names.CE_SOURCE, _SOURCE_LIMIT),
        occurred_at=_read_time(own),
        content_type=_read_text(own, names.CONTENT_TYPE, CONTENT_TYPE_LIMIT),
        kind=cast("WireKind", kind),
        body=cast("Body", body),
        sequence=_read_sequence(own),
        installation=own.get(names.INSTALLATION),
        headers=tuple(rest),
    )


def _format_time(value: datetime) -> bytes:
    text = value.astimezone(UTC).isoformat()
    return text.replace("+00:00", "Z").encode()


def _malformed(name: str, value: str) -> NoReturn:
    raise DecodeError("malformed_header", f"{name} is {value!r:.80}")


def _required(own: Mapping[str, str], name: str) -> str:
    value = own.get(name)
    if value is None:
        raise DecodeError("missing_header", name)
    return value


def _read_text(own: Mapping[str, str], name: str, limit: int) -> str:
    value = _required(own, name)
    if not 1 <= len(value) <= limit or not value.isprintable():
        _malformed(name, value)
    return value


def _read_id(own: Mapping[str, str]) -> UUID:
    value = _required(own, names.CE_ID)
    if len(value) != _UUID_LENGTH:
        _malformed(names.CE_ID, value)
    try:
        id_: UUID = pgproto.UUID(value)  # a uuid.UUID that is made, hashed and stored at a tenth of the cost
    except ValueError:
        _malformed(names.CE_ID, value)
    else:
        return id_


def _read_time(own: Mapping[str, str]) -> datetime:
    value = _required(own, names.CE_TIME)
    try:
        instant = datetime.fromisoformat(value)
    except ValueError:
        _malformed(names.CE_TIME, value)
    if instant.utcoffset() is None:
        _malformed(names.CE_TIME, value)
    try:
        return instant if instant.tzinfo is UTC else instant.astimezone(UTC)
    except OverflowError:
        _malformed(names.CE_TIME, value)


def _read_sequence(own: Mapping[str, str]) -> int | None:
    value = own.get(names.SEQUENCE)
    if value is None:
        return None
    if (
        not value.isascii()
        or not value.isdigit()
        or len(value) > len(str(_SEQUENCE_MAX))
        or int(value) > _SEQUENCE_MAX
    ):
        _malformed(names.SEQUENCE, value)
    return int(value)
