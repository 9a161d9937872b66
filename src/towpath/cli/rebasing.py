"""`towpath outbox rebase`: preview, question, action, result."""

from dataclasses import asdict

from towpath.cli.option_groups import Consent
from towpath.cli.options import instant
from towpath.cli.output import as_json, cell
from towpath.cli.session import Session, connected, run_async
from towpath.errors import UsageError
from towpath.store.rebase import POINTS, Outlook, Point, Rebase


def act(to: str, consent: Consent) -> None:
    """Run it from its options to its printed result."""
    who, why = consent.author("what would be sent")

    async def look() -> tuple[Point, Outlook]:
        async with connected() as session:
            point = await _point(session, to)
            return point, await Rebase(session.connection, point, session.schema).preview()

    async def carry_out(point: Point) -> tuple[int, Outlook]:
        async with connected() as session:
            rebase = Rebase(session.connection, point, session.schema)
            return await rebase.carry_out(actor=who, reason=why)

    point, outlook = run_async(look())
    audit_id = None
    if not consent.json:
        _show(outlook)
    if not consent.dry_run:
        consent.ask("begin there?")
        audit_id, outlook = run_async(carry_out(point))
    if consent.json:
        as_json({"dry_run": consent.dry_run, "to": str(point), "audit_id": audit_id, **asdict(outlook)})
    elif audit_id is None:
        print("dry run: nothing was changed")
    else:
        print(f"{outlook.unsent} will be sent, {outlook.sent} count as sent (audit {audit_id})")


async def _point(session: Session, to: str) -> Point:
    for name in POINTS:
        if to == name:
            return name
    point = instant(to, "--to", await session.clock())
    if point is None:
        raise UsageError("--to is needed")
    return point


def _show(outlook: Outlook) -> None:
    since = f", the oldest written at {cell(outlook.oldest_unsent_at)}" if outlook.unsent else ""
    print(f"to be sent: {outlook.unsent}{since}; counting as sent: {outlook.sent}")
    if outlook.dropped:
        print(
            f"{outlook.dropped} of these were written here since the copy was made, and nobody has sent them"
        )
