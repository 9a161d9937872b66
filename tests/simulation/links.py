"""Connections to the model of Postgres, with all that can happen on the way there and back."""

import asyncio
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import asyncpg

from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimLoop
from tests.simulation.naming import statement_of
from tests.simulation.postgres import Blocked, Postgres, Transaction

_LOCK_SECONDS = 5.0
_UNHEARD_SHARE = 0.3
_IDLE_SECONDS = 10.0
"""How long a transaction of a silent client lives."""


class Server:
    """A Postgres that listens, or does not."""

    def __init__(self, loop: SimLoop, schema: Postgres, rnd: random.Random) -> None:
        self.loop = loop
        self.schema = schema
        self.rnd = rnd
        self.up = asyncio.Event()
        self.up.set()
        self.connections: set[Connection] = set()
        self.opened = 0
        self.unheard: set[Process | None] = set()
        """Whose connections break now and then before an answer came."""
        self._is_hidden = False
        """A pooler keeps what is asked until the server is back."""

    async def connect(
        self,
        *_: object,
        server_settings: Mapping[str, str],
        command_timeout: float,
        kind: "type[Connection] | None" = None,
        **__: object,
    ) -> "Connection":
        process = PROCESS.get()
        await asyncio.sleep(self.delay())
        if not self.is_up:
            raise ConnectionRefusedError("the server is down")
        is_durable = server_settings.get("synchronous_commit") != "off"
        connection = (kind or Connection)(self, process, command_timeout, is_durable=is_durable)
        self.connections.add(connection)
        return connection

    @property
    def is_up(self) -> bool:
        return self.up.is_set()

    @property
    def keeps_waiting(self) -> bool:
        return self._is_hidden and not self.is_up

    def delay(self) -> float:
        """Seconds on the way, in one direction."""
        return self.rnd.expovariate(1 / 0.004)

    def stall(self, process: Process, seconds: float) -> None:
        """Nothing passes for a while on some connections of a host."""
        for connection in sorted(self.connections, key=lambda each: each.number):
            if connection.process is process and self.rnd.random() < 0.5:
                connection.stalls_until = self.loop.time() + seconds

    def cut(self, which: Callable[["Connection"], bool]) -> None:
        """Break connections: what is on its way to the server may still arrive."""
        for connection in sorted(filter(which, self.connections), key=lambda each: each.number):
            connection.break_off()

    def crash(self, *, is_hidden: bool) -> None:
        """Be restarted; a pooler hides that from connections at rest."""
        self.up.clear()
        self._is_hidden = is_hidden
        self.schema.crash()
        self.cut(lambda connection: not is_hidden or connection.is_busy)

    def fail_over(self, lag_seconds: float) -> None:
        """Be replaced by a standby that lacks the last commits."""
        self.up.clear()
        self._is_hidden = False
        self.schema.fail_over(lag_seconds)
        self.cut(lambda _: True)

    async def return_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.up.set()


class Connection:
    """What the engines use of an asyncpg connection."""

    lock_seconds = _LOCK_SECONDS
    """How long the server lets a statement wait for a lock."""

    def __init__(self, server: Server, process: Process | None, timeout: float, *, is_durable: bool) -> None:
        self._server = server
        self._process = process
        self._timeout = timeout
        self._is_durable = is_durable
        self._transaction: Transaction | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._is_closed = False
        server.opened += 1
        self.number = server.opened
        self.stalls_until = 0.0
        self._sent_until = 0.0
        """When the last statement arrives: what is written to a connection keeps its order."""

    def _delay(self) -> float:
        return max(0.0, self.stalls_until - self._server.loop.time()) + self._server.delay()

    @property
    def process(self) -> Process | None:
        return self._process

    @property
    def is_busy(self) -> bool:
        return self._answer is not None or self._transaction is not None

    def is_closed(self) -> bool:
        return self._is_closed

    def terminate(self) -> None:
        self._is_closed = True
        self._server.connections.discard(self)
        if self._transaction is not None:
            self._server.schema.rollback(self._transaction)
            self._transaction = None

    def break_off(self) -> None:
        """The other side is gone."""
        self.terminate()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(asyncpg.ConnectionDoesNotExistError("the connection was cut"))

    async def set_type_codec(self, *_: object, **__: object) -> None:
        """Timestamps are integers anyway."""

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        return await self._ask(lambda transaction: self._call(sql, transaction, arguments))

    async def fetchrow(self, sql: str, *arguments: Any) -> Any:
        rows = await self.fetch(sql, *arguments)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        if sql.startswith("select current_setting"):
            return "force_generic_plan"
        row = await self.fetchrow(sql, *arguments)
        return None if row is None else next(iter(row.values()))

    execute = fetch

    def transaction(self) -> "Explicit":
        return Explicit(self)

    def _call(self, sql: str, transaction: Transaction, arguments: tuple[Any, ...]) -> Any:
        savepoint = len(transaction.undo)
        self._server.schema.asker = self._process
        try:
            return statement_of(self._server.schema, sql)(transaction, *arguments)
        except Exception:
            transaction.back_to(savepoint)
            raise

    async def begin(self) -> None:
        await self._ask(lambda _: None)
        transaction = self._transaction = self._server.schema.begin(is_durable=self._is_durable)

        def end() -> None:
            if self._transaction is transaction:
                self.break_off()

        self._server.loop.call_later(_IDLE_SECONDS, end, context=OUTSIDE)

    async def commit(self) -> None:
        transaction, schema = self._transaction, self._server.schema

        def end(_: object) -> None:
            if transaction is None or transaction.is_over:
                raise asyncpg.InFailedSQLTransactionError("the transaction is gone")
            schema.commit(transaction)
            self._transaction = None

        await self._ask(end)

    async def rollback(self) -> None:
        transaction, schema = self._transaction, self._server.schema
        if transaction is None or transaction.is_over:  # an error has ended it
            self._transaction = None
            return

        def end(_: object) -> None:
            schema.rollback(transaction)
            self._transaction = None

        await self._ask(end)

    async def _ask(self, act: Callable[[Transaction], Any]) -> Any:
        """Have the server do something; its answer may be lost after that."""
        if self._is_closed:
            raise asyncpg.InterfaceError("the connection is closed")
        loop, server = self._server.loop, self._server
        answer = self._answer = loop.create_future()
        until = loop.time() + self.lock_seconds
        belongs_to = self._transaction

        def arrive(*, has_waited: bool = False) -> None:
            if has_waited and answer.done():  # given up meanwhile, and cancelled at the server
                return
            if self._is_closed and server.rnd.random() < 0.5:
                return
            if server.keeps_waiting:
                loop.call_later(0.02, arrive, context=OUTSIDE)
                return
            if not server.is_up or (belongs_to is not None and belongs_to.is_over):
                self.break_off()
                return
            try:
                result, error = self._run(act)
            except Blocked:
                if loop.time() < until:
                    loop.call_later(0.02, partial(arrive, has_waited=True), context=OUTSIDE)
                    return
                result, error = None, asyncpg.LockNotAvailableError("canceling statement due to lock timeout")
            if self._process in server.unheard and server.rnd.random() < _UNHEARD_SHARE:
                self.break_off()
                return
            loop.call_later(self._delay(), tell, answer, result, error, context=OUTSIDE)

        self._sent_until = max(loop.time() + self._delay(), self._sent_until + 1e-6)
        loop.call_at(self._sent_until, arrive, context=OUTSIDE)
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        finally:
            self._answer = None

    def _run(self, act: Callable[[Transaction], Any]) -> tuple[Any, Exception | None]:
        """What comes of it, in the transaction that is open or in one of its own. Raises Blocked."""
        own, schema = self._transaction, self._server.schema
        transaction = own or schema.begin(is_durable=self._is_durable)
        try:
            result = act(transaction)
            if own is None:
                schema.commit(transaction)
        except Blocked:
            if own is None:
                schema.rollback(transaction)
            raise
        except Exception as error:  # noqa: BLE001 - it is the client's, as from a server
            schema.rollback(transaction)
            return None, error
        return result, None


class Explicit:
    """A transaction begun by hand."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def start(self) -> None:
        await self._connection.begin()

    async def commit(self) -> None:
        await self._connection.commit()

    async def __aenter__(self) -> None:
        await self.start()

    async def __aexit__(self, error: object, *_: object) -> None:
        await (self._connection.commit() if error is None else self._connection.rollback())


def tell(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Let an answer arrive, if somebody waits for it still."""
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
