"""Claims: from a broker message or a due row to a RUNNING row under a token, in committed batches."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from towpath.errors import StoreUnavailable
from towpath.messages import dump_headers, load_headers
from towpath.store.database import Database, store_errors
from towpath.store.delays import admit_delayed, is_outside
from towpath.store.due import DueStore
from towpath.store.gates import Connection, Executor
from towpath.store.statements import load
from towpath.store.work import Finding, Standing, Work


@dataclass(slots=True)
class Claimed:
    """What became of a batch of claims."""

    started: list[Work] = field(default_factory=list)
    parked: list[Work] = field(default_factory=list)
    lost: list[Work] = field(default_factory=list)
    """Look these up with `standings`."""
    contended: list[Work] = field(default_factory=list)
    """Another message of the lane runs at this moment: ask again shortly."""
    full: list[Work] = field(default_factory=list)
    """So many of the lane are parked that this one has to wait at the broker."""


class ClaimStore:
    """Claims of one worker of one consumer group."""

    def __init__(
        self,
        database: Database,
        group: str,
        worker_id: UUID,
        *,
        is_ordered_by_key: bool = False,
        max_parked: int = 10_000,
        types: Iterable[str] = (),
    ) -> None:
        self._database = database
        self._is_ordered_by_key = is_ordered_by_key
        self._max_parked = max_parked
        self.due = DueStore(database, group, types)
        self._sql = load("work", database.schema)
        self._group = group
        self._worker_id = worker_id
        self.lost_answer_at: float | None = None
        """When it last was not known whether a claim had been committed."""

    async def claim(self, batch: Sequence[Work], *, takes_over: bool = False) -> Claimed:
        """Claim at most one message per lane, all in one transaction: one statement where nothing is gated.

        Work that a dead worker left is taken over only where that is asked for: whoever does it
        knows how often it was started before.

        Raises StoreUnavailable: then nothing is known, and claiming again is safe. Where the lane
        of one message turns out to be running, the batch is claimed again one by one.
        """
        try:
            batch = sorted(batch, key=lambda work: work.id.int)
            with self._answered():
                quick = None if takes_over else await self._claim_in_one_statement(batch)
                return quick or await self._claim_in_one_transaction(batch, takes_over)
        except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
            if len(batch) == 1:
                return Claimed(contended=list(batch))
        result = Claimed()
        for index, work in enumerate(batch):
            try:
                one = await self.claim([work], takes_over=takes_over)
            except (StoreUnavailable, asyncpg.PostgresError):
                if index == 0:
                    raise
                result.contended += batch[index:]
                break  # what was started before has to be run
            result.started += one.started
            result.parked += one.parked
            result.lost += one.lost
            result.contended += one.contended
            result.full += one.full
        return result

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Notes when no answer tells whether a claim was committed."""
        try:
            yield
        except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
            raise
        except BaseException:
            self.lost_answer_at = time.monotonic()
            raise

    async def _claim_in_one_statement(self, batch: list[Work]) -> Claimed | None:
        """None: nothing was claimed; a lane is gated, others won all of it, or bodies are in their rows."""
        if not all(work.has_body for work in batch):
            return None
        token: UUID = uuid7()
        with store_errors():
            rows = await self._claim_events(self._database.pool, batch, token, False, gates_are_locked=False)
        return self._claimed(batch, rows, token) if rows else None

    async def _claim_in_one_transaction(self, batch: list[Work], takes_over: bool) -> Claimed:
        token: UUID = uuid7()
        async with self._database.transaction() as connection:
            gated = await self._gated_lanes(connection, batch)
            free = [work for work in batch if (work.source, work.lane) not in gated]
            followers = [work for work in batch if gated.get((work.source, work.lane)) is False]
            full = [work for work in batch if gated.get((work.source, work.lane))]
            rows = await self._claim_events(connection, [w for w in free if w.has_body], token, takes_over)
            rows += await self._claim_tasks(
                connection, [w for w in free if not w.has_body], token, takes_over
            )
            parked = await self._park(connection, followers)
        result = self._claimed(free, rows, token)
        result.full = full
        for work in followers:
            (result.parked if work.id in parked else result.lost).append(work)
        self.due.expect(work.type for work in (*followers, *full))
        return result

    def _claimed(self, works: list[Work], rows: list[Any], token: UUID) -> Claimed:
        result = Claimed()
        self.due.expect(work.type for work in works)
        now = time.monotonic()
        by_id = {row["id"]: row for row in rows}
        for work in works:
            row = by_id.get(work.id)
            if row is None:
                result.lost.append(work)
            else:
                _fill(work, row, token, now)
                result.started.append(work)
        return result

    async def _gated_lanes(
        self, connection: Connection, batch: list[Work]
    ) -> dict[tuple[str, str | None], bool]:
        """Whether each of them is full."""
        lanes = [work for work in batch if work.lane is not None]
        if not lanes:
            return {}
        rows = await connection.fetch(
            self._sql["lock_gates"],
            self._group,
            sorted({work.source for work in lanes}),
            sorted({work.lane for work in lanes if work.lane is not None}),
            self._max_parked,
        )
        return {(row["source"], row["lane"]): row["is_full"] for row in rows}

    async def _claim_events(
        self,
        connection: Executor,
        works: list[Work],
        token: UUID,
        takes_over: bool,
        *,
        gates_are_locked: bool = True,
    ) -> list[Any]:
        if not works:
            return []
        rows: list[Any] = await connection.fetch(
            self._sql["claim_events"],
            self._group,
            [work.id for work in works],
            [work.type for work in works],
            [work.kind for work in works],
            [work.source for work in works],
            [work.key for work in works],
            [work.lane for work in works],
            [work.position for work in works],
            self._worker_id,
            token,
            takes_over,
            gates_are_locked,
        )
        return rows

    async def _claim_tasks(
        self, connection: Connection, works: list[Work], token: UUID, takes_over: bool
    ) -> list[Any]:
        rows: list[Any] = []
        for is_ordered in (True, False):
            ids = [work.id for work in works if (work.lane is not None) is is_ordered]
            if ids:
                rows += await connection.fetch(
                    self._sql["claim_tasks"], self._group, ids, self._worker_id, token, is_ordered, takes_over
                )
        return rows

    async def _park(self, connection: Connection, works: list[Work]) -> set[UUID]:
        parked: set[UUID] = set()
        events = [work for work in works if work.has_body]
        tasks = [work for work in works if not work.has_body]
        if events:
            columns = [
                [work.id for work in events],
                [work.type for work in events],
                [work.kind for work in events],
                [work.source for work in events],
                [work.key for work in events],
                [work.lane for work in events],
                [work.position for work in events],
                [work.payload for work in events],
                [work.content_type for work in events],
                [dump_headers(work.headers) for work in events],
                [work.trace for work in events],
            ]
            parked |= {
                row["id"] for row in await connection.fetch(self._sql["park_events"], self._group, *columns)
            }
        if tasks:
            rows = await connection.fetch(
                self._sql["park_tasks"],
                self._group,
                [work.id for work in tasks],
                [work.lane for work in tasks],
                [work.position for work in tasks],
            )
            parked |= {row["id"] for row in rows}
        return parked

    async def findings(self, ids: Sequence[UUID]) -> dict[UUID, Finding]:
        """Where messages stand that this worker could not claim; a statement of its own, after the claim."""
        with store_errors():
            rows = await self._database.pool.fetch(self._sql["states"], self._group, list(ids))
        found = {row["id"]: Finding(_standing(row), row["deliveries"]) for row in rows}
        return {id_: found.get(id_, Finding(Standing.MISSING)) for id_ in ids}

    async def start_due(
        self,
        limit: int,
        *,
        without: Collection[str] = (),
        may_start: Callable[[str, int], bool] = lambda _type, _start: True,
    ) -> list[Work]:
        """Start up to `limit` due rows; each lane at most once. Raises StoreUnavailable.

        `may_start` is asked with the type and the number of starts it would be, 1 where no worker
        was lost. Types in `without` are not looked at.
        """
        due = await self.due.look(limit, without=without)
        if self._is_ordered_by_key and await admit_delayed(self._database, self._group, due):
            due = await self.due.look(limit, without=without)
        first_of_lane: dict[tuple[str, str | UUID], UUID] = {}
        for row in due:
            if self._is_ordered_by_key and is_outside(row):
                continue  # it became due between the two looks
            if may_start(row["type"], row["deliveries"] + 1):
                first_of_lane.setdefault((row["source"], row["lane"] or row["id"]), row["id"])
        ids = list(first_of_lane.values())
        if not ids:
            return []
        token: UUID = uuid7()
        try:
            rows = await self._start(ids, token)
        except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
            rows = []
            for id_ in ids:
                try:
                    rows += await self._start([id_], token)
                except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
                    continue  # its lane runs something by now; it stays due
                except StoreUnavailable:
                    if not rows:
                        raise
                    break  # what was started before has to be run
        now = time.monotonic()
        triggers = {row["id"]: row["waiting_for"] for row in due}
        return [_due_work(row, token, now, triggers[row["id"]]) for row in rows]

    async def _start(self, ids: list[UUID], token: UUID) -> list[Any]:
        with self._answered(), store_errors():
            rows: list[Any] = await self._database.pool.fetch(
                self._sql["start_due"], self._group, ids, self._worker_id, token
            )
        return rows


def _fill(work: Work, row: Any, token: UUID, now: float) -> None:
    """What the claim returned, onto the work that asked for it."""
    work.token, work.claimed_at = token, now
    work.attempt, work.version = row["attempt"], row["version"]
    work.deliveries, work.run_no = row["deliveries"], row["run_no"]
    work.age_seconds, work.deadline_seconds = row["age_seconds"] or 0.0, row["deadline_seconds"]
    work.owner = row["owner"]
    work.is_cancel_requested = row["cancel_requested"]
    if not work.has_body:
        work.payload, work.content_type = row["payload"], row["content_type"]
        work.headers = load_headers(row["headers"])


def _due_work(row: Any, token: UUID, now: float, trigger: str) -> Work:
    work = Work(
        id=row["id"],
        type=row["type"],
        kind=row["kind"],
        source=row["source"],
        key=row["key"],
        lane=row["lane"],
        position=row["position"],
        payload=None,
        content_type=None,
        headers=(),
        trace=row["trace"],
        is_from_broker=False,
        has_body=False,
        trigger=trigger,
        created_at=row["created_at"],
    )
    _fill(work, row, token, now)
    return work


def _standing(row: Any) -> Standing:
    if row["state"] == "ACCEPTED":
        return Standing.ABANDONED
    if row["state"] != "RUNNING" or row["held_by"] == "database":
        return Standing.SETTLED
    if row["worker_is_alive"]:
        return Standing.BUSY
    return Standing.ABANDONED
