"""What producers meant, kept outside the system, and the verdict on what the system made of it."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg


@dataclass(frozen=True)
class Intention:
    """One message of a transaction that was committed or rolled back."""

    message_id: UUID
    handler: str
    key: str
    n: int
    is_committed: bool


class Ledger:
    """A file of intentions, one line per message, written after the transaction's end is known."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, intentions: Iterable[Intention]) -> None:
        """Append; the process may be killed right after and nothing is lost."""
        lines = [
            json.dumps([str(each.message_id), each.handler, each.key, each.n, each.is_committed])
            for each in intentions
        ]
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def __iter__(self) -> Iterator[Intention]:
        with self._path.open() as file:
            for line in file:
                message_id, handler, key, n, is_committed = json.loads(line)
                yield Intention(UUID(message_id), handler, key, n, is_committed)


@dataclass(frozen=True)
class Verdict:
    """Every way in which the promise could be broken, each with the ids that show it."""

    lost: frozenset[UUID]
    """Committed, and no task is there."""
    ghosts: frozenset[UUID]
    """A task that nobody committed."""
    unfinished: dict[str, frozenset[UUID]] = field(default_factory=dict)
    """By the state they are in instead of SUCCEEDED."""
    missing_effects: frozenset[UUID] = frozenset()
    doubled_effects: frozenset[UUID] = frozenset()
    ghost_effects: frozenset[UUID] = frozenset()
    inversions: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By handler and key: the order of effects where it is not the order of commits."""
    keys_per_message: dict[UUID, frozenset[str]] = field(default_factory=dict)
    """Messages that went outside under more than one idempotency key."""
    leftovers: dict[str, int] = field(default_factory=dict)
    """Rows that should be gone or never have been."""

    def problems(self) -> list[str]:
        """One line for each kind of fault; empty: the promise was kept."""
        found = [
            f"{name.replace('_', ' ')}: {len(value)}, for example {_examples(value)}"
            for name in ("lost", "ghosts", "missing_effects", "doubled_effects", "ghost_effects")
            if (value := getattr(self, name))
        ]
        found += [
            f"{state} instead of SUCCEEDED: {len(ids)}, for example {_examples(ids)}"
            for state, ids in self.unfinished.items()
        ]
        found += [
            f"out of order: {handler} {key}: {order}" for (handler, key), order in self.inversions.items()
        ]
        found += [f"several keys for {id_}: {sorted(keys)}" for id_, keys in self.keys_per_message.items()]
        found += [f"left over: {count} {name}" for name, count in self.leftovers.items() if count]
        return found


async def judge(db: "asyncpg.Connection[Any]", group: str, ledger: Iterable[Intention]) -> Verdict:
    """Compare the ledger with the tasks and effects in the database, as sets and as order per key."""
    intentions = list(ledger)
    committed = {each.message_id for each in intentions if each.is_committed}
    tasks = await db.fetch("select id, state from towpath.task where consumer_group = $1", group)
    effects = await db.fetch("select message_id, handler, key, n from effect order by seq")
    unfinished: dict[str, set[UUID]] = defaultdict(set)
    for row in tasks:
        if row["state"] != "SUCCEEDED":
            unfinished[row["state"]].add(row["id"])
    happened = Counter(row["message_id"] for row in effects)
    return Verdict(
        lost=frozenset(committed - {row["id"] for row in tasks}),
        ghosts=frozenset({row["id"] for row in tasks} - committed),
        unfinished={state: frozenset(ids) for state, ids in unfinished.items()},
        missing_effects=frozenset(committed - happened.keys()),
        doubled_effects=frozenset(id_ for id_, count in happened.items() if count > 1),
        ghost_effects=frozenset(happened.keys() - committed),
        inversions=_inversions(intentions, effects),
        keys_per_message=await _keys(db),
        leftovers=await _leftovers(db, group),
    )


def _inversions(
    intentions: Iterable[Intention], effects: Iterable["asyncpg.Record"]
) -> dict[tuple[str, str], list[int]]:
    """First appearances only: a doubled effect is another fault."""
    meant: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in intentions:
        if each.is_committed:
            meant[each.handler, each.key].append(each.n)
    seen: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
    for row in effects:
        seen[row["handler"], row["key"]].setdefault(row["n"])
    orders = {lane: list(order) for lane, order in seen.items()}
    return {lane: order for lane, order in orders.items() if order != sorted(set(order) & set(meant[lane]))}


async def _keys(db: "asyncpg.Connection[Any]") -> dict[UUID, frozenset[str]]:
    rows = await db.fetch(
        "select message_id, array_agg(distinct idempotency_key) as keys from outside_call"
        " group by message_id having count(distinct idempotency_key) > 1"
    )
    return {row["message_id"]: frozenset(row["keys"]) for row in rows}


async def _leftovers(db: "asyncpg.Connection[Any]", group: str) -> dict[str, int]:
    row = await db.fetchrow(
        "select (select count(*) from towpath.key_gate where consumer_group = $1) as gates,"
        " (select count(*) from towpath.dead_letter where consumer_group = $1) as dead_letters,"
        " (select count(*) from towpath.outbox_message"
        "   where status = 'PENDING' and destination <> 'towpath.canary') as unsent",
        group,
    )
    return dict(row) if row is not None else {}


def _examples(ids: Iterable[UUID]) -> str:
    return ", ".join(str(id_) for id_ in sorted(ids)[:5])
