"""Dead letters as lines of JSON, out of an installation and back into it.

The first line says where they come from, the last how many there are; each between is one dead letter,
with its body as text or base64 and its corrections.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final

import msgspec

from towpath.deadletters.criteria import Filter
from towpath.deadletters.lines import FORMAT, End, Head, line_of, read_letter
from towpath.errors import UsageError
from towpath.store.audit import AuditStore
from towpath.store.deadletters import Connection
from towpath.store.revisions import Revisions
from towpath.store.statements import DEFAULT_SCHEMA

_BATCH_ROWS: Final = 200
_BATCH_BYTES: Final = 8 << 20


@dataclass(slots=True)
class Imported:
    """What an import did."""

    read: int = 0
    imported: int = 0
    known: int = 0
    """They are there already, or their task lives or ended otherwise: left as they are."""


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
    now = (await AuditStore(schema).clock(connection)).astimezone(UTC)
    yield json.dumps(msgspec.to_builtins(Head(FORMAT, installation, version, now.isoformat())))
    count = 0
    async for letter, revisions in store.export(connection, criteria.parameters(), states or None):
        count += 1
        yield line_of(letter, revisions)
    yield json.dumps({"count": count})


async def bring(
    connection: Connection,
    lines: Iterable[str],
    *,
    actor: str,
    reason: str = "",
    dry_run: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> Imported:
    """Import the lines of an export: all that are missing, or nothing at all; memory is bounded.

    Raises UsageError for lines that are not as `export` writes them, of another installation or schema
    version, or cut off.
    """
    store = Revisions(schema)
    numbered = enumerate(lines, start=1)
    _check_origin(next(numbered, (1, ""))[1], *await store.installation(connection))
    done = Imported()
    transaction = connection.transaction()
    await transaction.start()
    try:
        for batch in _batches(numbered):
            done.read += len(batch)
            rows = await store.bring(connection, json.dumps(batch))
            done.imported += len(rows)
            revisions = {(one["consumer_group"], one["message_id"]): one["revisions"] for one in batch}
            for row in rows:
                if given := revisions[row["consumer_group"], str(row["message_id"])]:
                    await store.bring_revisions(connection, row["id"], json.dumps(given))
        done.known = done.read - done.imported
        if not dry_run and done.imported:
            await AuditStore(schema).begin(
                connection,
                actor=actor,
                action="dlq.import",
                reason=reason,
                criteria="{}",
                counts=json.dumps({"read": done.read, "imported": done.imported, "known": done.known}),
            )
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.rollback() if dry_run else transaction.commit())
    return done


def _check_origin(line: str, installation: str, version: str) -> None:
    try:
        head = msgspec.json.decode(line, type=Head)
    except msgspec.DecodeError as error:
        raise UsageError("line 1 is not the first line of towpath dlq export") from error
    if head.format != FORMAT:
        raise UsageError(f"line 1 is of {head.format[:40]!r}, not of towpath dlq export")
    if head.schema_version != version:
        raise UsageError(
            f"these are of schema version {head.schema_version[:20]}, this database has {version}: "
            "import them with the towpath that exported them, then run towpath db upgrade"
        )
    if head.installation != installation:
        raise UsageError(
            f"these are of installation {head.installation[:40]}, this database is {installation}: "
            "import them where they were exported"
        )


def _batches(lines: Iterator[tuple[int, str]]) -> Iterator[list[dict[str, Any]]]:
    """Validated dead letters as the statement takes them; the end has to be there."""
    batch: list[dict[str, Any]] = []
    size = count = 0
    for number, line in lines:
        try:
            end = msgspec.json.decode(line, type=End)
        except msgspec.DecodeError:
            batch.append(read_letter(number, line))
            count, size = count + 1, size + len(line)
            if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            continue
        if end.count != count or any(rest.strip() for _, rest in lines):
            raise UsageError(
                f"line {number} says {end.count} dead letters, and there are others: export again"
            )
        yield batch
        return
    raise UsageError("the file is cut off: its last line, which counts the dead letters, is missing")
