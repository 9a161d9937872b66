"""Whether a run kept the promise: pure functions for each invariant, over sets and orders of the evidence.

I1 committed ⇒ published, I2 published ⇒ committed, I3 first appearances and effects of a key in commit order,
I4 effects in the database once, I5 outside calls at least once, under one key, never by two living workers,
I6 at-most-once calls never twice, I7 every task ended, I8 one end for each message, the one it was meant to
have, I9 dead ⇒ one catalog row, one copy at the broker for each death, I10 replayed once for each replay,
I11 everything back to rest.

What COMMIT did where its answer was lost is seen from the transaction's own row in the database. After a
failover all this is about the surviving database; messages of what it never received may be out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, TypeAlias
from uuid import UUID

from tests.faults.case import Case
from tests.faults.evidence import Evidence
from tests.faults.ledger import Ended, Intended
from tests.faults.messages import TASKS
from tests.faults.world import RELAYS

Invariant: TypeAlias = Literal["I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I10", "I11"]
_FINAL: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "DEAD"})
_OUTAGE: Final = "sqlstate_53"
"""Insufficient resources, such as a full disk."""


@dataclass(frozen=True)
class Breach:
    """One way in which the promise was broken."""

    invariant: Invariant
    what: str
    id: UUID | None = None

    def __str__(self) -> str:
        return f"{self.invariant} {self.what}" + ("" if self.id is None else f": {self.id}")


def _published(case: Case) -> Iterator[Breach]:
    told = {e.transaction for e in case.evidence.records if isinstance(e, Ended) and e.how == "committed"}
    for transaction in sorted(told - case.evidence.deeds - case.lost.transactions):
        yield Breach("I1", f"{transaction} was committed and is not in the database")
    for id_, each in case.committed.items():
        if id_ not in case.tasks:
            yield Breach("I1", f"committed and unknown to the group ({_name(each)})", id_)
        starts_from_its_row = each.kind in TASKS and each.is_delayed
        if id_ not in case.published and not starts_from_its_row:
            yield Breach("I1", f"committed and not published ({_name(each)})", id_)


def _committed(case: Case) -> Iterator[Breach]:
    told = {e.transaction for e in case.evidence.records if isinstance(e, Ended) and e.how == "rolled_back"}
    for transaction in sorted(told & case.evidence.deeds):
        yield Breach("I2", f"{transaction} was rolled back and is in the database")
    for where, ids in (("published", case.published), ("a task", case.tasks), ("called for", case.calls)):
        for id_ in ids:
            if id_ not in case.known:
                each = case.intended.get(id_)
                yield Breach("I2", f"{where} and not committed ({_name(each)})", id_)


def _ordered(case: Case) -> Iterator[Breach]:
    at: dict[UUID, int] = {}
    for done in case.evidence.done:
        at[done.id] = min(done.at, at.get(done.id, done.at))
    for id_, calls in case.calls.items():
        at[id_] = min(calls[0].at, at.get(id_, calls[0].at))
    effects = sorted((id_ for id_ in at), key=lambda id_: at[id_])
    for what, ids, ordered in (
        ("published", case.published, case.ordered - case.evidence.reappeared),
        ("took effect", effects, case.ordered - case.evidence.republished),
    ):
        last: dict[str, Intended] = {}
        for id_ in ids:
            if id_ in ordered:
                each = case.committed[id_]
                before = last.setdefault(each.key, each)
                if each.n < before.n:
                    yield Breach("I3", f"{each.key} {what} {before.n} before {each.n}", id_)
                else:
                    last[each.key] = each


def _once_in_the_database(case: Case) -> Iterator[Breach]:
    counts = Counter(done.id for done in case.evidence.done)
    for id_, each in case.known.items():
        task = case.tasks.get(id_)
        if task is None or each.kind in ("at_most_once", "requested", "garbled"):
            continue
        # An idempotent handler that rejects does so before its transaction.
        happened = ("SUCCEEDED",) if each.kind == "idempotent" else ("SUCCEEDED", "FAILED")
        expected = 1 if task.state in happened else 0
        if counts[id_] != expected:
            yield Breach("I4", f"{counts[id_]} effects of a task that is {task.state} ({_name(each)})", id_)
    for id_ in counts.keys() - case.known.keys():
        yield Breach("I4", "an effect of nothing that was committed", id_)


def _idempotent_calls(case: Case) -> Iterator[Breach]:
    for id_, each in case.known.items():
        if each.kind not in ("idempotent", "requested"):
            continue
        calls, task = case.calls.get(id_, []), case.tasks.get(id_)
        keys = {call.idempotency_key for call in calls}
        if len(keys) > 1:
            yield Breach("I5", f"called under {sorted(keys)}", id_)
        if not calls and task is not None and task.state == "SUCCEEDED":
            yield Breach("I5", "succeeded and was never called", id_)
        for first, second in pairwise(calls):
            ended_at = case.ended_at(first)
            if ended_at > second.at and not case.had_lost_its_lease(first, second.at, ended_at):
                yield Breach("I5", f"called by {second.process} while {first.process} was at it", id_)


def _at_most_once(case: Case) -> Iterator[Breach]:
    for id_, each in case.known.items():
        if each.kind == "at_most_once":
            count, task = max(map(len, case.histories(id_))), case.tasks.get(id_)
            if count > 1:
                yield Breach("I6", f"called {count} times", id_)
            if id_ not in case.calls and task is not None and task.state == "SUCCEEDED":
                yield Breach("I6", "succeeded and was never called", id_)


def _ended(case: Case) -> Iterator[Breach]:
    for id_, task in case.tasks.items():
        if task.state not in _FINAL:
            waits = f" for {task.waiting_for}" if task.waiting_for else ""
            yield Breach("I7", f"still {task.state}{waits} ({_name(case.intended.get(id_))})", id_)


def _one_end(case: Case) -> Iterator[Breach]:
    ends: Counter[UUID] = Counter()
    replays: Counter[UUID] = Counter()
    for move in case.evidence.moves:
        if move.to_state in _FINAL:
            ends[move.id] += 1
        if move.event == "task.replayed":
            replays[move.id] += 1
    for id_, count in ends.items():
        if count > 1 + replays[id_]:
            yield Breach("I8", f"ended {count} times and was replayed {replays[id_]} times", id_)
    for id_, each in case.known.items():
        task = case.tasks.get(id_)
        if task is not None and task.state in _FINAL and task.state not in _meant(each):
            yield Breach("I8", f"ended {task.state} ({task.reason}), was meant to be {_name(each)}", id_)
    by_request = defaultdict(set)
    for id_, each in case.committed.items():
        if each.request:
            by_request[each.request].add(id_)
    for request, ids in by_request.items():
        if len(ids) > 1:
            yield Breach("I8", f"{request} became {len(ids)} tasks", min(ids))


def _outages_are_free(case: Case) -> Iterator[Breach]:
    attempts: Counter[UUID] = Counter()
    for move in case.evidence.moves:
        if (move.reason or "").startswith(_OUTAGE) and move.attempt > attempts[move.id]:
            yield Breach("I8", f"{move.reason} spent an attempt", move.id)
        attempts[move.id] = move.attempt


def _meant(each: Intended) -> tuple[str, ...]:
    if each.kind == "garbled":
        return ("DEAD",)
    match each.fate:
        case "is_rejected":
            return ("FAILED",)
        case "is_cancelled":
            return ("CANCELLED", "SUCCEEDED")
    return ("SUCCEEDED",)


def _catalogued(case: Case) -> Iterator[Breach]:
    dead = {id_ for id_, task in case.tasks.items() if task.state == "DEAD"}
    for id_ in sorted(dead - case.letters.keys()):
        yield Breach("I9", "dead and not in the catalog", id_)
    copies = Counter(case.evidence.copies)
    may_repeat = any(set(each.processes) & {*RELAYS} for each in case.strikes)
    for id_, letters in case.letters.items():
        if len(letters) > 1:
            yield Breach("I9", f"{len(letters)} rows in the catalog", id_)
        if letters[0].state == "open" and id_ not in dead:
            yield Breach("I9", "open in the catalog and not dead", id_)
        deaths, count = letters[0].deaths, copies[id_]
        if letters[0].stage != "publish" and (count < deaths or (count > deaths and not may_repeat)):
            yield Breach("I9", f"died {deaths} times, {count} copies at the broker", id_)
    for id_ in copies.keys() - case.letters.keys() - case.lost.letters:
        yield Breach("I9", "a copy at the broker of nothing in the catalog", id_)


def _replayed(case: Case) -> Iterator[Breach]:
    replays = Counter(move.id for move in case.evidence.moves if move.event == "task.replayed")
    for id_, letters in case.letters.items():
        if replays[id_] != letters[0].replays:
            yield Breach("I10", f"replayed {letters[0].replays} times, sent back {replays[id_]} times", id_)
    for id_ in replays.keys() - case.letters.keys():
        yield Breach("I10", "sent back without a dead letter", id_)


def _at_rest(case: Case) -> Iterator[Breach]:
    for name, count in case.evidence.leftovers.items():
        if count:
            yield Breach("I11", f"left over: {count} {name}")


INVARIANTS: Final[tuple[Callable[[Case], Iterable[Breach]], ...]] = (
    _published,
    _committed,
    _ordered,
    _once_in_the_database,
    _idempotent_calls,
    _at_most_once,
    _ended,
    _one_end,
    _outages_are_free,
    _catalogued,
    _replayed,
    _at_rest,
)


def check(evidence: Evidence) -> list[Breach]:
    """Every breach; none: the promise was kept."""
    case = Case(evidence)
    return [breach for invariant in INVARIANTS for breach in invariant(case)]


def _name(each: Intended | None) -> str:
    if each is None:
        return "intended by nobody"
    return f"{each.kind} {each.key}/{each.n} that {each.fate}"
