"""Bulk actions: plan, preview, question, execution with progress, result."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from towpath.bulk import Counts
from towpath.cli.option_groups import Consent, Pace
from towpath.cli.output import as_json, cell, progress, table
from towpath.cli.session import Session, connected
from towpath.telemetry.setup import setup


@dataclass(frozen=True, slots=True)
class Request:
    """How the action was asked for."""

    action: str
    pace: Pace
    consent: Consent


class Plan(Protocol):
    """What every plan of a bulk action can tell."""

    @property
    def made_at(self) -> datetime: ...

    @property
    def limit(self) -> int | None: ...

    @property
    def count(self) -> int: ...

    @property
    def beyond_limit_count(self) -> int: ...

    @property
    def causes(self) -> Counter[tuple[str, str, str, str]]: ...

    def sample(self) -> Sequence[int | UUID]: ...


P = TypeVar("P", bound=Plan)
Progress = Callable[[Counts], None]


@dataclass(frozen=True, slots=True)
class Act(Generic[P]):
    """One kind of bulk action."""

    done: str
    """Its verb in the past."""
    columns: tuple[str, str, str, str]
    """Names of what the causes of its plan are made of."""
    make_plan: Callable[[Session, datetime], Awaitable[P]]
    """From a session and the database's time."""
    carry_out: Callable[[Session, P, str, str, Progress | None], Awaitable[tuple[int, Counts]]]
    """With actor, reason and somebody who wants to know how far it is."""
    left_out: Callable[[P], Mapping[str, tuple[int, str]]]
    """What the plan leaves out: by name in JSON, how many and why."""


async def act(request: Request, kind: Act[P]) -> P:
    """Run one bulk action from its options to its printed result."""
    consent = request.consent
    actor, reason = consent.author()
    async with connected() as session:
        now = await session.clock()
        plan = await kind.make_plan(session, now)
    if not consent.json:
        _preview(request, kind, plan, now)
    if consent.dry_run or not plan.count:
        _report(request, kind, plan, None, None)
        return plan
    consent.ask(f"{request.action} {plan.count}?")
    telemetry = setup("towpath-cli")
    try:
        async with connected(is_pinned=True) as session:
            with progress(plan.count, _moved) as advance:
                audit_id, counts = await kind.carry_out(session, plan, actor, reason, advance)
    finally:
        telemetry.shutdown()
    _report(request, kind, plan, audit_id, counts)
    return plan


def _causes(kind: Act[P], plan: P) -> list[dict[str, object]]:
    return [
        {**dict(zip(kind.columns, cause, strict=True)), "count": count}
        for cause, count in plan.causes.most_common()
    ]


def _preview(request: Request, kind: Act[P], plan: P, now: datetime) -> None:
    if plan.made_at < now:
        print(f"going on with what was interrupted: only what stood like this at {cell(plan.made_at)}")
    if plan.count:
        print(f"to {request.action}: {plan.count}, for example {', '.join(map(str, plan.sample()))}")
        table(_causes(kind, plan), (*kind.columns, "count"), empty="")
    for count, why in kind.left_out(plan).values():
        if count:
            print(f"left out: {count} {why}")
    if plan.beyond_limit_count:
        print(f"left out: {plan.beyond_limit_count} beyond --max {plan.limit}")


def _report(request: Request, kind: Act[P], plan: P, audit_id: int | None, counts: Counts | None) -> None:
    if request.consent.json:
        as_json(
            {
                "action": request.action,
                "dry_run": request.consent.dry_run,
                "made_at": plan.made_at,
                "planned": plan.count,
                "done": counts.done if counts else 0,
                "parked": counts.parked if counts else 0,
                "skipped": counts.skipped if counts else 0,
                **{name: count for name, (count, _) in kind.left_out(plan).items()},
                "beyond_limit": plan.beyond_limit_count,
                "audit_id": audit_id,
                "causes": _causes(kind, plan),
                "sample_ids": plan.sample(),
            }
        )
    elif counts is not None:
        parked = f", {counts.parked} of them behind an earlier message of their key" if counts.parked else ""
        skipped = f"; {counts.skipped} had moved meanwhile" if counts.skipped else ""
        print(f"{kind.done} {counts.done}{parked}{skipped} (audit {audit_id})")
    elif not plan.count:
        print("nothing to do")
    else:
        print("dry run: nothing was changed")


def _moved(counts: Counts) -> int:
    return counts.done + counts.skipped
