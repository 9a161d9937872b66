"""Dead letters: one catalog row per group and message, and a copy to the broker's DLQ, in one transaction."""

from typing import Final, Literal, TypeAlias

import msgspec

from towpath.brokers.ports import dead_letter_address
from towpath.failures import Failure
from towpath.messages import Headers, dump_headers, wire_headers
from towpath.messages.headers import CE_ID
from towpath.store.gates import Connection
from towpath.store.statements import load
from towpath.store.work import Work, envelope_of

Stage: TypeAlias = Literal["publish", "decode", "handle", "broker"]

COPY_BODY_LIMIT: Final = 16_384
"""Larger bodies stay in the catalog; the copy carries headers and the id of its row."""


class DeathStore:
    """Buries messages of one consumer group inside the caller's transaction."""

    def __init__(self, schema: str, group: str) -> None:
        self._sql = load("work", schema)
        self._group = group

    async def bury(
        self,
        connection: Connection,
        work: Work,
        failure: Failure,
        *,
        stage: Stage,
        attempts: int,
        origin: str | None,
    ) -> None:
        """Catalog row and broker copy. A message that died before is reopened and counted."""
        row = await connection.fetchrow(
            self._sql["bury"],
            self._group,
            work.id,
            stage,
            work.type,
            work.kind,
            work.source,
            work.key,
            work.position,
            work.payload,
            work.content_type,
            dump_headers(work.headers),
            origin,
            failure.reason_code,
            failure.error_class,
            failure.error_message,
            failure.fingerprint,
            attempts,
            work.lane,
            work.trace,
        )
        if row is None:
            raise RuntimeError("the dead-letter catalog returned no row")
        fits = len(work.payload or b"") <= COPY_BODY_LIMIT
        story = _story(self._group, row["id"], failure, stage, attempts, fits)
        await connection.execute(
            self._sql["copy_to_broker"],
            dead_letter_address(self._group, work.source),
            work.key,
            work.id,
            work.type,
            work.content_type or "application/octet-stream",
            dump_headers((*_wire_headers(work), *story)),
            work.payload if fits else b"",
        )


def _wire_headers(work: Work) -> Headers:
    """Of the message as it travelled; a submitted task's row has only its caller's, it gets ours back."""
    if work.kind != "task" or any(name == CE_ID for name, _ in work.headers):
        return work.headers
    return wire_headers(msgspec.structs.replace(work.envelope or envelope_of(work), body="inline"))


def _story(group: str, catalog_id: int, failure: Failure, stage: Stage, attempts: int, fits: bool) -> Headers:
    return (
        ("towpath-dead-group", group.encode()),
        ("towpath-dead-letter", str(catalog_id).encode()),
        ("towpath-dead-stage", stage.encode()),
        ("towpath-dead-reason", failure.reason_code.encode()),
        ("towpath-dead-error", failure.error_class.encode()),
        ("towpath-dead-attempts", str(attempts).encode()),
        ("towpath-dead-body", b"inline" if fits else b"catalog"),
    )
