"""The producer's verbs, by kind of target."""

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, cast, overload
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from towpath.messages import HeadersInput
from towpath.outbox import binds, buffer
from towpath.outbox.rows import (
    DECLARED,
    Declared,
    EventRow,
    Key,
    Options,
    TaskRow,
    due_when,
    event_row,
    sent_row,
    task_row,
)
from towpath.outbox.statements import Acceptance, accept, accept_async, insert, insert_async
from towpath.store.callers import (
    AnyAsyncSession,
    Awaited,
    Blocking,
    Caller,
    PlainAsyncConnection,
    PsycopgConnection,
    async_session,
    is_awaited,
    is_plain,
    is_plain_async,
    sync_session,
)
from towpath.store.statements import DEFAULT_SCHEMA, in_schema
from towpath.tasks import SyncTaskHandle, TaskHandle
from towpath.tasks.waiting import Waitable

DEFAULT_MAX_PAYLOAD_BYTES: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class Outbox:
    """Producing into another schema or with another limit; `towpath.emit` and its like use the defaults."""

    schema: str = DEFAULT_SCHEMA
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES

    def __post_init__(self) -> None:
        in_schema("", self.schema)

    @overload
    def emit(
        self,
        target: Blocking | AnyAsyncSession,
        payload: object,
        *,
        key: Key | Declared = ...,
        headers: HeadersInput | None = ...,
        destination: str | None = ...,
        message_id: UUID | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> UUID: ...
    @overload
    def emit(
        self,
        target: PlainAsyncConnection,
        payload: object,
        *,
        key: Key | Declared = ...,
        headers: HeadersInput | None = ...,
        destination: str | None = ...,
        message_id: UUID | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> Coroutine[Any, Any, UUID]: ...
    def emit(
        self,
        target: Caller,
        payload: object,
        *,
        key: Key | Declared = DECLARED,
        headers: HeadersInput | None = None,
        destination: str | None = None,
        message_id: UUID | None = None,
        at: datetime | None = None,
        delay: str | timedelta | None = None,
    ) -> UUID | Coroutine[Any, Any, UUID]:
        """Write an event in the caller's transaction and return its message id.

        `key` and `destination` are the declared ones unless given; `key=None` means no key. The
        current trace context goes along. With `at`, an aware datetime, or `delay`, a duration from
        the INSERT by the database's clock, it is published then and not before. Raises
        NoTransaction, UnknownType, InvalidMessage or PayloadTooLarge; await it on an async
        connection (a session, also an async one, answers at once).
        """
        _check(target)
        options = Options(key, headers, destination, message_id, due_when(at, delay))
        row = event_row(payload, options, self.max_payload_bytes)
        return self._write_one(target, row)

    @overload
    def emit_many(
        self,
        target: Blocking | AnyAsyncSession,
        payloads: Iterable[object],
        *,
        headers: HeadersInput | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> list[UUID]: ...
    @overload
    def emit_many(
        self,
        target: PlainAsyncConnection,
        payloads: Iterable[object],
        *,
        headers: HeadersInput | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> Coroutine[Any, Any, list[UUID]]: ...
    def emit_many(
        self,
        target: Caller,
        payloads: Iterable[object],
        *,
        headers: HeadersInput | None = None,
        at: datetime | None = None,
        delay: str | timedelta | None = None,
    ) -> list[UUID] | Coroutine[Any, Any, list[UUID]]:
        """Write events in their order, with one statement (per 32 MiB); if one is refused, none.

        `headers`, and `at` or `delay`, are those of each. Returns the message ids; otherwise like `emit`.
        """
        _check(target)
        options = Options(headers=headers, due=due_when(at, delay))
        rows = [event_row(payload, options, self.max_payload_bytes) for payload in payloads]
        return self._write(target, rows)

    @overload
    def send(
        self,
        target: Blocking | AnyAsyncSession,
        payload: object,
        *,
        key: Key | Declared = ...,
        headers: HeadersInput | None = ...,
        message_id: UUID | None = ...,
    ) -> UUID: ...
    @overload
    def send(
        self,
        target: PlainAsyncConnection,
        payload: object,
        *,
        key: Key | Declared = ...,
        headers: HeadersInput | None = ...,
        message_id: UUID | None = ...,
    ) -> Coroutine[Any, Any, UUID]: ...
    def send(
        self,
        target: Caller,
        payload: object,
        *,
        key: Key | Declared = DECLARED,
        headers: HeadersInput | None = None,
        message_id: UUID | None = None,
    ) -> UUID | Coroutine[Any, Any, UUID]:
        """Send a task to a group with another database: the body travels, its row appears on arrival.

        Otherwise like `emit`. A group that shares this database is given work by `submit`.
        """
        _check(target)
        row = sent_row(payload, Options(key, headers, None, message_id), self.max_payload_bytes)
        return self._write_one(target, row)

    @overload
    def submit(
        self,
        target: Blocking,
        payload: object,
        *,
        owner: str = ...,
        deadline: datetime | timedelta | str | None = ...,
        dedupe_key: str | None = ...,
        headers: HeadersInput | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> SyncTaskHandle: ...
    @overload
    def submit(
        self,
        target: Awaited,
        payload: object,
        *,
        owner: str = ...,
        deadline: datetime | timedelta | str | None = ...,
        dedupe_key: str | None = ...,
        headers: HeadersInput | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> Coroutine[Any, Any, TaskHandle]: ...
    def submit(
        self,
        target: Caller,
        payload: object,
        *,
        owner: str = "",
        deadline: datetime | timedelta | str | None = None,
        dedupe_key: str | None = None,
        headers: HeadersInput | None = None,
        at: datetime | None = None,
        delay: str | timedelta | None = None,
    ) -> SyncTaskHandle | Coroutine[Any, Any, TaskHandle]:
        """Give a task to its group, in the caller's transaction: its row is there, state ACCEPTED.

        The same `unique` fields, or the same `dedupe_key`, submitted again for one `owner` return
        the first task with `created=False`, also concurrently (the second waits for the first to
        commit). `deadline` is an instant or a duration from now; past it the task ends EXPIRED.
        With `at` or `delay`, as in `emit`, the task is WAITING and starts then; a key orders it from
        there on.
        Raises DedupeConflict when the repeat has another body, and what `emit` raises.
        """
        _check(target)
        row = task_row(
            payload,
            Options(headers=headers, due=due_when(at, delay)),
            self.max_payload_bytes,
            owner=owner,
            deadline=deadline,
            dedupe_key=dedupe_key,
        )
        if is_awaited(target):
            return self._submit_awaited(target, row)
        accepted, engine = self._accept(target, row)
        return SyncTaskHandle(accepted.task_id, row.group, accepted.created, engine, self.schema)

    def _write_one(self, target: Caller, row: EventRow) -> UUID | Coroutine[Any, Any, UUID]:
        if is_plain_async(target):
            return self._insert_one(target, row)
        return self._keep(target, [row])[0]

    def _write(
        self, target: Caller, rows: Sequence[EventRow]
    ) -> list[UUID] | Coroutine[Any, Any, list[UUID]]:
        return self._insert(target, rows) if is_plain_async(target) else self._keep(target, rows)

    def _keep(self, target: Caller, rows: Sequence[EventRow]) -> list[UUID]:
        """Write now on a connection; until the commit of a session."""
        if is_plain(target):
            insert(target, rows, self.schema)
        else:
            buffer.add(sync_session(target), rows, self.schema)
        return [UUID(row.message_id) for row in rows]

    async def _insert_one(self, connection: PlainAsyncConnection, row: EventRow) -> UUID:
        return (await self._insert(connection, [row]))[0]

    async def _insert(self, connection: PlainAsyncConnection, rows: Sequence[EventRow]) -> list[UUID]:
        _check(connection)  # it may be awaited later than it was called
        await insert_async(connection, rows, self.schema)
        return [UUID(row.message_id) for row in rows]

    def _accept(self, target: Blocking, row: TaskRow) -> tuple[Acceptance, Engine | PsycopgConnection]:
        if is_plain(target):
            accepted = accept(target, row, self.schema)
            if accepted.created:
                insert(target, row.outbox_rows(), self.schema)
            return accepted, target.engine if isinstance(target, Connection) else target
        session = sync_session(target)
        connection = buffer.connection_for_write(session, self.schema)
        accepted = accept(connection, row, self.schema)
        if accepted.created:
            buffer.add(session, row.outbox_rows(), self.schema)
        return accepted, connection.engine

    async def _submit_awaited(self, target: Awaited, row: TaskRow) -> TaskHandle:
        _check(target)  # it may be awaited later than it was called
        readable: Waitable
        if is_plain_async(target):
            accepted = await accept_async(target, row, self.schema)
            if accepted.created:
                await insert_async(target, row.outbox_rows(), self.schema)
            readable = target.engine if isinstance(target, AsyncConnection) else target
        else:
            accepted, engine = await async_session(target).run_sync(self._accept, row)
            readable = AsyncEngine(cast("Engine", engine))
        return TaskHandle(accepted.task_id, row.group, accepted.created, readable, self.schema)


def _check(target: Caller) -> None:
    """Raise NoTransaction unless the target can hold a message now."""
    if is_plain(target) or is_plain_async(target):
        binds.check_plain(target)
    else:
        buffer.check_transaction(sync_session(target))
