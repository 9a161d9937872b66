"""`towpath broker`: topics, exchanges and queues."""

from json import dumps
from typing import Annotated, Any, TypeAlias

import typer

from towpath.cli.exits import SAYS_NO, Stop
from towpath.cli.options import Actor, Because, DryRun, Json, actor_name, text
from towpath.cli.output import as_json, clean, table
from towpath.cli.rollover import rollover
from towpath.cli.session import connected, run_async
from towpath.cli.topology import admin_of_settings, noted, other_queues, unused_partitions, wanted
from towpath.messages.limits import check_destination
from towpath.store.audit import AuditStore
from towpath.store.destinations import add_broker, all_brokers

app = typer.Typer(name="broker", help="Topics, exchanges and queues at the broker.", no_args_is_help=True)

app.command()(rollover)

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
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Create what is missing; what exists stays as it is.

    towpath broker apply --app billing.consumer:app --dry-run
    """

    async def run() -> list[str]:
        asked = await wanted(apps, addresses)
        async with noted(asked.apps), admin_of_settings() as admin:
            return await admin.apply(asked.addresses, asked.groups, partitions=partitions)

    async def look() -> list[str]:
        asked = await wanted(apps, addresses)
        async with admin_of_settings() as admin:
            return [*await other_queues(asked.apps), *await admin.check(asked.addresses, asked.groups)]

    lines = run_async(look() if dry_run else run())
    if json:
        as_json(
            {"dry_run": dry_run, "created": [] if dry_run else lines, "missing": lines if dry_run else []}
        )
    else:
        print("\n".join(map(clean, lines)) or "nothing was missing")
        if dry_run:
            print("dry run: nothing was changed")


@app.command()
def check(apps: Apps = None, addresses: Addresses = None, json: Json = False) -> None:
    """Say what is missing or declared otherwise; exit 3 if anything is. Warnings change nothing.

    towpath broker check --app billing.consumer:app
    """

    async def run() -> tuple[list[str], list[str]]:
        asked = await wanted(apps, addresses)
        problems = await other_queues(asked.apps)
        async with admin_of_settings() as admin:
            problems += await admin.check(asked.addresses, asked.groups)
            warnings = [*await asked.outlived(admin), *await unused_partitions(admin, asked.addresses)]
        return problems, warnings

    problems, warnings = run_async(run())
    if json:
        as_json({"ok": not problems, "problems": problems, "warnings": warnings})
    else:
        print("\n".join(map(clean, problems)) or "everything is there")
        if problems:
            print("towpath broker apply with the same options creates what does not exist")
        for warning in warnings:
            print(f"warning: {clean(warning)}")
    if problems:
        raise Stop(SAYS_NO)


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List the brokers that relays publish to, by number.

    towpath broker list --json
    """

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

    Such as: TOWPATH_RELAY__BROKER_NUMBER=1 TOWPATH_BROKER_URL=amqp://… towpath relay run

    towpath broker add events --reason "audit trail"
    """
    chosen, who, why = check_destination(name), actor_name(actor), text(reason, "--reason")

    async def act() -> int:
        async with connected() as session, session.connection.transaction():
            number = await add_broker(session.connection, chosen, session.schema)
            await AuditStore(session.schema).begin(
                session.connection,
                actor=who,
                action="broker.add",
                reason=why,
                criteria=dumps({"name": chosen, "number": number}),
                counts=dumps({"done": 1}),
            )
            return number

    number = run_async(act())
    if json:
        as_json({"name": chosen, "number": number})
    else:
        print(f"{chosen}: number {number}; start its relays with TOWPATH_RELAY__BROKER_NUMBER={number}")
