"""`towpath outbox`: what is written and not published yet."""

from typing import Annotated, Any

import typer

from towpath.cli.options import Json
from towpath.cli.output import age, as_json, table
from towpath.cli.session import connected, run_async
from towpath.store.statements import load

app = typer.Typer(name="outbox", help="What is written and not published yet.", no_args_is_help=True)

_COUNTED = 10_000


@app.command()
def status(
    json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Also shards with nothing pending.")] = False,
) -> None:
    """Backlog, owner and progress by shard, and the ring's slots."""
    report = run_async(_status())
    if json:
        as_json(report)
        return
    total, oldest = report["pending"], report["oldest_age_seconds"]
    is_capped = any(shard["is_capped"] for shard in report["shards"])
    print(f"{total}{'+' if is_capped else ''} pending, oldest {age(oldest)}; {report['relay_count']} relays")
    unowned = [shard["shard"] for shard in report["shards"] if not shard["is_owned"]]
    if unowned:
        print(f"{len(unowned)} of {len(report['shards'])} shards have no owner: is a relay running?")
    blocked = [shard["shard"] for shard in report["shards"] if shard["is_blocked"]]
    look = "towpath dlq list --stage publish"
    if report["keys_parked"]:
        print(f"{report['parked']} parked behind {report['keys_parked']} refused: {look}")
    if blocked:
        print(f"shards {blocked} are blocked by a refused message: {look}")
    rows = [
        {
            "shard": shard["shard"],
            "pending": f"{shard['pending']}{'+' if shard['is_capped'] else ''}",
            "oldest": age(shard["oldest_age_seconds"]),
            "owner": shard["relay_host"] if shard["is_owned"] else None,
            "epoch": shard["epoch"],
            "progress": age(shard["journal_age_seconds"]),
        }
        for shard in report["shards"]
        if every or shard["pending"]
    ]
    if rows:
        table(rows, ("shard", "pending", "oldest", "owner", "epoch", "progress"), empty="")
    table(report["slots"], ("name", "rows_estimated", "bytes", "is_current"), empty="")


async def _status() -> dict[str, Any]:
    async with connected() as session:
        sql = load("operator", session.schema)
        rows = await session.connection.fetch(sql["outbox_backlog"], _COUNTED)
        slots = [dict(row) for row in await session.connection.fetch(sql["outbox_slots"])]
    shards = [dict(row) | {"is_capped": row["pending"] >= _COUNTED} for row in rows]
    ages = [row["oldest_age_seconds"] for row in shards if row["oldest_age_seconds"] is not None]
    return {
        "pending": sum(row["pending"] for row in shards),
        "oldest_age_seconds": max(ages, default=None),
        "parked": sum(row["parked"] for row in shards),
        "keys_parked": sum(row["keys_parked"] for row in shards),
        "relay_count": len({row["relay"] for row in shards if row["is_owned"]}),
        "shards": shards,
        "slots": slots,
    }
