"""Bulk actions on dead letters: plan, preview, question, execution with progress, result."""

import sys
from dataclasses import dataclass
from typing import Any

import typer

from towpath.cli.options import actor_name, criteria, text
from towpath.cli.output import as_json, progress, table
from towpath.cli.session import connected
from towpath.deadletters import Action, Counts, Plan, carry_out, make_plan
from towpath.errors import UsageError
from towpath.store.deadletters import DeadLetters
from towpath.telemetry.setup import setup

_DONE = {"replay": "replayed", "discard": "discarded"}


@dataclass(frozen=True, slots=True)
class Request:
    """How the action was asked for."""

    action: Action
    dry_run: bool
    yes: bool
    reason: str
    actor: str | None
    json: bool
    maximum: int | None
    every: bool
    rate: float | None = None
    max_replays: int | None = None


async def act(request: Request, **given: Any) -> None:
    """Run one bulk action from its options to its printed result."""
    actor, reason = actor_name(request.actor), text(request.reason, "--reason")
    if not request.dry_run and not request.yes and not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on: add --yes, or --dry-run to see the plan")
    plan, schema = await _plan(request, given)
    if not request.json:
        _preview(plan, request.action)
    if request.dry_run or not plan.count:
        _report(request, plan, None, None)
        return
    if not request.yes:
        typer.confirm(f"{request.action} {plan.count}?", abort=True, err=True)
    telemetry = setup("towpath-cli")
    try:
        async with connected(is_pinned=True) as session:
            with progress(plan.count, _moved) as advance:
                audit_id, counts = await carry_out(
                    session.connection,
                    plan,
                    request.action,
                    actor=actor,
                    reason=reason,
                    schema=schema,
                    rate=request.rate,
                    on_progress=advance,
                )
    finally:
        telemetry.shutdown()
    _report(request, plan, audit_id, counts)


async def _plan(request: Request, given: dict[str, Any]) -> tuple[Plan, str]:
    async with connected() as session:
        wanted = criteria(await DeadLetters(session.schema).clock(session.connection), **given)
        if wanted.is_empty and not request.every:
            raise UsageError("no filter was given: add one, or --all for every open dead letter")
        plan = await make_plan(
            session.connection,
            wanted,
            schema=session.schema,
            limit=request.maximum,
            max_replays=request.max_replays,
        )
        return plan, session.schema


def _causes(plan: Plan) -> list[dict[str, object]]:
    return [
        {"consumer_group": group, "stage": stage, "type": type_, "reason_code": reason, "count": count}
        for (group, stage, type_, reason), count in plan.causes.most_common()
    ]


def _preview(plan: Plan, action: Action) -> None:
    if plan.count:
        print(f"to {action}: {plan.count}, for example {', '.join(map(str, plan.sample()))}")
        table(_causes(plan), ("consumer_group", "stage", "type", "reason_code", "count"), empty="")
    if plan.capped_count:
        print(f"left out: {plan.capped_count} replayed {plan.max_replays} times already (--max-repeats)")
    if plan.beyond_limit_count:
        print(f"left out: {plan.beyond_limit_count} beyond --max {plan.limit}")


def _report(request: Request, plan: Plan, audit_id: int | None, counts: Counts | None) -> None:
    if request.json:
        as_json(
            {
                "action": request.action,
                "dry_run": request.dry_run,
                "made_at": plan.made_at,
                "planned": plan.count,
                "done": counts.done if counts else 0,
                "parked": counts.parked if counts else 0,
                "skipped": counts.skipped if counts else 0,
                "capped": plan.capped_count,
                "beyond_limit": plan.beyond_limit_count,
                "audit_id": audit_id,
                "causes": _causes(plan),
                "sample_ids": plan.sample(),
            }
        )
    elif counts is not None:
        parked = f", {counts.parked} of them behind an earlier message of their key" if counts.parked else ""
        skipped = f"; {counts.skipped} were no longer open" if counts.skipped else ""
        print(f"{_DONE[request.action]} {counts.done}{parked}{skipped} (audit {audit_id})")
    elif not plan.count:
        print("nothing to do")
    else:
        print("dry run: nothing was changed")


def _moved(counts: Counts) -> int:
    return counts.done + counts.skipped
