"""`towpath dlq`: dead letters, their causes, and the way back."""

from typing import Annotated, Any

import typer

from towpath.cli import acting
from towpath.cli.exits import FAILED, Stop
from towpath.cli.options import (
    Actor,
    Because,
    DryRun,
    Fingerprints,
    Groups,
    Ids,
    Json,
    Keys,
    Limit,
    Reasons,
    Since,
    Stages,
    Types,
    Until,
    Yes,
    criteria,
    reference,
)
from towpath.cli.output import as_json, details, table
from towpath.cli.rows import with_readable_body, with_trace_id
from towpath.cli.session import connected, run_async
from towpath.deadletters import Catalog
from towpath.deadletters.criteria import STATES
from towpath.errors import UsageError
from towpath.store.deadletters import DeadLetters

app = typer.Typer(name="dlq", help="Dead letters, their causes, and the way back.", no_args_is_help=True)

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
Most = Annotated[int | None, typer.Option("--max", min=1, max=2**31 - 1, help="Most dead letters acted on.")]
Rate = Annotated[float | None, typer.Option(min=0.01, max=1e6, help="Most per second.")]


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
    """Causes of the open dead letters with counts, the most frequent first. Start here."""

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            wanted = criteria(
                await DeadLetters(session.schema).clock(session.connection),
                groups=group, types=type, reasons=reason_code, stages=stage, since=since, until=until,
            )  # fmt: skip
            return list(
                map(dict, await Catalog(session.connection, session.schema).causes(wanted, limit=limit))
            )

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, _CAUSES, empty="no open dead letters")


@app.command(name="list")
def list_(
    group: Groups = None,
    type: Types = None,  # noqa: A002  the option's name
    reason_code: Reasons = None,
    fingerprint: Fingerprints = None,
    stage: Stages = None,
    key: Keys = None,
    id: Ids = None,  # noqa: A002  the option's name
    since: Since = None,
    until: Until = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", "-s", help=f"{', '.join(STATES)} or all; repeatable. Default: open."),
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="Only below this id: the next page.")
    ] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List dead letters, the newest first, without their payloads."""
    states = _states(state)

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            wanted = criteria(
                await DeadLetters(session.schema).clock(session.connection),
                groups=group, types=type, reasons=reason_code, fingerprints=fingerprint, stages=stage,
                keys=key, ids=id, since=since, until=until,
            )  # fmt: skip
            catalog = Catalog(session.connection, session.schema)
            page = await catalog.page(wanted, states=states, below_id=before, limit=limit)
            return [with_trace_id(dict(row)) for row in page]

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, _COLUMNS, empty="no dead letters")


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="Catalog id or message id.")],  # noqa: A002  the argument's name
    payload: Annotated[bool, typer.Option("--payload", help="Also the body and the headers.")] = False,
    json: Json = False,
) -> None:
    """Show one dead letter whole."""
    wanted = reference(id)

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            rows = await Catalog(session.connection, session.schema).one(wanted)
            return [with_readable_body(with_trace_id(dict(row)), is_shown=payload) for row in rows]

    rows = run_async(read())
    if not rows:
        raise Stop(FAILED, f"there is no dead letter {wanted}")
    if json:
        as_json(rows)
        return
    for position, row in enumerate(rows):
        if position:
            print()
        details(row, skip=("trace",))


@app.command()
def replay(
    group: Groups = None,
    type: Types = None,  # noqa: A002  the option's name
    reason_code: Reasons = None,
    fingerprint: Fingerprints = None,
    stage: Stages = None,
    key: Keys = None,
    id: Ids = None,  # noqa: A002  the option's name
    since: Since = None,
    until: Until = None,
    every: All = False,
    maximum: Most = None,
    rate: Rate = None,
    max_repeats: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Leave out what was replayed so often already; 0: no cap."),
    ] = 3,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Send dead letters back to work: shows a plan, asks, acts in batches. Interrupted, run it again.

    towpath dlq replay --group billing --reason-code http_503 --since 2h --dry-run
    """
    request = acting.Request(
        action="replay", dry_run=dry_run, yes=yes, reason=reason, actor=actor, json=json,
        maximum=maximum, rate=rate, max_replays=max_repeats or None, every=every,
    )  # fmt: skip
    run_async(
        acting.act(
            request,
            groups=group, types=type, reasons=reason_code, fingerprints=fingerprint, stages=stage,
            keys=key, ids=id, since=since, until=until,
        )
    )  # fmt: skip


@app.command()
def discard(
    group: Groups = None,
    type: Types = None,  # noqa: A002  the option's name
    reason_code: Reasons = None,
    fingerprint: Fingerprints = None,
    stage: Stages = None,
    key: Keys = None,
    id: Ids = None,  # noqa: A002  the option's name
    since: Since = None,
    until: Until = None,
    every: All = False,
    maximum: Most = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Close dead letters without running them; their rows stay, marked discarded."""
    request = acting.Request(
        action="discard", dry_run=dry_run, yes=yes, reason=reason, actor=actor, json=json,
        maximum=maximum, every=every,
    )  # fmt: skip
    run_async(
        acting.act(
            request,
            groups=group, types=type, reasons=reason_code, fingerprints=fingerprint, stages=stage,
            keys=key, ids=id, since=since, until=until,
        )
    )  # fmt: skip


def _states(given: list[str] | None) -> tuple[str, ...]:
    names = given or ["open"]
    for name in names:
        if name not in (*STATES, "all"):
            raise UsageError(f"there is no state {name[:40]!r}, only {', '.join(STATES)} and all")
    return () if "all" in names else tuple(names)
