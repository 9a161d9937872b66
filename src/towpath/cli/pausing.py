"""`towpath outbox pause | resume` and `towpath worker pause | resume`: plan, question, result."""

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Literal, TypeAlias

from towpath.cli.option_groups import Consent
from towpath.cli.output import as_json, clean, table
from towpath.cli.session import connected, run_async
from towpath.store.audit import AuditStore
from towpath.store.pauses import EVERY_TYPE, EVERYTHING, Kind, PauseStore, Target

Verb: TypeAlias = Literal["pause", "resume"]
_NOUN: dict[Kind, str] = {"publish": "outbox", "start": "worker"}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    verb: Verb
    kind: Kind
    targets: Sequence[Target]
    """What to pause or to resume."""
    every: bool
    """Resume whatever is paused of this kind and, of groups, of the one named."""
    consent: Consent


def act(request: Request) -> None:
    """Pause or resume; what is so already stays and is not recorded again."""
    consent = request.consent
    actor, reason = consent.author()
    plan = run_async(_plan(request))
    if not consent.json:
        for target in plan:
            print(f"to {request.verb}: {_shown(target)}")
    done: Sequence[Target] = ()
    if plan and not consent.dry_run:
        consent.ask(f"{request.verb} {len(plan)}?")
        done = run_async(_carry_out(request.verb, plan, actor, reason))
    left = run_async(in_force(request.kind))
    if consent.json:
        as_json(
            {
                "action": f"{_NOUN[request.kind]}.{request.verb}",
                "dry_run": consent.dry_run,
                "planned": [_named(target) for target in plan],
                "done": [_named(target) for target in done],
                "in_force": left,
            }
        )
        return
    if not plan:
        print(f"nothing to do: {'paused' if request.verb == 'pause' else 'not paused'} already")
    elif consent.dry_run:
        print("dry run: nothing was changed")
    else:
        print(f"{request.verb}d {len(done)}: in force with the next heartbeat")
    tell(left)


async def in_force(kind: Kind) -> list[dict[str, Any]]:
    """What is paused now."""
    async with connected() as session:
        return [dict(row) for row in await PauseStore(session.schema).open(session.connection, kind)]


def tell(pauses: Sequence[dict[str, Any]]) -> None:
    """Print what is paused, if anything is."""
    if pauses:
        rows = [row | {"type": row["type"] or None, "reason": row["reason"] or None} for row in pauses]
        table(rows, ("name", "type", "paused_at", "actor", "reason"), empty="")


async def _plan(request: Request) -> list[Target]:
    """What would change."""
    paused = [Target(request.kind, row["name"], row["type"]) for row in await in_force(request.kind)]
    if request.verb == "pause":
        return [target for target in request.targets if target not in paused]
    if request.every:
        names = {target.name for target in request.targets}
        return [target for target in paused if not names or target.name in names]
    return [target for target in request.targets if target in paused]


async def _carry_out(verb: Verb, plan: Sequence[Target], actor: str, reason: str) -> list[Target]:
    async with connected() as session, session.connection.transaction():
        store, done = PauseStore(session.schema), []
        for target in plan:
            if verb == "pause":
                is_done = await store.pause(session.connection, target, actor=actor, reason=reason)
            else:
                is_done = await store.resume(session.connection, target)
            if is_done:
                done.append(target)
        if done:
            await AuditStore(session.schema).begin(
                session.connection,
                actor=actor,
                action=f"{_NOUN[plan[0].kind]}.{verb}",
                reason=reason,
                criteria=dumps([_named(target) for target in done]),
                counts=dumps({"done": len(done)}),
            )
    return done


def _named(target: Target) -> dict[str, str]:
    return {"name": target.name, "type": target.type}


def _shown(target: Target) -> str:
    if target.kind == "publish":
        return "everything" if target.name == EVERYTHING else clean(target.name)
    return clean(target.name if target.type == EVERY_TYPE else f"{target.name}, type {target.type}")
