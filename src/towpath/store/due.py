"""Which waiting rows of a group are due, found without stepping over those that were started long ago.

What was started leaves an entry in the index, which nothing can remove while something holds back the vacuum
horizon. So a look begins at a floor, each type's own: at the first row that is due and was not started, else
a little before the last look. A row that was committed after its due time may lie below. Wider looks now and
then find it, no later again than it was late, and in the end a look at everything.
"""

import time
from collections.abc import Collection, Iterable
from typing import Any, Final

from towpath.errors import StoreUnavailable
from towpath.store.database import Database, store_errors
from towpath.store.statements import load

_MARGIN_SECONDS: Final = 1.0
"""How far before the last look a look begins."""
_WIDER_SECONDS: Final = (64.0, 16.0, 4.0)
"""How far before now it begins, once in a quarter of that time."""


class DueStore:
    """The due rows of one group, as one member sees them."""

    def __init__(self, database: Database, group: str, types: Iterable[str] = ()) -> None:
        self._database = database
        self._sql = load("work", database.schema)
        self._group = group
        self._own_types = frozenset(types)
        self._floors: dict[str, Any] = {}
        """By type; None: not known yet."""
        self._has_looked_everywhere = False
        self._widened_at = dict.fromkeys(_WIDER_SECONDS, float("-inf"))

    def expect(self, types: Iterable[str]) -> None:
        """Rows of these types may wait, whoever declared them."""
        for type_ in types:
            self._floors.setdefault(type_, None)

    async def look(self, limit: int, *, without: Collection[str] = ()) -> list[Any]:
        """Up to `limit` due rows whose lane is free, oldest first, of all types but those.

        Types that nobody here declared or claimed are known after `look_everywhere`. Raises StoreUnavailable.
        """
        if not self._has_looked_everywhere:
            await self.look_everywhere()
        asked = {type_: floor for type_, floor in self._floors.items() if type_ not in without}
        if not asked:
            return []
        try:
            with store_errors():
                rows = await self._database.pool.fetch(
                    self._sql["due"],
                    self._group,
                    limit,
                    list(asked),
                    list(asked.values()),
                    self._seconds_back(),
                    _MARGIN_SECONDS,
                )
        except StoreUnavailable:
            self._has_looked_everywhere = False  # it may come back as it was before
            raise
        due = []
        for row in rows:
            type_ = row["type"]
            if row["id"] is not None:
                due.append(row)
            elif self._floors.get(type_) == asked[type_]:  # else somebody looked everywhere meanwhile
                self._floors[type_] = row["due_at"]
        return due

    def _seconds_back(self) -> float:
        now = time.monotonic()
        back = next((s for s in _WIDER_SECONDS if now - self._widened_at[s] >= s / 4), _MARGIN_SECONDS)
        self._widened_at.update((s, now) for s in _WIDER_SECONDS if s <= back)
        return back

    async def look_everywhere(self) -> bool:
        """Let later looks find types and rows that they would miss. Returns whether there are any.

        Steps over all that was ever started, while vacuum is held back. Raises StoreUnavailable.
        """
        with store_errors():
            rows = await self._database.pool.fetch(self._sql["first_waiting"], self._group, _MARGIN_SECONDS)
        first = {row["type"]: row["due_at"] for row in rows}
        now = first.pop(None)
        floors = {
            type_: floor for type_, floor in self._floors.items() if type_ in self._own_types | first.keys()
        }
        if not self._has_looked_everywhere:
            floors |= dict.fromkeys(self._own_types - first.keys(), now)
        missed = {
            type_: min(due_at, now)
            for type_, due_at in first.items()
            if floors.get(type_) is None or due_at < floors[type_]
        }
        self._floors = floors | missed
        self._has_looked_everywhere = True
        return bool(missed)
