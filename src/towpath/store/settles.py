"""Settling: how a RUNNING row moves on, always guarded by the token of its claim.

Zero rows means somebody else decided meanwhile: the result is dropped and looked up like a lost
claim. Lock order in every transaction: gates, then task rows, both sorted.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from towpath.failures import Failure
from towpath.messages import dump_headers
from towpath.states import TaskState, WaitingFor
from towpath.store.database import Database, store_errors
from towpath.store.deaths import DeathStore, Stage
from towpath.store.gates import Executor, hold, leave
from towpath.store.sessions import SessionConnection
from towpath.store.statements import load
from towpath.store.successes import Settled, settle, settle_with_gates, token_of
from towpath.store.work import Work

Claim: TypeAlias = tuple[UUID, UUID]
"""Task id and token."""


@dataclass(frozen=True, slots=True)
class Waits:
    """A failed message that waits in Postgres."""

    state: TaskState
    due_at: datetime | None
    attempt: int


class _Dropped(Exception):
    """Rolls the transaction back: the token is gone."""


class SettleStore:
    """Settlements of one worker of one consumer group. Every method raises StoreUnavailable."""

    def __init__(self, database: Database, group: str, worker_id: UUID) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._worker_id = worker_id
        self._deaths = DeathStore(database.schema, group)

    async def succeed(self, batch: Sequence[tuple[Work, bytes | None]]) -> Settled:
        """Group commit of successes; a lane's head that succeeds promotes its follower.

        What the broker holds heads no gate, and is settled by one statement where that is enough.
        """
        quick: frozenset[UUID] = frozenset()
        is_of_one_kind = len({result is None for _, result in batch}) == 1
        if is_of_one_kind and all(work.is_from_broker for work, _ in batch):
            with store_errors():
                rows = await settle(self._database.pool, self._sql, self._group, batch, is_for_all=False)
            quick = frozenset(row["id"] for row in rows)
            if len(quick) == len(batch):
                return Settled(quick, 0)
        async with self._database.transaction() as connection:
            left = [item for item in batch if item[0].id not in quick]
            rest = await settle_with_gates(connection, self._sql, self._group, left)
        return Settled(quick | rest.ids, rest.promoted_count)

    async def settle_batch_in(self, session: AsyncSession, works: Sequence[Work]) -> Settled:
        """Successes of a batch handler, as the last statements of its transaction.

        The caller commits when all tokens held, else rolls back.
        """
        connection = SessionConnection(await session.connection())
        return await settle_with_gates(connection, self._sql, self._group, [(work, None) for work in works])

    async def settle_in(
        self,
        session: AsyncSession,
        work: Work,
        state: TaskState,
        *,
        commit: Callable[[Session], None],
        result: bytes | None = None,
        reason_code: str | None = None,
        detail: str | None = None,
    ) -> int | None:
        """Flush, run the last statement of a handler's transaction and commit it.

        Returns how many followers it promoted. None when the token is gone: then the caller rolls back.
        """
        is_success = state is TaskState.SUCCEEDED
        row = await session.run_sync(
            _flush_and_fetch,
            commit if is_success else None,
            self._sql["settle_one"],
            (
                self._group,
                work.id,
                token_of(work),
                state.value,
                work.source,
                work.lane,
                result,
                reason_code,
                detail,
            ),
        )
        if row is None:
            return None
        if is_success and _is_alone(row):
            return 0
        connection = SessionConnection(await session.connection())
        if not is_success:
            failure = Failure("reject", reason_code or "rejected", error_message=detail or "")
            await self._record(connection, work, f"task.{state.value.lower()}", state.value, row, failure)
        promoted = 0
        if work.lane is not None and await self._is_head(connection, work, row):
            promoted = await leave(connection, self._sql, self._group, [(work.source, work.lane)])
        await session.run_sync(commit)
        return promoted

    async def _is_head(self, connection: Executor, work: Work, row: Any) -> bool:
        """Asked again where it was kept while the statement waited for its row: its gate was not seen."""
        if row["is_head"] or not row["is_held"]:
            return bool(row["is_head"])
        head = await connection.fetchval(self._sql["gate_head"], self._group, work.source, work.lane)
        return bool(head == work.id)

    async def keep(self, work: Work) -> bool:
        """Let the database hold work that runs long, with its body and its lane's gate.

        True: its broker message may be acknowledged. False: the token is gone, or another message
        heads the lane.
        """
        try:
            async with self._database.transaction() as connection:
                if not await hold(connection, self._sql, self._group, work.source, work.lane, work.id):
                    raise _Dropped
                version = await connection.fetchval(
                    self._sql["keep"],
                    self._group,
                    work.id,
                    token_of(work),
                    work.lane,
                    work.position,
                    work.payload,
                    work.content_type,
                    dump_headers(work.headers),
                    work.trace,
                )
                if version is None:
                    raise _Dropped
        except _Dropped:
            return False
        return True

    async def wait(
        self,
        work: Work,
        failure: Failure,
        *,
        delay_seconds: float,
        waiting_for: WaitingFor,
        spent: int,
        ageless_seconds: float = 0.0,
    ) -> Waits | None:
        """Keep the message in Postgres until it is due, or PARKED behind another head of its lane.

        Afterwards its broker message may be acknowledged. `ageless_seconds` do not count towards its
        age: an outage does not use it up. None: the token is gone.
        """
        try:
            async with self._database.transaction() as connection:
                is_head = await hold(connection, self._sql, self._group, work.source, work.lane, work.id)
                keeps_body = work.has_body
                row = await connection.fetchrow(
                    self._sql["wait"],
                    self._group,
                    work.id,
                    token_of(work),
                    delay_seconds if is_head else None,
                    waiting_for.value,
                    work.position,
                    work.lane,
                    work.payload if keeps_body else None,
                    work.content_type if keeps_body else None,
                    dump_headers(work.headers) if keeps_body else None,
                    work.trace if keeps_body else None,
                    spent,
                    failure.reason_code,
                    failure.error_class,
                    failure.error_message,
                    failure.fingerprint,
                    ageless_seconds,
                )
                if row is None:
                    raise _Dropped
                await self._record(
                    connection, work, f"task.{waiting_for.value}_scheduled", row["state"], row, failure
                )
        except _Dropped:
            return None
        return Waits(TaskState(row["state"]), row["due_at"], row["attempt"])

    async def end(
        self,
        work: Work,
        state: TaskState,
        failure: Failure,
        *,
        spent: int,
        stage: Stage = "handle",
        origin: str | None = None,
    ) -> int | None:
        """End outside a handler's transaction: DEAD, FAILED, EXPIRED or CANCELLED.

        DEAD writes the catalog row and the broker copy in the same transaction.

        Returns how many followers became due; None: the token is gone.
        """
        promoted = 0
        try:
            async with self._database.transaction() as connection:
                head = None
                if work.lane is not None:
                    head = await connection.fetchval(
                        self._sql["gate_head"], self._group, work.source, work.lane
                    )
                row = await connection.fetchrow(
                    self._sql["end"],
                    self._group,
                    work.id,
                    token_of(work),
                    state.value,
                    spent,
                    work.lane,
                    work.position,
                    failure.reason_code,
                    failure.error_class,
                    failure.error_message,
                    failure.fingerprint,
                )
                if row is None:
                    raise _Dropped
                await self._record(connection, work, f"task.{state.value.lower()}", state.value, row, failure)
                if state is TaskState.DEAD:
                    await self._deaths.bury(
                        connection, work, failure, stage=stage, attempts=row["attempt"], origin=origin
                    )
                if work.lane is not None and head is None:  # or it was kept while this waited for its row
                    head = await connection.fetchval(
                        self._sql["gate_head"], self._group, work.source, work.lane
                    )
                if work.lane is not None and head == work.id:
                    promoted = await leave(connection, self._sql, self._group, [(work.source, work.lane)])
        except _Dropped:
            return None
        return promoted

    async def dead_on_arrival(self, work: Work, failure: Failure, *, origin: str | None) -> None:
        """A message that cannot be decoded: minimal row, catalog row, broker copy.

        A repeat changes nothing.
        """
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(
                self._sql["dead_on_arrival"],
                self._group,
                work.id,
                work.type,
                work.source,
                work.key,
                failure.reason_code,
                failure.error_class,
                failure.error_message,
                failure.fingerprint,
            )
            if row is not None:
                await self._record(connection, work, "task.dead", TaskState.DEAD.value, row, failure, None)
                await self._deaths.bury(connection, work, failure, stage="decode", attempts=0, origin=origin)

    async def hand_back(self, works: Sequence[Work]) -> None:
        """Unfinished work goes back unspent: to the broker, or due now where the database holds it."""
        await self.hand_back_claims({(work.id, token_of(work)) for work in works})

    async def hand_back_claims(self, claims: Collection[Claim]) -> None:
        """The same by task id and token."""
        if claims:
            ids, tokens = sorted({id_ for id_, _ in claims}), sorted({token for _, token in claims})
            async with self._database.transaction() as connection:
                await connection.fetch(self._sql["hand_back"], self._group, ids, tokens)

    async def claims(self) -> set[Claim]:
        """What the database takes this worker to be running."""
        with store_errors():
            rows = await self._database.pool.fetch(self._sql["claims_of_worker"], self._worker_id)
        return {(row["id"], row["token"]) for row in rows}

    async def _record(
        self,
        connection: Executor,
        work: Work,
        event: str,
        to_state: str,
        row: Any,
        failure: Failure,
        from_state: TaskState | None = TaskState.RUNNING,
    ) -> None:
        await connection.execute(
            self._sql["record_event"],
            self._group,
            work.id,
            event,
            from_state,
            to_state,
            row["version"],
            row["attempt"],
            row["run_no"],
            row.get("due_at"),
            failure.reason_code,
            failure.error_class,
            failure.error_message,
            self._worker_id,
            work.trace,
        )


def _flush_and_fetch(
    session: Session, commit: Callable[[Session], None] | None, sql: str, arguments: tuple[object, ...]
) -> RowMapping | None:
    """In one hop into SQLAlchemy's synchronous world, with the commit where there is nothing else to do."""
    session.flush()
    row = session.connection().exec_driver_sql(sql, arguments).mappings().first()
    if commit is not None and row is not None and _is_alone(row):
        commit(session)
    return row


def _is_alone(row: RowMapping) -> bool:
    """Whether nobody waits behind it."""
    return not (row["is_head"] or row["is_held"])
