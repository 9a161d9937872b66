"""Run the engine's own statements inside a handler's SQLAlchemy transaction."""

from typing import Any

from sqlalchemy import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection


class SessionConnection:
    """The few methods of an asyncpg connection the gates need, on a SQLAlchemy connection.

    Raw access to the driver would run outside SQLAlchemy's lazily begun transaction.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def fetchval(self, sql: str, /, *arguments: object) -> Any:
        """First column of the first row, or None."""
        row = (await self._run(sql, arguments)).first()
        return None if row is None else row[0]

    async def fetchrow(self, sql: str, /, *arguments: object) -> Any:
        """The first row by column name, or None."""
        return (await self._run(sql, arguments)).mappings().first()

    async def fetch(self, sql: str, /, *arguments: object) -> list[Any]:
        """All rows by column name."""
        return list((await self._run(sql, arguments)).mappings().all())

    async def execute(self, sql: str, /, *arguments: object) -> Any:
        """Run a statement for its effect."""
        return await self._run(sql, arguments)

    async def _run(self, sql: str, arguments: tuple[object, ...]) -> CursorResult[Any]:
        return await self._connection.exec_driver_sql(sql, arguments)
