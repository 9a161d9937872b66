"""Reading the catalog: causes, rows, one row whole."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from uuid import UUID

from towpath.deadletters.criteria import Filter
from towpath.store.deadletters import Connection, DeadLetters
from towpath.store.statements import DEFAULT_SCHEMA

Row: TypeAlias = Mapping[str, Any]


class Catalog:
    """The dead letters of one installation, through one connection."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._store = DeadLetters(schema)

    async def causes(self, criteria: Filter, *, limit: int = 100) -> Sequence[Row]:
        """What the open ones died of, the most frequent first."""
        return await self._store.summarise(self._connection, criteria.parameters(), limit=limit)

    async def page(
        self,
        criteria: Filter,
        *,
        states: Sequence[str] = ("open",),
        below_id: int | None = None,
        limit: int = 50,
    ) -> Sequence[Row]:
        """The newest first, without payloads; go on with `below_id` = the last id seen."""
        return await self._store.find(
            self._connection, criteria.parameters(), states=states or None, below_id=below_id, limit=limit
        )

    async def one(self, reference: int | UUID) -> Sequence[Row]:
        """By catalog id, or by message id in every group where it died; with its payload."""
        if isinstance(reference, UUID):
            return await self._store.show(self._connection, message_id=reference)
        return await self._store.show(self._connection, letter_id=reference)
