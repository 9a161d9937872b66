"""Worker leases: one row per process, renewed once a beat, never revived after it lapsed."""

import socket
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from towpath.errors import LeaseLost
from towpath.store.database import Database, store_errors
from towpath.store.groups import GroupStore, Terms
from towpath.store.installed import ensure_installed, library_version
from towpath.store.statements import load

_encode: Final = msgspec.json.Encoder().encode


class WorkerStore:
    """The lease of one worker, and what travels with its beat."""

    def __init__(
        self, database: Database, group: str, worker_id: UUID, lease_seconds: float, terms: Terms
    ) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._terms = terms
        self._groups = GroupStore(group, database.schema)

    async def register(self) -> None:
        """Begin the lease under an id nobody used before.

        Raises StoreUnavailable, and GroupMismatch where the group does not agree to the member's terms.
        """
        async with self._database.transaction() as connection:
            await self._groups.agree(connection, self._terms)
            await connection.execute(
                self._sql["register_worker"],
                self._worker_id,
                self._group,
                socket.gethostname(),
                self._lease_seconds,
                list(self._terms.types),
                library_version(),
            )

    async def others(self) -> Sequence[tuple[str, list[str]]]:
        """Living members that handle other types: host, and its types. Raises StoreUnavailable."""
        with store_errors():
            return await self._groups.others(self._database.pool, self._terms.types)

    async def ensure_installed(self) -> None:
        """Raise SchemaMismatch when the schema was changed into one that this library cannot work with."""
        with store_errors():
            await ensure_installed(self._database.pool, self._database.schema)

    async def beat(self) -> None:
        """Renew. Raises LeaseLost when the lease has lapsed, StoreUnavailable when nothing is known."""
        with store_errors():
            renewed = await self._database.pool.fetchval(
                self._sql["beat"], self._worker_id, self._lease_seconds
            )
        if renewed is None:
            raise LeaseLost(f"the lease of worker {self._worker_id} lapsed")

    async def cancellations(self, running: Sequence[UUID]) -> set[UUID]:
        """Those of these tasks that this worker runs and somebody asked to cancel."""
        if not running:
            return set()
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["cancellations"], self._group, running, self._worker_id
            )
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
