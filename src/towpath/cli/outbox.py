"""`towpath outbox`: what is not published yet, stopping that, sending again, where to begin in a copy."""

from typing import Annotated, Any, TypeAlias

import typer

from towpath import settings
from towpath.cli import backlog, pausing, rebasing
from towpath.cli.locating import show
from towpath.cli.option_groups import Consent, Pace, grouped
from towpath.cli.options import Actor, Because, Json, actor_name, text
from towpath.cli.output import age, as_json, cell, clean, table
from towpath.cli.session import Session, connected, run_async
from towpath.errors import UsageError
from towpath.messages.limits import check_destination
from towpath.store.pauses import EVERYTHING, PauseStore, Target
from towpath.store.provenance import ProvenanceStore
from towpath.store.retention import Retention
from towpath.store.statements import load

app = typer.Typer(
    name="outbox", help="What is written and not published yet; sending again what was.", no_args_is_help=True
)

_WHICH = "say which: --destination orders, or --all"
_UNPROVED = 300.0
"""Seconds; as in the alert."""
_LONG = 60.0
"""Seconds after which an open transaction is worth a word."""

app.command()(show)

Destinations: TypeAlias = Annotated[
    list[str] | None, typer.Option("--destination", "-d", help="Destination; repeatable.")
]


@app.command()
def status(
    json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Also shards with nothing pending.")] = False,
) -> None:
    """Backlog, owner and progress by shard, and the ring's slots.

    towpath outbox status --all
    """
    report = run_async(_status())
    if json:
        as_json(report)
        return
    total, waiting = report["pending"], age(report["oldest_age_seconds"])
    is_capped = any(shard["is_capped"] for shard in report["shards"])
    print(f"{total}{'+' if is_capped else ''} pending, oldest {waiting}; {report['relay_count']} relays")
    if line := backlog.unowned(report["shards"]):
        print(line)
    unproved = [
        shard["shard"] for shard in report["shards"] if (shard["canary_age_seconds"] or 0) > _UNPROVED
    ]
    if unproved:
        print(f"shards {unproved} have had no canary confirmed for five minutes: see TowpathCanaryMissing")
    blocked = [shard["shard"] for shard in report["shards"] if shard["is_blocked"]]
    look = "towpath dlq list --stage publish"
    if report["keys_parked"]:
        print(f"{report['parked']} parked behind {report['keys_parked']} refused: {look}")
    if blocked:
        print(f"shards {blocked} are blocked by a refused message: {look}")
    if report["paused"]:
        print(f"{report['paused']} wait for a paused destination, or for their turn after it was")
    pausing.tell(report["pauses"])
    oldest = report["oldest_transaction"]
    if oldest is not None and oldest["age_seconds"] > _LONG:
        print(f"a transaction is open since {age(oldest['age_seconds'])}: {_holder(oldest)}")
    print(f"{report['slots_free']} of {len(report['slots'])} slots of the ring are free")
    rows = [backlog.row_of(shard) for shard in report["shards"] if every or shard["pending"]]
    if rows:
        table(rows, backlog.COLUMNS, empty="")
    table(report["slots"], ("name", "rows_estimated", "bytes", "is_current", "kept"), empty="")


@app.command()
@grouped
def pause(
    destination: Destinations = None,
    every: Annotated[bool, typer.Option("--all", help="Every destination.")] = False,
    *,
    consent: Consent,
) -> None:
    """Stop publishing to a destination, or altogether, with the next heartbeat, until it is resumed.

    Nothing is lost and order is kept; other destinations go on.

    towpath outbox pause --destination orders --reason "topic is moved"
    """
    targets = _targets(destination, is_all=every)
    pausing.act(pausing.Request("pause", "publish", targets, False, consent))


@app.command()
@grouped
def resume(
    destination: Destinations = None,
    every: Annotated[bool, typer.Option("--all", help="Whatever is paused.")] = False,
    *,
    consent: Consent,
) -> None:
    """Publish again, what waited first. A destination stays paused while everything is.

    towpath outbox resume --destination orders
    """
    targets = () if every else _targets(destination, is_all=False)
    if every and destination:
        raise UsageError(_WHICH)
    pausing.act(pausing.Request("resume", "publish", targets, every, consent))


def _targets(destinations: list[str] | None, *, is_all: bool) -> list[Target]:
    if bool(destinations) is is_all:
        raise UsageError(_WHICH)
    names = [EVERYTHING] if is_all else [check_destination(name) for name in destinations or ()]
    return [Target("publish", name) for name in dict.fromkeys(names)]


@app.command()
@grouped
def republish(
    since: Annotated[
        str, typer.Option(help="Written at or after: 2026-01-31T14:00Z, or 2h for two hours ago.")
    ],
    until: Annotated[str | None, typer.Option(help="Written before; like --since. Default: now.")] = None,
    destination: Annotated[
        list[str] | None, typer.Option("--destination", help="Destination; repeatable.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", help="key=…, type=… or id=… (message id); repeatable.")
    ] = None,
    *,
    pace: Pace,
    consent: Consent,
) -> None:
    """Send published messages again, from the rows that are still retained. Interrupted, run it again.

    towpath outbox republish --since 2026-01-31T14:00Z --destination orders --where key=o-7 --dry-run
    """
    from towpath.cli import republishing  # noqa: PLC0415  the producer side is heavy

    republishing.act(
        republishing.Request(
            since=since, until=until, destinations=destination or (), where=where or (), pace=pace,
            consent=consent,
        )
    )  # fmt: skip


@app.command()
@grouped
def rebase(
    to: Annotated[
        str,
        typer.Option(
            help="Send what the copied journal does not call sent (journal), nothing that is there (now), "
            "all of it (oldest), or what was written since a time."
        ),
    ],
    *,
    consent: Consent,
) -> None:
    """Set the relay's starting point in a restored database. As its owner, and without relays.

    towpath outbox rebase --to journal --dry-run
    """
    rebasing.act(to, consent)


@app.command()
def confirm(reason: Because = "", actor: Actor = None, json: Json = False) -> None:
    """Say that the relay's broker and database are the right ones: it then notes what it finds.

    towpath outbox confirm --reason "moved to the new cluster"
    """
    who, why = actor_name(actor), text(reason, "--reason")

    async def act() -> list[dict[str, object]]:
        async with connected() as session:
            return await ProvenanceStore(session.schema).confirm(session.connection, actor=who, reason=why)

    rows = run_async(act())
    if json:
        as_json(rows)
    else:
        for row in rows:
            print(
                f"broker {row['name']}: was {cell(row['cluster'])}, published from {cell(row['home'])}; "
                "now what the next relay finds"
            )


def _holder(transaction: dict[str, Any]) -> str:
    pid = transaction["pid"]
    return clean(transaction["kind"] if pid is None else f"{transaction['kind']} (pid {pid})")


async def _kept(session: Session, slot: int) -> str | None:
    """Why the slot is not cleared: as the relay would be told, without its lock. None: it may go."""
    ring = Retention(session.schema)
    keep = settings.load().relay.retention.total_seconds()
    verdict = await ring.verdict(session.connection, slot, keep)
    if verdict.reason == "unsent":
        return f"unsent: shards {', '.join(map(str, verdict.unsent))}"
    holders = await ring.holders(session.connection, slot) if verdict.reason is None else []
    return f"locked: {', '.join(holders)}" if holders else verdict.reason


async def _status() -> dict[str, Any]:
    async with connected(is_pinned=True) as session:
        sql = load("operator", session.schema)
        shards = await backlog.shards_of(session)
        slots = [dict(row) for row in await session.connection.fetch(sql["outbox_slots"])]
        for number, slot in enumerate(slots):
            slot["kept"] = None if slot["is_empty"] else await _kept(session, number)
        pauses = await PauseStore(session.schema).open(session.connection, "publish")
        oldest = await session.connection.fetchrow(load("status", session.schema)["oldest_transaction"])
    return {
        **backlog.totals(shards),
        "parked": sum(row["parked"] for row in shards),
        "keys_parked": sum(row["keys_parked"] for row in shards),
        "paused": sum(row["paused"] for row in shards),
        "pauses": pauses,
        "relay_count": len({row["relay"] for row in shards if row["is_owned"]}),
        "shards": shards,
        "slots_free": sum(slot["is_empty"] for slot in slots),
        "slots": slots,
        "oldest_transaction": None if oldest is None else dict(oldest),
    }
