"""`towpath relay`: publishing the outbox."""

from typing import Any

import typer

from towpath import settings
from towpath.cli import backlog, health, pausing
from towpath.cli.options import Json
from towpath.cli.output import age, as_json, table
from towpath.cli.session import connected, run_async
from towpath.store.pauses import PauseStore
from towpath.store.statements import load

app = typer.Typer(name="relay", help="Publish the outbox to the broker.", no_args_is_help=True)

_COLUMNS = ("id", "host", "version", "started_at", "seen", "is_alive", "shards", "wakeup")


@app.command()
def run() -> None:
    """Run a relay until SIGTERM or Ctrl-C. Settings: TOWPATH_RELAY__…

    TOWPATH_RELAY__HEALTH_PORT=8081 towpath relay run
    """
    from towpath.relay.service import run as run_relay  # noqa: PLC0415  the engine is heavy

    run_relay(settings.load())


@app.command()
def check(live: health.Live = False, json: Json = False) -> None:
    """Ask the relay of this machine, at TOWPATH_RELAY__HEALTH_PORT, whether it is ready; exit 3 if not.

    towpath relay check --live
    """
    loaded = settings.load().relay
    health.check("relay", loaded.health_host, loaded.health_port, is_live=live, is_json=json)


@app.command()
def status(json: Json = False) -> None:
    """Relays, their shards, backlog and progress, as the database has them: also while none runs.

    Alive is who beat within TOWPATH_RELAY__LEASE. For one process: towpath relay check.

    towpath relay status
    """
    report = run_async(_status(settings.load().relay.lease.total_seconds()))
    if json:
        as_json(report)
        return
    alive = sum(relay["is_alive"] for relay in report["relays"])
    oldest = age(report["oldest_age_seconds"])
    print(f"{alive} relays alive; {report['pending']} pending, oldest {oldest}")
    if line := backlog.unowned(report["shards"]):
        print(line)
    pausing.tell(report["pauses"])
    rows = [
        relay | {"seen": age(relay["seen_ago_seconds"]), "shards": ", ".join(map(str, relay["shards"]))}
        for relay in report["relays"]
    ]
    if rows:
        table(rows, _COLUMNS, empty="")
    table(map(backlog.row_of, report["shards"]), backlog.COLUMNS, empty="")


async def _status(lease_seconds: float) -> dict[str, Any]:
    async with connected() as session:
        found = await session.connection.fetch(load("status", session.schema)["relays"])
        shards = await backlog.shards_of(session)
        pauses = await PauseStore(session.schema).open(session.connection, "publish")
    return {
        "relays": [_relay(dict(row), lease_seconds) for row in found],
        **backlog.totals(shards),
        "unowned_count": sum(not shard["is_owned"] for shard in shards),
        "pauses": pauses,
        "shards": shards,
    }


def _relay(row: dict[str, Any], lease_seconds: float) -> dict[str, Any]:
    """`wakeup` is what an idle one does now: the database knows of all of them together."""
    is_notified = row.pop("is_notified")
    return row | {
        "is_alive": row["seen_ago_seconds"] < lease_seconds,
        "wakeup": "notify" if is_notified else "poll",
    }
