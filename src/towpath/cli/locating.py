"""`towpath outbox show`: where one message is, between its commit and the broker, and what came of it."""

from contextlib import suppress
from typing import Annotated, Any, Final
from uuid import UUID

import typer

from towpath.cli import options
from towpath.cli.exits import FAILED, Stop
from towpath.cli.options import Json
from towpath.cli.output import as_json, details, table
from towpath.cli.rows import with_readable_body
from towpath.cli.session import Session, connected, run_async
from towpath.errors import DecodeError
from towpath.messages.headers import TRACEPARENT, load_headers
from towpath.store.pauses import EVERYTHING, PauseStore
from towpath.store.statements import load
from towpath.telemetry.tracing import trace_id_of

_TASKS: Final = ("consumer_group", "state", "attempt", "waiting_for", "due_at", "reason_code", "updated_at")
_LETTERS: Final = ("id", "consumer_group", "stage", "state", "reason_code", "last_dead_at", "error_message")


def show(
    id: Annotated[str, typer.Argument(help="Message id, or outbox id (towpath-sequence).")],  # noqa: A002
    payload: Annotated[
        bool, typer.Option("--payload", help="Also the body and the values of headers, which may be private.")
    ] = False,
    json: Json = False,
) -> None:
    """Show where a message is (PENDING, SENT, PARKED, PAUSED, REFUSED, DELAYED) and what came of it.

    Rows that were sent go when their slot of the ring is cleared. Reads the whole ring.

    towpath outbox show 01977e8c-5b1e-7bbb-bbbb-000000000001
    """
    report = run_async(_report(options.reference(id), is_shown=payload))
    if not report["rows"] and not report["tasks"] and not report["dead_letters"]:
        raise Stop(FAILED, f"nothing is known of {id[:60]}: never written here, or sent and cleared since")
    if json:
        as_json(report)
        return
    for row in report["rows"]:
        details(row)
        print()
    if not report["rows"]:
        print("not in the outbox: sent and cleared since, or received from elsewhere\n")
    table(report["tasks"], _TASKS, empty="no group has a task of it")
    if report["dead_letters"]:
        table(report["dead_letters"], _LETTERS, empty="")


async def _report(wanted: int | UUID, *, is_shown: bool) -> dict[str, Any]:
    by_id = (wanted, None) if isinstance(wanted, UUID) else (None, wanted)
    async with connected() as session:
        places = await _places(session, *by_id)
        ids = {row["message_id"] for row in places} | ({wanted} if isinstance(wanted, UUID) else set())
        sql = load("operator", session.schema)
        tasks, letters = [], []
        for id_ in sorted(ids):
            tasks += await session.connection.fetch(sql["show_tasks"], id_, None)
            letters += await session.connection.fetch(sql["show_dead_letter"], None, id_)
    _judge(places, letters)
    return {
        "rows": [_readable(row, is_shown=is_shown) for row in places],
        "tasks": [{name: row[name] for name in _TASKS} for row in tasks],
        "dead_letters": [{name: row[name] for name in _LETTERS} for row in letters],
    }


async def _places(session: Session, message_id: UUID | None, outbox_id: int | None) -> list[dict[str, Any]]:
    """Every place a row of it is in."""
    connection, sql = session.connection, load("status", session.schema)
    parked = {
        row["id"]: dict(row) for row in await connection.fetch(sql["find_parked"], message_id, outbox_id)
    }
    paused = {row["name"] for row in await PauseStore(session.schema).open(connection, "publish")}
    found = await connection.fetch(sql["find_in_outbox"], message_id, outbox_id)
    rows = {row["id"]: dict(row) for row in found}
    for id_, row in parked.items():  # also one whose slot was cleared since
        rows[id_] = {"status": "PAUSED" if row.pop("policy") == "pause" else "PARKED"} | row
    delayed = [] if message_id is None else await connection.fetch(sql["find_delayed"], message_id)
    places = [rows[id_] for id_ in sorted(rows)] + [{"status": "DELAYED"} | dict(row) for row in delayed]
    for row in places:
        row["is_paused"] = bool(paused & {EVERYTHING, row["destination"]})
    return places


def _judge(places: list[dict[str, Any]], letters: list[Any]) -> None:
    """What progress has passed was sent, or refused by the broker."""
    refused = {row["position"]: row["state"] for row in letters if row["stage"] == "publish"}
    for row in places:
        if row["status"] == "SENT" and row["id"] in refused:
            row["status"] = f"REFUSED ({refused[row['id']]})"


def _readable(row: dict[str, Any], *, is_shown: bool) -> dict[str, Any]:
    names, trace = list[str](), None
    with suppress(DecodeError):
        headers = load_headers(row["headers"])
        names = [name for name, _ in headers]
        trace = next((value for name, value in headers if name == TRACEPARENT), None)
    row["trace_id"] = None if trace is None else trace_id_of(trace.decode("ascii", "replace"))
    row["header_names"] = ", ".join(names) or None
    return with_readable_body(row, is_shown=is_shown)
