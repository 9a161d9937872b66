"""What becomes of messages that cannot be published: a catalog row, or a note on the row copied from."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import asyncpg

from towpath.brokers.ports import OutboundMessage
from towpath.errors import DecodeError, MessageRefused
from towpath.failures.text import class_name, describe, fingerprint, redact
from towpath.messages.headers import TRACEPARENT, Headers, load_headers
from towpath.store.outbox import CONTENT_TYPE, DESTINATION, HEADERS, KIND, SHARD, Row
from towpath.store.statements import DEFAULT_SCHEMA, load

_DEAD_LETTER_HEADER: Final = "towpath-dead-letter"
_MAX_ID: Final = 2**63 - 1


class Unpublished:
    """The statements of one schema; each runs in the caller's transaction."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = load("relay", schema)

    async def bury(
        self,
        connection: asyncpg.Connection[Any],
        row: Row,
        message: OutboundMessage,
        refusal: MessageRefused,
        attempts: int,
    ) -> None:
        """Put an outbox row into the catalog of no group with all that sending it again needs.

        Its source is the destination and its headers are the stored ones; `origin` tells the
        address, the outbox id and the shard.
        """
        trace = next((value for name, value in message.headers if name == TRACEPARENT), None)
        await connection.execute(
            self._sql["bury_unpublished"],
            message.message_id,
            message.type,
            row[KIND],
            row[DESTINATION],
            message.key,
            message.sequence,
            message.payload,
            row[CONTENT_TYPE],
            row[HEADERS] or "[]",
            json.dumps({"address": message.address, "outbox_id": message.sequence, "shard": row[SHARD]}),
            redact(refusal.reason, limit=100),
            class_name(refusal),
            describe(refusal),
            fingerprint(refusal),
            attempts,
            None if trace is None else redact(trace.decode("ascii", "replace"), limit=100),
        )

    async def mark_copy(self, connection: asyncpg.Connection[Any], row: Row, refusal: MessageRefused) -> None:
        """Note on a dead letter that its copy could not be published; a copy made by hand may name none."""
        headers: Headers = ()
        with contextlib.suppress(DecodeError):
            headers = load_headers(row[HEADERS])
        for name, value in headers:
            if name == _DEAD_LETTER_HEADER and value.isdigit() and int(value) <= _MAX_ID:
                await connection.execute(self._sql["mark_copy"], int(value), describe(refusal))
