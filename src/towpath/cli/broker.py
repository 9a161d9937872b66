"""`towpath broker`: topics, exchanges and queues."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from json import dumps
from typing import Annotated, Any, Final, TypeAlias

import typer

from towpath import settings
from towpath.backoff import parse_duration
from towpath.brokers.factory import broker_of
from towpath.brokers.ports import BrokerAdmin, GroupTopology
from towpath.brokers.retention import outlived
from towpath.cli.exits import SAYS_NO, Stop
from towpath.cli.options import Actor, Because, Json, actor_name, text
from towpath.cli.output import as_json, clean, table
from towpath.cli.session import connected, run_async
from towpath.errors import (
    BrokerUnavailable,
    SchemaMismatch,
    SettingsError,
    StoreUnavailable,
    TopologyError,
    UsageError,
)
from towpath.messages.limits import CANARY, check_destination
from towpath.store.deadletters import DeadLetters
from towpath.store.destinations import add_broker, addresses_of, all_brokers
from towpath.store.provenance import ProvenanceStore

app = typer.Typer(name="broker", help="Topics, exchanges and queues at the broker.", no_args_is_help=True)

_BROKER_SECONDS: Final = 60

Apps: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--app", metavar="MODULE:APP", help="Everything this consumer group needs; repeatable."),
]
Addresses: TypeAlias = Annotated[
    list[str] | None, typer.Option("--address", help="A topic or exchange of its own; repeatable.")
]


@app.command()
def apply(
    apps: Apps = None,
    addresses: Addresses = None,
    partitions: Annotated[int, typer.Option(min=1, max=10_000, help="Of a new Kafka topic.")] = 6,
    json: Json = False,
) -> None:
    """Create what is missing; what exists stays as it is."""

    async def run() -> list[str]:
        wanted, groups, _ = await _topology(apps, addresses)
        async with admin_of_settings() as admin:
            return await admin.apply(wanted, groups, partitions=partitions)

    created = run_async(run())
    if json:
        as_json({"created": created})
    else:
        print("\n".join(map(clean, created)) or "nothing was missing")


@app.command()
def check(apps: Apps = None, addresses: Addresses = None, json: Json = False) -> None:
    """Say what is missing or declared otherwise; exit 3 if anything is. Warnings change nothing."""

    async def run() -> tuple[list[str], list[str]]:
        wanted, groups, rows_kept_for = await _topology(apps, addresses)
        async with admin_of_settings() as admin:
            problems = await admin.check(wanted, groups)
            warnings = [
                line for group in groups for line in await outlived(admin, group, rows_kept_for[group.group])
            ]
            warnings += await _unused_partitions(admin, wanted)
        return problems, warnings

    problems, warnings = run_async(run())
    if json:
        as_json({"ok": not problems, "problems": problems, "warnings": warnings})
    else:
        print("\n".join(map(clean, problems)) or "everything is there")
        for warning in warnings:
            print(f"warning: {clean(warning)}")
    if problems:
        raise Stop(SAYS_NO)


@app.command()
def rollover(
    address: Annotated[str, typer.Argument(help="The topic that partitions were added to.")],
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Place keys by the partitions a topic has now. Without relays, after every group read to the end."""
    topic, who, why = text(address, "ADDRESS", 200), actor_name(actor), text(reason, "--reason")

    async def run() -> tuple[int | None, int]:
        async with admin_of_settings() as admin:
            count = len(await admin.bounds(topic))
        if not count:
            raise UsageError("this broker has no partitions")
        async with connected() as session:
            store = ProvenanceStore(session.schema)
            before = await store.roll_over(session.connection, _number(), topic, count, actor=who, reason=why)
        return before, count

    before, count = run_async(run())
    if json:
        as_json({"address": topic, "before": before, "partitions": count})
    elif before is None:
        print(
            f"{clean(topic)}: nothing was published there yet; the first relay notes its {count} partitions"
        )
    else:
        print(f"{clean(topic)}: keys are placed by {count} partitions, {before} before")


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List the brokers that relays publish to, by number."""

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            return [dict(row) for row in await all_brokers(session.connection, session.schema)]

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, ("number", "name", "relays", "destinations", "cluster", "home"), empty="")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Add a broker, as the owner of the schema. It needs relays of its own.

    TOWPATH_RELAY__BROKER_NUMBER=1 TOWPATH_BROKER_URL=amqp://… towpath relay run
    """
    wanted, who, why = check_destination(name), actor_name(actor), text(reason, "--reason")

    async def act() -> int:
        async with connected() as session, session.connection.transaction():
            number = await add_broker(session.connection, wanted, session.schema)
            await DeadLetters(session.schema).begin_audit(
                session.connection,
                actor=who,
                action="broker.add",
                reason=why,
                criteria=dumps({"name": wanted, "number": number}),
                counts=dumps({"done": 1}),
            )
            return number

    number = run_async(act())
    if json:
        as_json({"name": wanted, "number": number})
    else:
        print(f"{wanted}: number {number}; start its relays with TOWPATH_RELAY__BROKER_NUMBER={number}")


def _number() -> int:
    """Which broker the settings are about."""
    return settings.load().relay.broker_number


@asynccontextmanager
async def admin_of_settings() -> AsyncIterator[BrokerAdmin]:
    """The admin of the broker of the settings, for one command."""
    admin = broker_of(settings.load()).admin()
    try:
        async with asyncio.timeout(_BROKER_SECONDS):
            yield admin
    except TimeoutError as error:
        raise BrokerUnavailable(f"the broker did not answer within {_BROKER_SECONDS} seconds") from error
    finally:
        await admin.aclose()


async def _unused_partitions(admin: BrokerAdmin, addresses: Sequence[str]) -> list[str]:
    """One line for each topic whose keys are placed by fewer or more partitions than there are."""
    try:
        async with connected() as session:
            kept = await ProvenanceStore(session.schema).kept_partitions(
                session.connection, _number(), list(addresses)
            )
    except (SettingsError, SchemaMismatch, StoreUnavailable) as error:
        return [f"partitions were not compared with those that keys are placed by: {error}"]
    lines = []
    for address, count in sorted(kept.items()):
        try:
            found = len(await admin.bounds(address))
        except TopologyError:
            continue  # `check` told
        if found and found != count:
            lines.append(
                f"{address} has {found} partitions, keys are placed by {count} to keep their order: "
                "towpath broker rollover"
            )
    return lines


async def _topology(
    apps: Sequence[str] | None, addresses: Sequence[str] | None
) -> tuple[list[str], list[GroupTopology], dict[str, timedelta]]:
    """Addresses, groups, and how long each group keeps finished rows.

    A group's destinations are looked up, since they may have other addresses.
    """
    if not apps and not addresses:
        raise UsageError("say what is needed: --app billing.consumer:app or --address orders")
    groups = []
    rows_kept_for: dict[str, timedelta] = {}
    if apps:
        from towpath.consumer.service import load_app  # noqa: PLC0415  the engine is heavy

        loaded = [load_app(text(path, "--app")) for path in apps]
        async with connected() as session:
            for group in loaded:
                mapped = await addresses_of(session.connection, group.destinations, session.schema)
                rows_kept_for[group.name] = parse_duration(group.retention)
                groups.append(GroupTopology(group.name, tuple(sorted(mapped.values()))))
    own = {CANARY} if settings.load().relay.canaries else set()
    own |= {text(address, "--address", 200) for address in addresses or ()}
    return sorted(own.union(*(group.addresses for group in groups))), groups, rows_kept_for
