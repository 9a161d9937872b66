"""`towpath dlq`: dead letters, their causes, and the way back."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import typer

from towpath import deadletters
from towpath.bulk import Counts
from towpath.cli import acting
from towpath.cli.editing import edit
from towpath.cli.exits import FAILED, Stop
from towpath.cli.option_groups import Consent, DeadLetters, Pace, grouped
from towpath.cli.options import (
    Groups,
    Json,
    Limit,
    Reasons,
    Since,
    Stages,
    States,
    Types,
    Until,
    dead_letter_states,
    reference,
)
from towpath.cli.output import as_json, details, json_list, table
from towpath.cli.rows import with_readable_body, with_trace_id
from towpath.cli.session import Session, connected, run_async
from towpath.cli.transfer import export, import_
from towpath.deadletters import Action, Catalog, Plan, make_plan
from towpath.errors import UsageError
from towpath.store.revisions import Revisions

app = typer.Typer(name="dlq", help="Dead letters, their causes, and the way back.", no_args_is_help=True)

app.command()(edit)
app.command()(export)
app.command(name="import")(import_)

_PAGE = 2_000
"""Rows in memory, whatever the limit is."""
_CAUSES = (
    "consumer_group",
    "stage",
    "type",
    "reason_code",
    "fingerprint",
    "count",
    "keys",
    "first_dead_at",
    "last_dead_at",
    "error_message",
)
_COLUMNS = (
    "id",
    "consumer_group",
    "stage",
    "type",
    "key",
    "reason_code",
    "attempts",
    "death_count",
    "replay_count",
    "last_dead_at",
    "error_message",
)

All = Annotated[bool, typer.Option("--all", help="Every open dead letter: needed when there is no filter.")]
_CAUSES_DROPPABLE = ("first_dead_at", "keys", "stage", "last_dead_at", "type", "consumer_group")
_DROPPABLE = (
    "replay_count",
    "death_count",
    "attempts",
    "stage",
    "last_dead_at",
    "type",
    "key",
    "consumer_group",
)
"""On narrow terminals, the least telling first."""


@app.command()
def summary(
    group: Groups = None,
    type: Types = None,  # noqa: A002  the option's name
    reason_code: Reasons = None,
    stage: Stages = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 100,
    json: Json = False,
) -> None:
    """Causes of the open dead letters with counts, the most frequent first. Start here.

    towpath dlq summary --since 24h
    """
    wanted = DeadLetters(
        group=group, type=type, reason_code=reason_code, stage=stage, since=since, until=until
    )

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            meant = wanted.at(await session.clock())
            return list(
                map(dict, await Catalog(session.connection, session.schema).causes(meant, limit=limit))
            )

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, _CAUSES, empty="no open dead letters", droppable=_CAUSES_DROPPABLE, cut="error_message")


@app.command(name="list")
@grouped
def list_(
    wanted: DeadLetters,
    state: States = None,
    before: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="Only below this id: the next page.")
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters, the newest first, without their payloads.

    towpath dlq list --group billing --since 2h
    """
    states = dead_letter_states(state)

    async def read(tell: Callable[[list[dict[str, Any]]], None]) -> None:
        async with connected() as session:
            meant = wanted.at(await session.clock())
            catalog, left, below = Catalog(session.connection, session.schema), limit, before
            while left:
                page = await catalog.page(meant, states=states, below_id=below, limit=min(left, _PAGE))
                tell([with_trace_id(dict(row)) for row in page])
                if len(page) < _PAGE:
                    break
                left, below = left - len(page), page[-1]["id"]

    if json:
        with json_list() as write:
            run_async(read(write))
    else:
        rows: list[dict[str, Any]] = []
        run_async(read(rows.extend))
        table(rows, _COLUMNS, empty="no dead letters", droppable=_DROPPABLE, cut="error_message")


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="Catalog id or message id.")],  # noqa: A002  the argument's name
    payload: Annotated[bool, typer.Option("--payload", help="Also the body and the headers.")] = False,
    json: Json = False,
) -> None:
    """Show one dead letter whole.

    towpath dlq show 3 --payload
    """
    wanted = reference(id)

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            rows = await Catalog(session.connection, session.schema).one(wanted)
            ids = [row["id"] for row in rows]
            revisions = await Revisions(session.schema).of(session.connection, ids, with_bodies=True)
            return [
                with_readable_body(with_trace_id(dict(row)), is_shown=payload)
                | {
                    "revisions": [
                        with_readable_body(dict(one), is_shown=payload)
                        for one in revisions
                        if one["dead_letter"] == row["id"]
                    ]
                }
                for row in rows
            ]

    rows = run_async(read())
    if not rows:
        raise Stop(FAILED, f"there is no dead letter {wanted}")
    if json:
        as_json(rows)
        return
    for position, row in enumerate(rows):
        if position:
            print()
        details(row, skip=("trace", "revisions"))
        for revision in row["revisions"]:
            print()
            details(revision, skip=("dead_letter",))


@app.command()
@grouped
def replay(
    wanted: DeadLetters,
    every: All = False,
    *,
    pace: Pace,
    max_repeats: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Leave out what was replayed so often already; 0: no cap."),
    ] = 3,
    consent: Consent,
) -> None:
    """Send dead letters back to work: shows a plan, asks, acts in batches. Interrupted, run it again.

    towpath dlq replay --group billing --reason-code http_503 --since 2h --dry-run
    """
    request = acting.Request("replay", pace, consent)
    _act(request, "replay", wanted, every=every, max_replays=max_repeats or None)


@app.command()
@grouped
def discard(wanted: DeadLetters, every: All = False, *, pace: Pace, consent: Consent) -> None:
    """Close dead letters without running them; their rows stay, marked discarded.

    towpath dlq discard --group billing --reason-code http_404 --reason "test orders" --dry-run
    """
    request = acting.Request("discard", pace, consent)
    _act(request, "discard", wanted, every=every, max_replays=None)


def _act(
    request: acting.Request, action: Action, wanted: DeadLetters, *, every: bool, max_replays: int | None
) -> None:
    async def plan(session: Session, now: datetime) -> Plan:
        meant = wanted.at(now)
        if meant.is_empty and not every:
            raise UsageError("no filter was given: add one, or --all for every open dead letter")
        return await make_plan(
            session.connection, meant, schema=session.schema, limit=request.pace.maximum,
            max_replays=max_replays, action=action,
        )  # fmt: skip

    async def carry_out(
        session: Session, plan: Plan, actor: str, reason: str, advance: acting.Progress | None
    ) -> tuple[int, Counts]:
        return await deadletters.carry_out(
            session.connection, plan, action, actor=actor, reason=reason, schema=session.schema,
            rate=request.pace.rate, on_progress=advance,
        )  # fmt: skip

    kind = acting.Act(
        done="replayed" if action == "replay" else "discarded",
        columns=("consumer_group", "stage", "type", "reason_code"),
        make_plan=plan,
        carry_out=carry_out,
        left_out=lambda plan: {
            "capped": (plan.capped_count, f"replayed {plan.max_replays} times already (--max-repeats)")
        },
    )
    run_async(acting.act(request, kind))
