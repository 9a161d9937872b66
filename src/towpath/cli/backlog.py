"""What waits in the outbox, by shard: read for `towpath outbox status` and `towpath relay status`."""

from typing import Any, Final

from towpath.cli.output import age
from towpath.cli.session import Session
from towpath.store.statements import load

COUNTED: Final = 10_000
"""Rows of a shard are counted up to here."""
COLUMNS: Final = ("shard", "pending", "oldest", "owner", "epoch", "progress")


async def shards_of(session: Session) -> list[dict[str, Any]]:
    """Every shard: owner, progress, and what waits."""
    sql = load("operator", session.schema)["outbox_backlog"]
    rows = await session.connection.fetch(sql, COUNTED)
    return [dict(row) | {"is_capped": row["pending"] >= COUNTED} for row in rows]


def totals(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The backlog of all of them."""
    ages = [shard["oldest_age_seconds"] for shard in shards if shard["oldest_age_seconds"] is not None]
    return {
        "pending": sum(shard["pending"] for shard in shards),
        "oldest_age_seconds": max(ages, default=None),
    }


def unowned(shards: list[dict[str, Any]]) -> str | None:
    """One line where shards have no owner."""
    count = sum(not shard["is_owned"] for shard in shards)
    return f"{count} of {len(shards)} shards have no owner: is a relay running?" if count else None


def row_of(shard: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "shard": shard["shard"],
        "pending": f"{shard['pending']}{'+' if shard['is_capped'] else ''}",
        "oldest": age(shard["oldest_age_seconds"]),
        "owner": shard["relay_host"] if shard["is_owned"] else None,
        "epoch": shard["epoch"],
        "progress": age(shard["journal_age_seconds"]),
    }
