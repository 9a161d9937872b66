"""`towpath tasks`: what the consumer groups did and still have to do."""

from json import dumps
from typing import Annotated, Any, TypeAlias
from uuid import UUID

import typer

from towpath.cli import options, restarting
from towpath.cli.exits import FAILED, Stop
from towpath.cli.options import Actor, Because, Groups, Json, Keys, Limit, Types, actor_name, texts
from towpath.cli.output import as_json, details, table
from towpath.cli.rows import timeline, with_trace_id
from towpath.cli.session import Session, connected, run_async
from towpath.cli.stuck import stuck
from towpath.errors import UsageError
from towpath.states import TaskState
from towpath.store.audit import AuditStore
from towpath.store.doubts import Resolutions
from towpath.store.lineage import Lineage
from towpath.store.statements import in_schema, load

app = typer.Typer(name="tasks", help="What consumer groups did and still have to do.", no_args_is_help=True)

app.command()(restarting.retry)
app.command()(restarting.rerun)
app.command()(stuck)

_COLUMNS = (
    "id",
    "consumer_group",
    "type",
    "key",
    "state",
    "waiting_for",
    "attempt",
    "reason_code",
    "updated_at",
)
_DROPPABLE = ("attempt", "updated_at", "waiting_for", "type", "key", "reason_code")
"""On narrow terminals, the least telling first."""
_TIMELINE = ("at", "event", "state", "attempt", "due_at", "reason_code", "error_message", "actor")


_OUTCOMES = {
    "succeeded": TaskState.SUCCEEDED,
    "failed": TaskState.FAILED,
    "retry": TaskState.WAITING,
    "dead": TaskState.DEAD,
}
OneGroup: TypeAlias = Annotated[str, typer.Option("--group", "-g", help="Its consumer group.")]


@app.command(name="list")
def list_(
    group: Groups = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="State, such as WAITING; repeatable.")
    ] = None,
    type: Types = None,  # noqa: A002  the option's name
    key: Keys = None,
    owner: Annotated[list[str] | None, typer.Option(help="Owner; repeatable.")] = None,
    before: Annotated[str | None, typer.Option(help="Only older than this id: the next page.")] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """List tasks, the newest first.

    towpath tasks list --group billing --state WAITING
    """
    parameters = (
        list(texts(group, "--group")) or None,
        _states(state),
        list(texts(type, "--type")) or None,
        list(texts(key, "--key")) or None,
        list(texts(owner, "--owner")) or None,
        options.message_id(before) if before is not None else None,
        limit,
    )

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            sql = load("operator", session.schema)["list_tasks"]
            return [with_trace_id(dict(row)) for row in await session.connection.fetch(sql, *parameters)]

    rows = run_async(read())
    if json:
        as_json(rows)
    else:
        table(rows, _COLUMNS, empty="no tasks", droppable=_DROPPABLE)


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="Message id.")],  # noqa: A002  the argument's name
    group: Annotated[str | None, typer.Option("--group", "-g", help="Only in this group.")] = None,
    json: Json = False,
) -> None:
    """Show one task in every group: its row, what happened when, what it came of and what came of it.

    towpath tasks show 01977e8c-5b1e-7bbb-bbbb-000000000001
    """
    wanted = options.message_id(id)
    only = None if group is None else options.text(group, "--group")

    async def read() -> list[dict[str, Any]]:
        async with connected() as session:
            return await _tasks(session, wanted, only)

    rows = run_async(read())
    if not rows:
        raise Stop(FAILED, f"no group has a task {wanted}")
    if json:
        as_json(rows)
        return
    for position, row in enumerate(rows):
        if position:
            print()
        details(row, skip=("history", "timeline", "effects", "trace"))
        print()
        table(row["timeline"], _TIMELINE, empty="", droppable=("due_at", "actor"), cut="error_message")
        if row["effects"]:
            print()
            table(row["effects"], ("relation", "id", "type", "to", "at"), empty="")


@app.command()
def cancel(
    id: Annotated[str, typer.Argument(help="Message id.")],  # noqa: A002  the argument's name
    group: OneGroup,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Cancel one task: at once where it waits, within a heartbeat where it runs.

    towpath tasks cancel 01977e8c-5b1e-7bbb-bbbb-000000000001 --group billing --reason "order was withdrawn"
    """
    wanted, only, who = options.message_id(id), options.text(group, "--group"), actor_name(actor)

    async def act() -> str | None:
        async with connected() as session, session.connection.transaction():
            statement = in_schema("select towpath.cancel_task($1, $2, $3)", session.schema)
            state: str | None = await session.connection.fetchval(statement, only, wanted, who)
            if state is not None:
                await _record(session, who, "cancel", reason, only, wanted, state)
            return state

    state = run_async(act())
    if state is None:
        raise Stop(FAILED, f"group {only} has no task {wanted}")
    if json:
        as_json({"id": str(wanted), "consumer_group": only, "state": state})
    elif state == TaskState.CANCELLED:
        print(f"cancelled {wanted}")
    elif state == TaskState.RUNNING:
        print(f"{wanted} runs: its handler is told with the worker's next heartbeat")
    else:
        raise Stop(FAILED, f"{wanted} is {state} already")


@app.command()
def resolve(
    id: Annotated[str, typer.Argument(help="Message id.")],  # noqa: A002  the argument's name
    group: OneGroup,
    outcome: Annotated[str, typer.Option("--as", help=f"What became of it: {', '.join(_OUTCOMES)}.")],
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Say what became of a task in doubt (UNKNOWN): it happened, it did not, or it is hopeless.

    towpath tasks resolve 01977e8c-5b1e-7bbb-bbbb-000000000001 --group billing --as succeeded
    """
    wanted, only, who = options.message_id(id), options.text(group, "--group"), actor_name(actor)
    if outcome not in _OUTCOMES:
        raise UsageError(f"--as is one of {', '.join(_OUTCOMES)}, not {outcome[:40]!r}")

    async def act() -> None:
        async with connected(is_pinned=True) as session, session.connection.transaction():
            resolutions = Resolutions(session.schema, only)
            doubt = await resolutions.find(session.connection, wanted)
            if doubt is None or not await resolutions.resolve(
                session.connection, doubt.work, _OUTCOMES[outcome], reason_code="operator", actor=who
            ):
                raise Stop(FAILED, f"group {only} has no task {wanted} in doubt")
            await _record(session, who, "resolve", reason, only, wanted, _OUTCOMES[outcome].value)

    run_async(act())
    if json:
        as_json({"id": str(wanted), "consumer_group": only, "outcome": outcome})
    else:
        print(f"resolved {wanted} as {outcome}")


async def _record(
    session: Session, actor: str, action: str, reason: str, group: str, task_id: UUID, state: str
) -> None:
    """Who did what to which task, and why."""
    await AuditStore(session.schema).begin(
        session.connection,
        actor=actor,
        action=f"tasks.{action}",
        reason=options.text(reason, "--reason") if reason else "",
        criteria=dumps({"group": group, "id": str(task_id)}),
        counts=dumps({state.lower(): 1}),
    )


async def _tasks(session: Session, message_id: UUID, group: str | None) -> list[dict[str, Any]]:
    sql = load("operator", session.schema)
    rows = []
    for row in await session.connection.fetch(sql["show_tasks"], message_id, group):
        history = await session.connection.fetch(sql["task_history"], row["consumer_group"], message_id)
        task = with_trace_id(dict(row))
        lineage = Lineage(session.schema)
        task["caused_by"] = await lineage.cause(session.connection, task)
        del task["headers"]
        task["history"] = [with_trace_id(dict(line)) for line in history]
        task["timeline"] = timeline(task)
        task["effects"] = await lineage.effects(session.connection, task)
        rows.append(task)
    return rows


def _states(given: list[str] | None) -> list[str] | None:
    names = [name.upper() for name in given or ()]
    for name in names:
        if name not in TaskState.__members__:
            raise UsageError(f"there is no state {name[:40]!r}, only {', '.join(TaskState)}")
    return names or None
