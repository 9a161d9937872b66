"""Bringing exported dead letters back: all lines are read and checked before the first row is written.

What is there stays as it is, so an import that was interrupted is begun again and brings the rest.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import IO, Any, Final
from uuid import UUID

import msgspec

from towpath import bulk
from towpath.bulk import Counts
from towpath.deadletters.lines import FORMAT, End, Head, read_letter
from towpath.deadletters.plan import Cause
from towpath.errors import UsageError
from towpath.store.audit import AuditStore
from towpath.store.deadletters import Connection
from towpath.store.revisions import Revisions
from towpath.store.statements import DEFAULT_SCHEMA

_BATCH_ROWS: Final = 200
_BATCH_BYTES: Final = 8 << 20
_SAMPLE_SIZE: Final = 5


@dataclass(slots=True)
class ImportPlan:
    """The lines whose dead letters are missing here: 8 bytes each, however many there are."""

    made_at: datetime
    exported_at: datetime
    limit: int | None
    causes: Counter[Cause] = field(default_factory=Counter)
    known_count: int = 0
    """They are there already, or their task lives or ended otherwise: left as they are."""
    beyond_limit_count: int = 0
    """Left out because the limit was reached before them."""
    _lines: "array[int]" = field(default_factory=lambda: array("q"))
    _sample: list[UUID] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many will be brought."""
        return len(self._lines)

    def sample(self) -> list[UUID]:
        """The first message ids."""
        return self._sample

    def chosen(self, lines: IO[str]) -> "Iterator[_Line]":
        """The dead letters of the plan, out of the same lines."""
        wanted = iter(self._lines)
        line = next(wanted, None)
        for letter in _letters(lines):
            if letter.number == line:
                line = next(wanted, None)
                yield letter

    def _take(self, letter: dict[str, Any], number: int) -> None:
        if self.limit is not None and self.count >= self.limit:
            self.beyond_limit_count += 1
            return
        if self.count < _SAMPLE_SIZE:
            self._sample.append(UUID(letter["message_id"]))
        self._lines.append(number)
        cause = letter["consumer_group"], letter["stage"], letter.get("type") or "", letter["reason_code"]
        self.causes[cause] += 1


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    size: int
    letter: dict[str, Any]


async def make_plan(
    connection: Connection, lines: IO[str], *, schema: str = DEFAULT_SCHEMA, limit: int | None = None
) -> ImportPlan:
    """Read the lines of an export to their end and find what is missing. Changes nothing.

    Raises UsageError for lines that are not as `export` writes them, of another installation or schema
    version, or cut off.
    """
    store = Revisions(schema)
    lines.seek(0)
    head = _head(lines.readline(), *await store.installation(connection))
    plan = ImportPlan(await AuditStore(schema).clock(connection), head.exported_at, limit)
    for batch in _batches(_letters(lines), _BATCH_ROWS):
        missing = await store.missing(connection, json.dumps([_named(line) for line in batch]))
        plan.known_count += len(batch) - len(missing)
        for line in batch:
            if line.number in missing:
                plan._take(line.letter, line.number)  # noqa: SLF001  its own maker
    return plan


async def carry_out(
    connection: Connection,
    plan: ImportPlan,
    lines: IO[str],
    *,
    actor: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
    rate: float | None = None,
    on_progress: Callable[[Counts], None] | None = None,
) -> tuple[int, Counts]:
    """Bring what the plan says out of the same lines; returns the id of its audit row and the final counts.

    `rate` is dead letters per second. The connection must be outside any transaction. Raises
    StoreUnavailable when the database goes away: make and carry out the plan again.
    """
    counts = Counts(plan.count, beyond_limit=plan.beyond_limit_count, until=plan.made_at.isoformat())
    store = Revisions(schema)
    lines.seek(0)
    lines.readline()
    batches = _batches(plan.chosen(lines), bulk.batch_size(rate, _BATCH_ROWS))
    audit_id = await bulk.carry_out(
        connection,
        (_Batch(store, connection, [line.letter for line in batch]) for batch in batches),
        bulk.Request("dlq.import", actor, reason, {"exported_at": plan.exported_at.isoformat()}),
        counts,
        schema=schema,
        rate=rate,
        on_progress=on_progress,
    )
    return audit_id, counts


@dataclass(frozen=True, slots=True)
class _Brought:
    is_parked: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    store: Revisions
    connection: Connection
    letters: Sequence[dict[str, Any]]

    @property
    def size(self) -> int:
        return len(self.letters)

    async def move(self) -> list[_Brought]:
        rows = await self.store.bring(self.connection, json.dumps(self.letters))
        revisions = {(one["consumer_group"], one["message_id"]): one["revisions"] for one in self.letters}
        for row in rows:
            if given := revisions[row["consumer_group"], str(row["message_id"])]:
                await self.store.bring_revisions(self.connection, row["id"], json.dumps(given))
        return [_Brought()] * len(rows)


def _named(line: _Line) -> dict[str, Any]:
    """What tells whether it is missing."""
    names = ("consumer_group", "message_id", "stage", "state")
    return {"line": line.number, **{name: line.letter[name] for name in names}}


def _head(line: str, installation: str, version: str) -> Head:
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
    return head


def _letters(lines: IO[str]) -> Iterator[_Line]:
    """Validated dead letters as the statement takes them; the end has to be there."""
    numbered = enumerate(lines, start=2)
    count = 0
    for number, line in numbered:
        try:
            end = msgspec.json.decode(line, type=End)
        except msgspec.DecodeError:
            yield _Line(number, len(line), read_letter(number, line))
            count += 1
            continue
        if end.count != count or any(rest.strip() for _, rest in numbered):
            raise UsageError(
                f"line {number} says {end.count} dead letters, and there are others: export again"
            )
        return
    raise UsageError("the file is cut off: its last line, which counts the dead letters, is missing")


def _batches(letters: Iterator[_Line], most: int) -> Iterator[list[_Line]]:
    """Up to so many at a time, fewer where they are large."""
    batch: list[_Line] = []
    size = 0
    for line in letters:
        batch.append(line)
        size += line.size
        if len(batch) >= most or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
