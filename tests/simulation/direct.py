"""The model of Postgres without a network: statements at once, for comparison with the real one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.simulation.naming import statement_of
from tests.simulation.postgres import Postgres, Transaction
from towpath.store.statements import DEFAULT_SCHEMA


class Direct:
    """Statements as a connection runs them: in the transaction given, else each in one of its own."""

    def __init__(self, schema: Postgres, transaction: Transaction | None = None) -> None:
        self._schema = schema
        self._transaction = transaction

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        statement = statement_of(self._schema, sql)
        if self._transaction is not None:
            return statement(self._transaction, *arguments)
        transaction = self._schema.begin()
        try:
            rows = statement(transaction, *arguments)
        except BaseException:
            self._schema.rollback(transaction)
            raise
        self._schema.commit(transaction)
        return rows

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        rows = await self.fetch(sql, *arguments)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        row = await self.fetchrow(sql, *arguments)
        return None if row is None else next(iter(row.values()))

    execute = fetch


class DirectDatabase:
    """What the stores of the consumer use of `Database`."""

    schema = DEFAULT_SCHEMA

    def __init__(self, model: Postgres) -> None:
        self._model = model
        self.pool = Direct(model)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Direct]:
        transaction = self._model.begin()
        try:
            yield Direct(self._model, transaction)
        except BaseException:
            self._model.rollback(transaction)
            raise
        self._model.commit(transaction)
