"""Correcting a dead letter: a revision beside the original, which a replay sends instead."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from towpath.errors import UsageError
from towpath.messages import Headers, decode, dump_headers, load_headers
from towpath.messages.headers import HeadersInput, check_headers
from towpath.store.audit import AuditStore
from towpath.store.deadletters import Connection
from towpath.store.revisions import Revisions
from towpath.store.statements import DEFAULT_SCHEMA

if TYPE_CHECKING:
    from towpath.app import App


@dataclass(frozen=True, slots=True)
class Editable:
    """An open dead letter as a replay would send it now."""

    id: int
    message_id: UUID
    group: str
    type: str | None
    revision: int
    """0: the original."""
    payload: bytes | None
    content_type: str | None
    headers: Headers


async def open_for_edit(connection: Connection, letter_id: int, *, schema: str = DEFAULT_SCHEMA) -> Editable:
    """Read one. Raises UsageError where it is not there or not open."""
    row = await Revisions(schema).lock(connection, letter_id)
    if row is None:
        raise UsageError(f"there is no dead letter {letter_id}")
    if row["state"] != "open":
        raise UsageError(f"dead letter {letter_id} is {row['state']}: only open ones are replayed, or edited")
    return Editable(
        row["id"],
        row["message_id"],
        row["consumer_group"],
        row["type"],
        row["revision"],
        row["payload"],
        row["content_type"],
        load_headers(row["headers"]),
    )


def validate(letter: Editable, payload: bytes, app: "App") -> None:
    """Read the payload as its type. Raises DecodeError; UsageError where the app does not know the type."""
    if letter.group not in ("", app.name):
        raise UsageError(f"the dead letter is of group {letter.group}, the app is group {app.name}")
    handler = app.handlers.get(letter.type or "")
    if handler is None:
        raise UsageError(f"group {app.name} has no handler for {letter.type or 'a message without type'}")
    if handler.payload_class is not None:
        decode(handler.payload_class, payload, letter.content_type or "")


def corrected_headers(
    letter: Editable, changed: Mapping[str, Sequence[str]], dropped: Sequence[str]
) -> Headers:
    """Its headers with the values of some names replaced, and some names left out. Raises InvalidMessage."""
    pairs: HeadersInput = [(name, value) for name, values in changed.items() for value in values]
    added = check_headers(pairs)
    gone = {*changed, *dropped}
    check_headers([(name, "") for name in gone])
    return (*(pair for pair in letter.headers if pair[0] not in gone), *added)


async def revise(
    connection: Connection,
    letter: Editable,
    *,
    payload: bytes | None,
    headers: Headers,
    is_validated: bool,
    actor: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
) -> int:
    """Record the correction; returns the number of the revision.

    Raises UsageError when it is no longer open, or somebody else corrected it meanwhile.
    """
    async with connection.transaction():
        now = await open_for_edit(connection, letter.id, schema=schema)
        if now.revision != letter.revision:
            raise UsageError(
                f"dead letter {letter.id} was corrected meanwhile: look again (towpath dlq show)"
            )
        revision = await Revisions(schema).add(
            connection,
            {"id": now.id, "revision": now.revision, "content_type": now.content_type},
            payload=payload,
            headers=dump_headers(headers),
            is_validated=is_validated,
            actor=actor,
            reason=reason,
        )
        await AuditStore(schema).begin(
            connection,
            actor=actor,
            action="dlq.edit",
            reason=reason,
            criteria=json.dumps({"ids": [letter.id]}),
            counts=json.dumps({"revision": revision, "is_validated": is_validated}),
        )
    return revision
