"""What a run left behind: the ledgers, the database and the broker, put together for the checker.

`save` and `load` keep it as JSON, so that a verdict can be looked into, and repeated, long after the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import UUID

import msgspec

from tests.faults.ledger import Record, read
from tests.faults.messages import Kind
from tests.faults.world import FaultWorld


class Done(msgspec.Struct, frozen=True):
    """An effect in the database."""

    id: UUID
    kind: Kind
    at: int


class Task(msgspec.Struct, frozen=True):
    """Where a message stands in the group."""

    id: UUID
    state: str
    waiting_for: str | None = None
    reason: str | None = None


class Move(msgspec.Struct, frozen=True):
    """A line of a task's history."""

    id: UUID
    event: str
    to_state: str | None = None
    reason: str | None = None
    attempt: int = 0
    """Spent by then."""


class Letter(msgspec.Struct, frozen=True):
    """A row of the dead-letter catalog."""

    id: UUID
    state: str
    stage: str
    deaths: int
    replays: int


class Evidence(msgspec.Struct, frozen=True):
    """One run."""

    records: Sequence[Record] = ()
    deeds: frozenset[str] = frozenset()
    """Transactions that are in the database."""
    done: Sequence[Done] = ()
    tasks: Sequence[Task] = ()
    moves: Sequence[Move] = ()
    """In the order of writing."""
    letters: Sequence[Letter] = ()
    published: Sequence[UUID] = ()
    """What lies at the broker, in the order of arrival."""
    republished: frozenset[UUID] = frozenset()
    """What was sent again on purpose, behind what came later."""
    reappeared: frozenset[UUID] = frozenset()
    """Those of them whose first appearance is gone with the topic it was in."""
    copies: Sequence[UUID] = ()
    """In its dead-letter queue."""
    leftovers: Mapping[str, int] = {}
    """What should be back to nothing."""

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> "Evidence":
        """What `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


_TASKS = """
select id, state, waiting_for, reason_code as reason from kept_task
union all
select id, state, waiting_for, reason_code from towpath.task where consumer_group = $1
"""
_MOVES = """
select id, event, to_state, reason_code as reason, coalesce(attempt, 0) as attempt from (
  select seq, task_id as id, event, to_state, reason_code, attempt from kept_event
  union all
  select seq, task_id, event, to_state, reason_code, attempt
    from towpath.task_event where consumer_group = $1) moves
order by seq
"""
_LETTERS = """
select message_id as id, state, stage, death_count as deaths, replay_count as replays
  from towpath.dead_letter where consumer_group = $1 or stage = 'publish'
"""


async def gather(world: FaultWorld, leftovers: Mapping[str, int]) -> Evidence:
    """Read everything, when the processes have ended."""
    db, group = world.db, world.group
    heard = [*world.heard_before, *await world.broker.heard(world.steps)]
    first = {UUID(message.header("ce_id")): message for message in reversed(heard)}
    copies = await world.broker.dead_letters(group, world.steps)
    return Evidence(
        records=list(read(world.ledger)),
        deeds=frozenset(row["transaction"] for row in await db.fetch("select transaction from deed")),
        done=[Done(**row) for row in await db.fetch("select id, kind, at from done")],
        tasks=[Task(**row) for row in await db.fetch(_TASKS, group)],
        moves=[Move(**row) for row in await db.fetch(_MOVES, group)],
        letters=[Letter(**row) for row in await db.fetch(_LETTERS, group)],
        published=[UUID(message.header("ce_id")) for message in heard],
        republished=frozenset(
            UUID(message.header("ce_id")) for message in heard if message.has("towpath-republished")
        ),
        reappeared=frozenset(id_ for id_, message in first.items() if message.has("towpath-republished")),
        copies=[UUID(message.header("ce_id")) for message in copies],
        leftovers=leftovers,
    )
