"""At-most-once effects: the marker before the call, and what became of those nobody saw end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from towpath.failures import Failure
from towpath.messages import dump_headers, load_headers
from towpath.states import TaskState
from towpath.store.database import Database, store_errors
from towpath.store.deaths import DeathStore
from towpath.store.gates import Executor, hold, leave
from towpath.store.statements import load
from towpath.store.work import Work

RESOLUTIONS: Final = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.WAITING, TaskState.DEAD)
"""What a task in doubt may become; WAITING: it did not happen, try again."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A task whose effect may or may not have happened."""

    work: Work
    step: str | None
    """The step of `call.once` that had begun."""


class _Superseded(Exception):
    """Rolls the transaction back: somebody else decided."""


class DoubtStore:
    """Marks, doubts and resolutions of one consumer group. Every method raises StoreUnavailable."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._sql = load("doubts", database.schema)
        self._work_sql = load("work", database.schema)
        self._group = group
        self._resolutions = Resolutions(database.schema, group)

    async def mark(self, work: Work, step: str) -> bool:
        """Commit that the effect begins. False: the token is gone or another message heads the lane.

        Then the effect must not begin, and nothing was written.
        """
        try:
            async with self._database.transaction() as connection:
                is_head = await hold(connection, self._work_sql, self._group, work.source, work.lane, work.id)
                version = await connection.fetchval(
                    self._sql["mark_effect"],
                    self._group,
                    work.id,
                    work.token,
                    step,
                    work.lane,
                    work.position,
                    work.payload,
                    work.content_type,
                    dump_headers(work.headers),
                    work.trace,
                )
                if version is None or not is_head:
                    raise _Superseded
        except _Superseded:
            return False
        return True

    async def unmark(self, work: Work) -> None:
        """The handler knows that the effect did not happen."""
        with store_errors():
            await self._database.pool.execute(self._sql["unmark_effect"], self._group, work.id, work.token)

    async def doubt(self, work: Work, failure: Failure, *, reconcile_after_seconds: float) -> bool:
        """RUNNING to UNKNOWN. False: the token is gone."""
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(
                self._sql["doubt"],
                self._group,
                work.id,
                work.token,
                reconcile_after_seconds,
                failure.reason_code,
                failure.error_class,
                failure.error_message,
                failure.fingerprint,
            )
            if row is None:
                return False
            await self._resolutions.record(
                connection, work.id, "task.unknown", TaskState.RUNNING, TaskState.UNKNOWN, row, failure
            )
        return True

    async def doubt_abandoned(self, task_id: UUID, token: UUID) -> bool:
        """The same for a dead worker's row. False: somebody else decided."""
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(self._sql["doubt_abandoned"], self._group, task_id, token)
            if row is None:
                return False
            failure = Failure("unknown", "worker_lost", error_class="WorkerLost")
            await self._resolutions.record(
                connection, task_id, "task.unknown", TaskState.RUNNING, TaskState.UNKNOWN, row, failure
            )
        return True

    async def doubt_given_up(self, claims: Collection[tuple[UUID, UUID]]) -> None:
        """The same for what its own worker gave up, by task id and token, where an effect had begun."""
        if claims:
            ids, tokens = sorted({id_ for id_, _ in claims}), sorted({token for _, token in claims})
            with store_errors():
                await self._database.pool.execute(self._sql["doubt_given_up"], self._group, ids, tokens)

    async def take(
        self, types: Sequence[str], *, base_seconds: float, cap_seconds: float, limit: int
    ) -> list[Doubt]:
        """Tasks to ask about now. A worker that dies while asking is followed by the next time."""
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["take_doubts"], self._group, list(types), base_seconds, cap_seconds, limit
            )
        return [Doubt(_work(row), row["effect_step"]) for row in rows]

    async def resolve(
        self, work: Work, state: TaskState, *, reason_code: str, result: bytes | None = None
    ) -> bool:
        """UNKNOWN to one of `RESOLUTIONS`. False: somebody else decided."""
        try:
            async with self._database.transaction() as connection:
                if not await self._resolutions.resolve(
                    connection, work, state, reason_code=reason_code, result=result
                ):
                    raise _Superseded
        except _Superseded:
            return False
        return True


class Resolutions:
    """Finds and resolves tasks in doubt inside the caller's transaction."""

    def __init__(self, schema: str, group: str) -> None:
        self._sql = load("doubts", schema)
        self._work_sql = load("work", schema)
        self._group = group
        self._deaths = DeathStore(schema, group)

    async def find(self, connection: Executor, task_id: UUID) -> Doubt | None:
        """One task in doubt; None when it is not, or not any more."""
        row = await connection.fetchrow(self._sql["doubtful"], self._group, task_id)
        if row is None or row["state"] != TaskState.UNKNOWN:
            return None
        return Doubt(_work(row), row["effect_step"])

    async def resolve(
        self,
        connection: Executor,
        work: Work,
        state: TaskState,
        *,
        reason_code: str,
        result: bytes | None = None,
        actor: str | None = None,
    ) -> bool:
        """UNKNOWN to one of `RESOLUTIONS`, with its history line.

        DEAD writes the catalog row and the broker copy; WAITING is due now, or PARKED behind another
        head of its lane. False: somebody else decided, and the caller rolls back.
        """
        if state not in RESOLUTIONS:
            raise ValueError(f"a task in doubt becomes one of {', '.join(RESOLUTIONS)}, not {state}")
        sql, lane = self._work_sql, work.lane
        if state is TaskState.WAITING:
            is_head = await hold(connection, sql, self._group, work.source, lane, work.id)
        else:
            head = (
                await connection.fetchval(sql["gate_head"], self._group, work.source, lane) if lane else None
            )
            is_head = head == work.id
        row = await connection.fetchrow(
            self._sql["resolve"],
            self._group,
            work.id,
            work.version,
            state.value,
            is_head,
            result,
            reason_code,
        )
        if row is None:
            return False
        failure = Failure("unknown", reason_code)
        became = TaskState(row["state"])
        await self.record(
            connection, work.id, "task.resolved", TaskState.UNKNOWN, became, row, failure, actor
        )
        if state is TaskState.DEAD:
            await self._deaths.bury(
                connection, work, failure, stage="handle", attempts=row["attempt"], origin=None
            )
        if state is not TaskState.WAITING and is_head and lane is not None:
            await leave(connection, sql, self._group, [(work.source, lane)])
        return True

    async def record(
        self,
        connection: Executor,
        task_id: UUID,
        event: str,
        from_state: TaskState,
        to_state: TaskState,
        row: Any,
        failure: Failure,
        actor: str | None = None,
    ) -> None:
        """One line of a task's history."""
        await connection.execute(
            self._work_sql["record_event"],
            self._group,
            task_id,
            event,
            from_state.value,
            to_state.value,
            row["version"],
            row["attempt"],
            row["run_no"],
            row.get("due_at"),
            failure.reason_code,
            failure.error_class,
            failure.error_message if actor is None else f"by {actor}",
            None,
            None,
        )


def _work(row: Any) -> Work:
    return Work(
        id=row["id"],
        type=row["type"],
        kind=row["kind"],
        source=row["source"],
        key=row["key"],
        lane=row["lane"],
        position=row["position"],
        payload=row["payload"],
        content_type=row["content_type"],
        headers=load_headers(row["headers"]),
        trace=row["trace"],
        is_from_broker=False,
        trigger="reconcile",
        created_at=row["created_at"],
        attempt=row["attempt"] - 1,
        version=row["version"],
        deliveries=row["deliveries"],
        run_no=row["run_no"],
        owner=row["owner"],
    )
