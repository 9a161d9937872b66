"""`towpath destination`: where destinations live, and what waits for a message that cannot be published."""

from json import dumps
from typing import Annotated, Any, TypeAlias, get_args

import typer

from towpath.cli.exits import FAILED, Stop
from towpath.cli.options import Actor, Because, Json, actor_name, text
from towpath.cli.output import as_json, table
from towpath.cli.session import Session, connected, run_async
from towpath.errors import UsageError
from towpath.messages.limits import check_destination
from towpath.store.audit import AuditStore
from towpath.store.destinations import all_destinations, forget_destination, set_destination
from towpath.store.outbox import OnPoison

app = typer.Typer(
    name="destination", help="Where destinations live, and their policy for poison.", no_args_is_help=True
)

_COLUMNS = ("name", "broker", "address", "on_poison", "gates", "parked", "paused_at")
_POLICIES = get_args(OnPoison)
Name: TypeAlias = Annotated[str, typer.Argument(help="The name that producers write.")]


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List destinations with a row of their own; the others are their own address with the policy park.

    towpath destination list
    """

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            return [dict(row) for row in await all_destinations(session.connection, session.schema)]

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, _COLUMNS, empty="no destination has a row: each is its own address, with the policy park")


@app.command(name="set")
def set_(
    name: Name,
    address: Annotated[
        str | None, typer.Option(help="Topic or exchange; a new row has the name itself.")
    ] = None,
    on_poison: Annotated[
        str | None,
        typer.Option(
            "--on-poison",
            help=f"What waits for a refused message: {', '.join(_POLICIES)} (nothing, its key, its shard).",
        ),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="Name of a broker of towpath broker list; a new row has the first.")
    ] = None,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Say where a destination lives or what its policy is; what is not given stays. In force in seconds.

    towpath destination set orders --on-poison park_key --reason "must not overtake"
    """
    wanted, new_address = check_destination(name), None if address is None else check_destination(address)
    if on_poison is not None and on_poison not in _POLICIES:
        raise UsageError(f"--on-poison is one of {', '.join(_POLICIES)}, not {on_poison[:40]!r}")
    if new_address is None and on_poison is None and broker is None:
        raise UsageError("say what to set: --address, --on-poison or --broker")
    who, why = actor_name(actor), text(reason, "--reason")

    async def act() -> dict[str, Any]:
        async with connected() as session, session.connection.transaction():
            row = dict(
                await set_destination(
                    session.connection, wanted, new_address, on_poison, broker, session.schema
                )
            )
            await _record(session, who, "set", why, row)
            return row

    row = run_async(act())
    if json:
        as_json(row)
    else:
        print(f"{row['name']}: broker {row['broker']}, address {row['address']}, policy {row['on_poison']}")


@app.command()
def unset(name: Name, reason: Because = "", actor: Actor = None, json: Json = False) -> None:
    """Delete a destination's row: it is its own address again, with the policy park.

    towpath destination unset orders --reason "as the others"
    """
    wanted, who, why = check_destination(name), actor_name(actor), text(reason, "--reason")

    async def act() -> bool:
        async with connected() as session, session.connection.transaction():
            is_done = await forget_destination(session.connection, wanted, session.schema)
            if is_done:
                await _record(session, who, "unset", why, {"name": wanted})
            return is_done

    if not run_async(act()):
        raise Stop(FAILED, f"the destination {wanted} has no row")
    if json:
        as_json({"name": wanted})
    else:
        print(f"{wanted}: address {wanted}, policy park")


async def _record(session: Session, actor: str, action: str, reason: str, row: dict[str, Any]) -> None:
    """Who changed what, and why."""
    await AuditStore(session.schema).begin(
        session.connection,
        actor=actor,
        action=f"destination.{action}",
        reason=reason,
        criteria=dumps(row),
        counts=dumps({"done": 1}),
    )
