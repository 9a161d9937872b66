"""Dead letters as lines of JSON, out of an installation; `importing` brings them back.

The first line says where they come from, the last how many there are; each between is one dead letter,
with its body as text or base64 and its corrections.
"""

import json
from collections.abc import AsyncIterator, Sequence

import msgspec

from towpath.deadletters.criteria import Filter
from towpath.deadletters.lines import FORMAT, Head, line_of
from towpath.store.audit import AuditStore
from towpath.store.deadletters import Connection
from towpath.store.revisions import Revisions
from towpath.store.statements import DEFAULT_SCHEMA


async def export(
    connection: Connection,
    criteria: Filter,
    *,
    states: Sequence[str] = ("open",),
    schema: str = DEFAULT_SCHEMA,
) -> AsyncIterator[str]:
    """The lines, ASCII, without their ends; memory is bounded."""
    store = Revisions(schema)
    installation, version = await store.installation(connection)
    now = await AuditStore(schema).clock(connection)
    yield json.dumps(msgspec.to_builtins(Head(FORMAT, installation, version, now)))
    count = 0
    async for letter, revisions in store.export(connection, criteria.parameters(), states or None):
        count += 1
        yield line_of(letter, revisions)
    yield json.dumps({"count": count})
