"""A new starting point for the relay of a database that was restored or copied."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import asyncpg

from towpath.errors import ConfigurationError, UsageError
from towpath.store.audit import AuditStore
from towpath.store.database import store_errors
from towpath.store.statements import DEFAULT_SCHEMA, load

Named: TypeAlias = Literal["journal", "now", "oldest"]
POINTS: Final[tuple[Named, ...]] = ("journal", "now", "oldest")
Point: TypeAlias = Named | datetime
"""`journal`: sent is what the copied journal says, and all else is sent. `now`: everything retained counts as
sent. `oldest`: everything retained is sent. A time: what was written since is sent."""


_LONG_SECONDS: Final = 3600.0
"""Of rewriting a large outbox."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of the rows that are retained."""

    unsent: int
    """To be sent, or sent again."""
    sent: int
    """That count as sent."""
    dropped: int
    """Of those, written here after the copy was made: nobody has ever sent them."""
    oldest_unsent_at: datetime | None
    newest_at: datetime | None


class Rebase:
    """The statements of one schema; each call is a transaction of its own."""

    def __init__(
        self, connection: asyncpg.Connection[Any], point: Point, schema: str = DEFAULT_SCHEMA
    ) -> None:
        self._connection = connection
        self._schema = schema
        sql = load("rebase", schema)
        composed = {name: sql[name] for name in ("progress", "is_unsent")}
        self._sql = {name: _put_in(text, composed) for name, text in sql.items()}
        is_time = isinstance(point, datetime)
        self._point = ("time" if is_time else point, point if is_time else None)

    async def preview(self) -> Outlook:
        """Count, and change nothing."""
        with store_errors():
            transaction = self._connection.transaction(isolation="repeatable_read")
            await transaction.start()
            try:
                xid = (await self._connection.fetchrow(self._sql["place"]))["xid"]
                return await self._outlook(xid)
            finally:
                await transaction.rollback()

    async def carry_out(self, *, actor: str, reason: str) -> tuple[int, Outlook]:
        """Do it; returns the id of the audit row.

        Raises UsageError while a relay holds leases: stop the relays first.
        """
        connection, sql = self._connection, self._sql
        try:
            with store_errors():
                async with connection.transaction(isolation="repeatable_read"):
                    live = await connection.fetch(sql["lock_leases"])
                    if live:
                        raise UsageError(
                            f"a relay holds leases of {len(live)} shards: stop the relays, or wait until the "
                            "leases are over (30 seconds after the last one died)"
                        )
                    place = await connection.fetchrow(sql["place"])
                    xid, snapshot = place["xid"], place["snapshot"]
                    outlook = await self._outlook(xid)
                    for row in await connection.fetch(sql["sequences"]):
                        await connection.execute(row["statement"])
                    await connection.execute(sql["rebase_outbox"], xid, *self._point, timeout=_LONG_SECONDS)
                    await connection.execute(sql["rebase_scheduled"], xid, snapshot)
                    await connection.execute(sql["rebase_tasks"], xid)
                    await connection.execute(sql["forget_journal"])
                    await connection.fetch(load("provenance", self._schema)["forget"])
                    await connection.execute(sql["fence"])
                    await connection.execute(sql["begin_journal"], snapshot)
                    audit_id = await AuditStore(self._schema).begin(
                        connection,
                        actor=actor,
                        action="outbox.rebase",
                        reason=reason,
                        criteria=json.dumps({"to": str(self._point[1] or self._point[0])}),
                        counts=json.dumps(asdict(outlook), default=str),
                    )
        except asyncpg.SerializationError as error:
            raise UsageError(
                "a relay was at work at the same moment: stop the relays and try again"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise ConfigurationError(
                f"only the owner of the schema may set a new starting point: {error}"
            ) from error
        return audit_id, outlook

    async def _outlook(self, xid: str) -> Outlook:
        return Outlook(**await self._connection.fetchrow(self._sql["count_outbox"], xid, *self._point))


def _put_in(text: str, parts: dict[str, str]) -> str:
    for name, part in parts.items():
        text = text.replace(f":{name}", part)
    return text
