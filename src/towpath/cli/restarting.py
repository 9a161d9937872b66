"""`towpath tasks retry` and `towpath tasks rerun`: tasks go back to work by a person's word."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final, TypeAlias
from uuid import UUID

import typer

from towpath import repairs
from towpath.bulk import Counts
from towpath.cli import acting
from towpath.cli.option_groups import Consent, OptionGroup, Pace, grouped
from towpath.cli.options import Groups, Keys, Types, instant, message_id, texts
from towpath.cli.session import Session, connected, run_async
from towpath.errors import UsageError
from towpath.repairs import RepairPlan, TaskFilter, make_plan
from towpath.repairs.plan import RERUNNABLE, Action
from towpath.states import TaskState
from towpath.store.repairs import Repairs

MessageIds: TypeAlias = Annotated[list[str] | None, typer.Argument(help="Message ids.", show_default=False)]
Owners: TypeAlias = Annotated[list[str] | None, typer.Option("--owner", help="Owner; repeatable.")]
Reasons: TypeAlias = Annotated[
    list[str] | None, typer.Option("--reason-code", help="Reason code of the last failure; repeatable.")
]
Since: TypeAlias = Annotated[
    str | None, typer.Option(help="Last change at or after: 2026-01-31T09:00Z, or 2h for two hours ago.")
]
Until: TypeAlias = Annotated[str | None, typer.Option(help="Last change before; written like --since.")]
All = Annotated[bool, typer.Option("--all", help="All of them: needed when there is no filter.")]

_ELSEWHERE: Final[Mapping[TaskState, str]] = {
    TaskState.ACCEPTED: "its message is on the way: towpath tasks stuck",
    TaskState.RUNNING: "it runs: towpath tasks cancel stops it",
    TaskState.WAITING: "it has not ended: towpath tasks retry starts it now",
    TaskState.PARKED: "it waits behind another of its key: towpath tasks stuck",
    TaskState.UNKNOWN: "nobody knows what became of its effect: towpath tasks resolve",
    TaskState.DEAD: "its way back is towpath dlq replay",
    TaskState.SUCCEEDED: "it has ended: towpath tasks rerun runs it again",
    TaskState.FAILED: "it has ended: towpath tasks rerun runs it again",
    TaskState.CANCELLED: "that is its end: submit a new task",
    TaskState.EXPIRED: "that is its end: submit a new task",
}


Read: TypeAlias = Callable[[datetime], TaskFilter]
"""What is meant, by the time of the database."""


@dataclass(frozen=True, slots=True)
class Which(OptionGroup):
    """Which tasks are meant, beside ids and groups."""

    type: Types = None
    key: Keys = None
    owner: Owners = None
    reason_code: Reasons = None
    since: Since = None
    until: Until = None

    def read(self, ids: Sequence[str] | None, groups: Sequence[str] | None) -> Read:
        """Checked before anything is asked, but for the times. Raises UsageError."""
        wanted = TaskFilter(
            groups=texts(groups, "--group"),
            types=texts(self.type, "--type"),
            keys=texts(self.key, "--key"),
            owners=texts(self.owner, "--owner"),
            reasons=texts(self.reason_code, "--reason-code"),
            message_ids=tuple(message_id(value) for value in ids or ()),
        )
        return lambda now: replace(
            wanted,
            since=instant(self.since, "--since", now),
            until=instant(self.until, "--until", now),
        )


@grouped
def retry(
    ids: MessageIds = None,
    group: Groups = None,
    *,
    which: Which,
    every: All = False,
    pace: Pace,
    consent: Consent,
) -> None:
    """Start now what waits for a later time; attempts stay as they are. Interrupted, run it again.

    A delayed task is meant only by its id. Order per key is kept: only the first of a key waits for a time.

    towpath tasks retry --group billing --reason-code http_503 --reason "warehouse is back"
    """
    request = acting.Request("retry", pace, consent)
    _act(request, "retry", which.read(ids, group), every=every, states=RERUNNABLE, repeat_effects=False)


@grouped
def rerun(
    group: Annotated[list[str], typer.Option("--group", "-g", help="Consumer group; repeatable.")],
    ids: MessageIds = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="How it ended: succeeded or failed; repeatable.")
    ] = None,
    *,
    which: Which,
    repeat_effects: Annotated[
        bool, typer.Option("--repeat-effects", help="Also tasks whose at-most-once effect may have happened.")
    ] = False,
    every: All = False,
    pace: Pace,
    consent: Consent,
) -> None:
    """Run finished tasks again, on purpose: their effects happen again, under new keys.

    Those that SUCCEEDED or FAILED begin a new run, due now; their idempotency key becomes
    message_id:run_no. Order per key is kept among them. Interrupted, run it again.

    towpath tasks rerun --group billing --type invoice.created --since 2h --reason "wrong VAT" --dry-run
    """
    names = [name.upper() for name in state or RERUNNABLE]
    for name in names:
        if name not in RERUNNABLE:
            raise UsageError(
                f"--state is succeeded or failed, not {name.lower()[:40]!r}: no other runs again"
            )
    states = tuple(TaskState(name) for name in names)
    request = acting.Request("rerun", pace, consent)
    _act(request, "rerun", which.read(ids, group), every=every, states=states, repeat_effects=repeat_effects)


def _act(
    request: acting.Request,
    action: Action,
    wanted_at: Read,
    *,
    every: bool,
    states: Sequence[TaskState],
    repeat_effects: bool,
) -> None:
    async def plan(session: Session, now: datetime) -> RepairPlan:
        wanted = wanted_at(now)
        if not (wanted.is_narrow or every or (action == "retry" and wanted.groups)):
            raise UsageError("no filter was given: add one, or --all")
        return await make_plan(
            session.connection, action, wanted, schema=session.schema, limit=request.pace.maximum,
            states=states, repeat_effects=repeat_effects,
        )  # fmt: skip

    async def carry_out(
        session: Session, plan: RepairPlan, actor: str, reason: str, advance: acting.Progress | None
    ) -> tuple[int, Counts]:
        return await repairs.carry_out(
            session.connection, plan, actor=actor, reason=reason, schema=session.schema,
            rate=request.pace.rate, on_progress=advance,
        )  # fmt: skip

    async def run() -> None:
        plan_made = await acting.act(request, kind)
        if not request.consent.json and not plan_made.count:
            await _explain(plan_made.criteria, action)

    kind = acting.Act(
        done="made due" if action == "retry" else "started again",
        columns=("consumer_group", "type", "waiting_for" if action == "retry" else "state", "reason_code"),
        make_plan=plan,
        carry_out=carry_out,
        left_out=_left_out,
    )
    run_async(run())


def _left_out(plan: RepairPlan) -> Mapping[str, tuple[int, str]]:
    if plan.action == "retry":
        return {}
    return {
        "with_effects": (
            plan.with_effects_count,
            "whose at-most-once effect may have happened (--repeat-effects)",
        ),
        "bodiless": (plan.bodiless_count, "whose body is gone: neither their row nor the outbox holds it"),
    }


async def _explain(wanted: TaskFilter, action: Action) -> None:
    """Say of each message that was named why it is not meant."""
    if not wanted.message_ids:
        return
    async with connected() as session:
        rows = await Repairs(session.schema).states_of(
            session.connection, wanted.message_ids, wanted.groups or None
        )
    known: set[UUID] = set()
    for row in rows:
        known.add(row["id"])
        state = TaskState(row["state"])
        if action == "retry" and state is TaskState.WAITING:
            why = "it is due already" if row["is_due"] else "it changed since"
        elif action == "rerun" and state in RERUNNABLE:
            why = "left out, see above"
        else:
            why = _ELSEWHERE[state]
        print(f"{row['consumer_group']} {row['id']} is {state}: {why}")
    for id_ in wanted.message_ids:
        if id_ not in known:
            print(f"{id_}: no group has such a task")
