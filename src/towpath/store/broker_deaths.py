"""Messages that the broker dead-lettered by itself: catalog row and end of the task in one transaction."""

from typing import Any
from uuid import UUID

from towpath.failures import Failure
from towpath.messages import load_headers
from towpath.states import TaskState
from towpath.store.database import Database
from towpath.store.deaths import DeathStore
from towpath.store.gates import Connection, leave
from towpath.store.statements import load
from towpath.store.work import Standing, Work


class _Moved(Exception):
    """Rolls the transaction back: somebody moved the task meanwhile."""


class BrokerDeathStore:
    """Takes them in for one worker of one consumer group. Lock order: the lane's gate, then the task."""

    def __init__(self, database: Database, group: str, worker_id: UUID) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._worker_id = worker_id
        self._deaths = DeathStore(database.schema, group)

    async def take(self, work: Work, failure: Failure, *, origin: str | None) -> Standing | None:
        """Bury it, where it has no task or one that waits for the broker. None: it is buried now.

        SETTLED: the task ended, or goes on from the database. BUSY: it runs, and its worker lives.
        MISSING: a submitted task without its row. A repeat changes nothing. Raises StoreUnavailable.
        """
        while True:
            try:
                async with self._database.transaction() as connection:
                    row = await connection.fetchrow(self._sql["broker_death"], self._group, work.id)
                    if row is None and not work.has_body:
                        return Standing.MISSING
                    if row is not None and (standing := _standing(row)) is not None:
                        return standing
                    await self._bury(connection, work, failure, row, origin)
            except _Moved:
                continue
            return None

    async def _bury(
        self, connection: Connection, work: Work, failure: Failure, row: Any, origin: str | None
    ) -> None:
        why = (failure.reason_code, failure.error_class, failure.error_message, failure.fingerprint)
        head = None
        if row is None:
            ended = await connection.fetchrow(
                self._sql["insert_broker_death"],
                self._group,
                work.id,
                work.type,
                work.kind,
                work.source,
                work.key,
                work.lane,
                work.position,
                *why,
            )
        else:
            work.lane = row["lane"] or work.lane
            if not work.has_body:
                work.payload, work.content_type = row["payload"], row["content_type"]
                work.headers = load_headers(row["headers"])
            if work.lane is not None:
                gate = (self._group, row["source"], work.lane)
                head = await connection.fetchval(self._sql["gate_head"], *gate)
            arguments = (work.id, row["version"], work.lane, work.position, *why)
            ended = await connection.fetchrow(self._sql["end_broker_death"], self._group, *arguments)
        if ended is None:
            raise _Moved
        await connection.execute(
            self._sql["record_event"],
            self._group,
            work.id,
            "task.dead",
            None if row is None else row["state"],
            TaskState.DEAD.value,
            ended["version"],
            ended["attempt"],
            ended["run_no"],
            None,
            failure.reason_code,
            failure.error_class,
            failure.error_message,
            self._worker_id,
            work.trace,
        )
        await self._deaths.bury(
            connection, work, failure, stage="broker", attempts=ended["attempt"], origin=origin
        )
        if row is not None and head == work.id and work.lane is not None:
            await leave(connection, self._sql, self._group, [(row["source"], work.lane)])


def _standing(row: Any) -> Standing | None:
    """None: it waits for the broker's message."""
    if row["held_by"] == "database" or row["state"] not in (TaskState.ACCEPTED, TaskState.RUNNING):
        return Standing.SETTLED
    if row["state"] == TaskState.RUNNING and row["worker_is_alive"]:
        return Standing.BUSY
    return None
