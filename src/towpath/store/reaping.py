"""What dead workers and vanished messages leave behind, put back to work by any member."""

from typing import Any, Final
from uuid import UUID

from towpath.store.database import Database, store_errors
from towpath.store.doubts import DoubtStore
from towpath.store.gates import hold, leave
from towpath.store.statements import load

_FIRST_GATE: Final = ("", "")


class _NothingToDo(Exception):
    """Rolls a transaction back: somebody else was quicker."""


class ReapStore:
    """Every statement re-checks what it found, so any number of members may reap at once."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._doubts = DoubtStore(database, group)
        self._gates_upto = _FIRST_GATE
        """Source and lane."""
        self._done_with: set[UUID] = set()
        """Dead workers that left nothing."""

    async def reap_abandoned(self, limit: int, *, everywhere: bool = False) -> int:
        """RUNNING rows held by the database under dead workers go back to waiting. Returns how many.

        A worker that died long ago and left nothing is not looked at again but for `everywhere`, which finds
        also what was left by one whose own row is gone.
        """
        with store_errors():
            pool = self._database.pool
            rows = await (
                pool.fetch(self._sql["abandoned_anywhere"], self._group, limit)
                if everywhere
                else pool.fetch(self._sql["abandoned"], self._group, limit, list(self._done_with))
            )
        count = 0
        for row in rows:
            if row["id"] is None:
                if row["is_long_dead"]:
                    self._done_with.add(row["worker"])
            elif row["effect_state"] is not None:
                count += await self._doubts.doubt_abandoned(row["id"], row["token"])
            else:
                count += await self._back("reap", row, row["token"], row["worker"])
        return count

    async def release_lost(self, older_than_seconds: float, limit: int) -> int:
        """Keys wait no longer for messages of long dead workers that never came again. Returns how many."""
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["release_lost"], self._group, older_than_seconds, limit
            )
        return len(rows)

    async def redrive_lost(self, older_than_seconds: float, limit: int, *, is_ordered: bool) -> int:
        """Submitted tasks whose published message never arrived start from their row. Returns how many."""
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["lost"], self._group, older_than_seconds, limit, is_ordered
            )
        count = 0
        for row in rows:
            count += await self._back("redrive", row, row["lane"])
        return count

    async def _back(self, statement: str, row: Any, *known: object) -> bool:
        """Under the lane's gate: WAITING as its head, PARKED behind another; rolled back if too late."""
        id_ = row["id"]
        try:
            async with self._database.transaction() as connection:
                is_head = await hold(connection, self._sql, self._group, row["source"], row["lane"], id_)
                moved = await connection.fetchval(self._sql[statement], self._group, id_, is_head, *known)
                if moved is None:
                    raise _NothingToDo
        except _NothingToDo:
            return False
        return True

    async def repair_gates(self, limit: int) -> int:
        """Of the next `limit` gates, those whose head was deleted move on. Returns how many.

        Each call goes on where the last one ended: there may be as many gates as keys that wait.
        """
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["stale_gates"], self._group, *self._gates_upto, limit
            )
        self._gates_upto = next(((row["source"], row["lane"]) for row in rows if row["is_last"]), _FIRST_GATE)
        count = 0
        for row in rows:
            if not row["is_stale"]:
                continue
            source, lane, head = row["source"], row["lane"], row["head"]
            async with self._database.transaction() as connection:
                locked = await connection.fetchval(self._sql["gate_head"], self._group, source, lane)
                still = await connection.fetch(self._sql["states"], self._group, [head])
                is_stale = not still or still[0]["state"] not in ("WAITING", "RUNNING", "UNKNOWN", "ACCEPTED")
                if locked == head and is_stale:
                    await leave(connection, self._sql, self._group, [(source, lane)])
                    count += 1
        return count

    async def expire_finished(self, retention_seconds: float, limit: int) -> int:
        """Delete finished rows past their retention. Returns how many; fewer than `limit`: all done."""
        async with self._database.transaction() as connection:
            await connection.execute("set local enable_bitmapscan = on")
            count: int = await connection.fetchval(
                self._sql["expire_finished"], self._group, retention_seconds, limit
            )
        return count

    async def forget_workers(self) -> None:
        """Drop rows of workers dead for a day."""
        with store_errors():
            await self._database.pool.execute(self._sql["forget_workers"], self._group)
