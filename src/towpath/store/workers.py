"""Worker leases: one row per process, renewed once a beat, never revived after it lapsed."""

import socket
from collections.abc import Mapping
from typing import Final
from uuid import UUID

import msgspec

from towpath.errors import LeaseLost
from towpath.store.database import Database, store_errors
from towpath.store.statements import load

_encode: Final = msgspec.json.Encoder().encode


class WorkerStore:
    """The lease of one worker, and what travels with its beat."""

    def __init__(self, database: Database, group: str, worker_id: UUID, lease_seconds: float) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds

    async def register(self) -> None:
        """Begin the lease under an id nobody used before. Raises StoreUnavailable."""
        with store_errors():
            await self._database.pool.execute(
                self._sql["register_worker"],
                self._worker_id,
                self._group,
                socket.gethostname(),
                self._lease_seconds,
            )

    async def beat(self) -> None:
        """Renew. Raises LeaseLost when the lease has lapsed, StoreUnavailable when nothing is known."""
        with store_errors():
            renewed = await self._database.pool.fetchval(
                self._sql["beat"], self._worker_id, self._lease_seconds
            )
        if renewed is None:
            raise LeaseLost(f"the lease of worker {self._worker_id} lapsed")

    async def cancellations(self) -> set[UUID]:
        """Running tasks of this worker that somebody asked to cancel."""
        with store_errors():
            rows = await self._database.pool.fetch(self._sql["cancellations"], self._worker_id)
        return {row["id"] for row in rows}

    async def report_progress(self, reports: Mapping[tuple[UUID, UUID], Mapping[str, object]]) -> None:
        """Latest progress by (task id, token); stale tokens are no-ops."""
        if not reports:
            return
        ordered = sorted(reports)
        with store_errors():
            await self._database.pool.execute(
                self._sql["report_progress"],
                self._group,
                [id_ for id_, _ in ordered],
                [token for _, token in ordered],
                [_encode(reports[key]).decode() for key in ordered],
            )

    async def leave(self) -> None:
        """End the lease at once, so that nobody waits for it to lapse."""
        with store_errors():
            await self._database.pool.execute(self._sql["leave"], self._worker_id)
