"""Messages made of outbox rows: address, routing slot and all headers, as cheaply as Python can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, cast
from uuid import UUID

from towpath.brokers.ports import ROUTING_SLOTS, Headers, OutboundMessage
from towpath.errors import DecodeError, MessageRefused
from towpath.messages import headers as names
from towpath.messages.envelope import Body, Envelope, WireKind, source_of, wire_headers
from towpath.messages.headers import load_headers
from towpath.store.outbox import Row

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_PLACEHOLDER: Final = Envelope(
    message_id=UUID(int=0),
    type="type",
    source="source",
    occurred_at=datetime(2000, 1, 1, tzinfo=UTC),
    content_type="type",
    sequence=0,
    installation="installation",
)
_ORDER: Final = [name for name, _ in wire_headers(_PLACEHOLDER)]
_AT_ID: Final = _ORDER.index(names.CE_ID)
_AT_TIME: Final = _ORDER.index(names.CE_TIME)
_AT_SEQUENCE: Final = _ORDER.index(names.SEQUENCE)


class Outbound:
    """Makes messages of rows. Headers that repeat from row to row are made once."""

    def __init__(self, installation: str, addresses: Mapping[str, str]) -> None:
        self._installation = installation
        self._addresses = addresses
        self._second: int | None = None
        self._second_text = b""
        self._templates: dict[tuple[str, str, str, str, str], tuple[str, Headers]] = {}

    def readdress(self, addresses: Mapping[str, str]) -> None:
        """The addresses of destinations may have changed."""
        if addresses is not self._addresses:
            self._addresses = addresses
            self._templates.clear()

    def messages(self, rows: Sequence[Row]) -> tuple[list[OutboundMessage], dict[int, MessageRefused]]:
        """One message per row, and by index why a row cannot become one that may be sent."""
        made: list[OutboundMessage] = []
        refused: dict[int, MessageRefused] = {}
        templates = self._templates
        for (
            id_,
            _,
            message_id,
            kind,
            destination,
            type_,
            key,
            content_type,
            headers,
            payload,
            created_at,
            key_hash,
            _,
        ) in rows:
            body: Body = "row" if kind == "task" and payload is None else "inline"
            template = templates.get((kind, body, destination, type_, content_type))
            if template is None:
                template = self._add_template(kind, body, destination, type_, content_type)
            address, own = template
            try:
                stored = load_headers(headers)
            except DecodeError as error:
                refused[len(made)] = MessageRefused(error.reason, error.detail)
                stored = ()
            if own:
                time = self._time(created_at)
                if len(stored) > 1 and stored[0][0] == names.REPUBLISHED and stored[1][0] == names.CE_TIME:
                    time, stored = stored[1][1], (stored[0], *stored[2:])
                pairs = [*own, *stored]
                pairs[_AT_ID] = (names.CE_ID, str(message_id).encode())
                pairs[_AT_TIME] = (names.CE_TIME, time)
                pairs[_AT_SEQUENCE] = (names.SEQUENCE, b"%d" % id_)
                stored = tuple(pairs)
            made.append(
                OutboundMessage(
                    message_id, id_, address, type_, key, key_hash % ROUTING_SLOTS, stored, payload
                )
            )
        return made, refused

    def _time(self, microseconds: int) -> bytes:
        """As the envelope writes it; the part up to the second is made once per second."""
        second, rest = divmod(microseconds, 1_000_000)
        if second != self._second:
            self._second = second
            self._second_text = (_EPOCH + timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%S").encode()
        return b"%b.%06dZ" % (self._second_text, rest) if rest else self._second_text + b"Z"

    def _add_template(
        self, kind: str, body: Body, destination: str, type_: str, content_type: str
    ) -> tuple[str, Headers]:
        """The address, and the headers but for id, time and sequence; none for a copy, which has its own."""
        address = self._addresses.get(destination, destination)
        own: Headers = ()
        if kind != "copy":
            own = wire_headers(
                Envelope(
                    message_id=_PLACEHOLDER.message_id,
                    type=type_,
                    source=source_of(self._installation, destination),
                    occurred_at=_PLACEHOLDER.occurred_at,
                    content_type=content_type,
                    kind=cast("WireKind", kind),
                    body=body,
                    sequence=0,
                    installation=self._installation,
                )
            )
        if len(self._templates) > 10_000:  # types from unbounded names must not fill the memory
            self._templates.clear()
        template = self._templates[kind, body, destination, type_, content_type] = (address, own)
        return template
