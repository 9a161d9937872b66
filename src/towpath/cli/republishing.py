"""`towpath outbox republish`: plan, preview, question, execution with progress, result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from towpath.cli.option_groups import Consent, Pace
from towpath.cli.options import instant, message_id, texts
from towpath.cli.output import as_json, cell, progress, table
from towpath.cli.session import connected, run_async
from towpath.errors import UsageError
from towpath.outbox import republish
from towpath.outbox.republish import Plan, Wanted
from towpath.store.republish import Republishing

_FIELDS = ("key", "type", "id")


@dataclass(frozen=True, slots=True)
class Request:
    """How it was asked for."""

    since: str
    until: str | None
    destinations: Sequence[str]
    where: Sequence[str]
    pace: Pace
    consent: Consent


def act(request: Request) -> None:
    """Run it from its options to its printed result."""
    run_async(_act(request))


async def _act(request: Request) -> None:
    consent = request.consent
    actor, reason = consent.author()
    async with connected(is_pinned=True) as session:
        now = await Republishing(session.schema).clock(session.connection)
        plan = await republish.make_plan(
            session.connection, _wanted(request, now), schema=session.schema, limit=request.pace.maximum
        )
    if not consent.json:
        _preview(plan)
    if consent.dry_run or not plan.count:
        _report(request, plan, None, None)
        return
    consent.ask(f"send {plan.count} again?")
    async with connected(is_pinned=True) as session:

        def handled(now: republish.Progress) -> int:
            return now.done + now.gone - plan.before.done - plan.before.gone

        with progress(plan.count, handled) as advance:
            audit_id, done = await republish.carry_out(
                session.connection,
                plan,
                actor=actor,
                reason=reason,
                schema=session.schema,
                rate=request.pace.rate,
                on_progress=advance,
            )
    _report(request, plan, audit_id, done)


def _wanted(request: Request, now: Any) -> Wanted:
    """Which messages the options mean. Raises UsageError."""
    given: dict[str, list[str]] = {name: [] for name in _FIELDS}
    for condition in texts(request.where, "--where"):
        name, equals, value = condition.partition("=")
        if not equals or name not in given:
            raise UsageError(f"--where is key=…, type=… or id=…, not {condition[:40]!r}")
        given[name].append(value)
    ids: list[UUID] = [message_id(value) for value in given["id"]]
    since = instant(request.since, "--since", now)
    if since is None:
        raise UsageError("--since is needed")
    return Wanted(
        since=since,
        until=instant(request.until, "--until", now),
        destinations=texts(request.destinations, "--destination"),
        types=tuple(given["type"]),
        keys=tuple(given["key"]),
        message_ids=tuple(ids),
    )


def _counts(plan: Plan) -> list[dict[str, object]]:
    return [
        {"destination": destination, "type": type_, "count": count}
        for (destination, type_), count in plan.counts.most_common()
    ]


def _preview(plan: Plan) -> None:
    if plan.audit_id is not None:
        print(f"going on with audit {plan.audit_id}: {plan.before.done} were sent again already")
    if plan.count:
        print(
            f"to send again: {plan.count}, for example {', '.join(map(str, plan.sample_ids))}, written from "
            f"{cell(plan.oldest)} to {cell(plan.newest)} (--since {plan.wanted.since.isoformat()})"
        )
        table(_counts(plan), ("destination", "type", "count"), empty="")
    if plan.beyond_limit_count:
        print(f"left out: {plan.beyond_limit_count} beyond --max {plan.limit}")


def _report(request: Request, plan: Plan, audit_id: int | None, done: republish.Progress | None) -> None:
    if request.consent.json:
        as_json(
            {
                "dry_run": request.consent.dry_run,
                "since": plan.wanted.since,
                "until": plan.until,
                "continued_audit_id": plan.audit_id,
                "planned": plan.count,
                "beyond_limit": plan.beyond_limit_count,
                "done": done.done - plan.before.done if done else 0,
                "gone": done.gone - plan.before.gone if done else 0,
                "is_complete": done.is_complete if done else False,
                "audit_id": audit_id,
                "counts": _counts(plan),
                "sample_ids": plan.sample_ids,
            }
        )
    elif done is not None:
        gone = f"; {done.gone} were cleared from the outbox meanwhile" if done.gone else ""
        more = "" if done.is_complete else "; the same command goes on after them"
        print(f"sent {done.done - plan.before.done} again{gone}{more} (audit {audit_id})")
    elif not plan.count:
        print("nothing to do")
    else:
        print("dry run: nothing was changed")
