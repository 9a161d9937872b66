"""How much of a group waits, runs or is in doubt."""

from dataclasses import dataclass
from typing import Final

from towpath.store.database import Database, store_errors
from towpath.store.statements import load

COUNTED: Final = 10_000
"""Counts stop here, so that counting stays cheap with a million waiting rows."""


@dataclass(frozen=True, slots=True)
class Census:
    """Rows of one group that are not finished, by state, and the ages that tell whether anything is stuck."""

    accepted: int
    running: int
    waiting: int
    parked: int
    unknown: int
    due: int
    """Of those waiting, the ones whose time has come."""
    dead_letters: int
    """Open ones."""
    oldest_running_seconds: float
    """Since its first start; 0 when nothing runs."""
    oldest_due_seconds: float
    """Since its due time; 0 when nothing is due."""


class CensusStore:
    """Reads the census of one group."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._statement = load("work", database.schema)["census"]
        self._group = group

    async def take(self) -> Census:
        """One statement, by index. Raises StoreUnavailable."""
        with store_errors():
            row = await self._database.pool.fetchrow(self._statement, self._group, COUNTED)
        return Census(**row)
