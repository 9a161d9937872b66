"""The producer's verbs, by kind of target."""

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from towpath.errors import DedupeConflict, NoTransaction
from towpath.messages import HeadersInput
from towpath.outbox import buffer
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
from towpath.outbox.statements import Acceptance, accept, accept_async, insert_async
from towpath.store.callers import (
    AnyAsyncSession,
    AnySession,
    AsyncpgConnection,
    Awaited,
    Caller,
    async_session,
    is_async_session,
    is_asyncpg,
    sync_session,
)
from towpath.store.statements import DEFAULT_SCHEMA, in_schema
from towpath.tasks import SyncTaskHandle, TaskHandle, TaskId

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
        target: AnySession | AnyAsyncSession,
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
        target: AsyncpgConnection,
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
        NoTransaction, UnknownType, InvalidMessage or PayloadTooLarge; await it on an asyncpg
        connection.
        """
        _check(target)
        options = Options(key, headers, destination, message_id, due_when(at, delay))
        row = event_row(payload, options, self.max_payload_bytes)
        return self._write_one(target, row)

    @overload
    def emit_many(
        self,
        target: AnySession | AnyAsyncSession,
        payloads: Iterable[object],
        *,
        headers: HeadersInput | None = ...,
        at: datetime | None = ...,
        delay: str | timedelta | None = ...,
    ) -> list[UUID]: ...
    @overload
    def emit_many(
        self,
        target: AsyncpgConnection,
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
        if is_asyncpg(target):
            return self._insert(target, rows)
        return self._buffer(sync_session(target), rows)

    @overload
    def send(
        self,
        target: AnySession | AnyAsyncSession,
        payload: object,
        *,
        key: Key | Declared = ...,
        headers: HeadersInput | None = ...,
        message_id: UUID | None = ...,
    ) -> UUID: ...
    @overload
    def send(
        self,
        target: AsyncpgConnection,
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
        target: AnySession,
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
        if is_asyncpg(target):
            return self._submit_asyncpg(target, row)
        if is_async_session(target):
            return self._submit_async(target, row)
        session = sync_session(target)
        accepted, engine = self._accept(session, row)
        return SyncTaskHandle(TaskId(accepted.task_id), row.group, accepted.created, engine, self.schema)

    def _write_one(self, target: Caller, row: EventRow) -> UUID | Coroutine[Any, Any, UUID]:
        if is_asyncpg(target):
            return self._insert_one(target, row)
        return self._buffer(sync_session(target), [row])[0]

    def _buffer(self, session: Session, rows: Sequence[EventRow]) -> list[UUID]:
        buffer.add(session, rows, self.schema)
        return [UUID(row.message_id) for row in rows]

    async def _insert_one(self, connection: AsyncpgConnection, row: EventRow) -> UUID:
        return (await self._insert(connection, [row]))[0]

    async def _insert(self, connection: AsyncpgConnection, rows: Sequence[EventRow]) -> list[UUID]:
        _check(connection)  # it may be awaited later than it was called
        if rows:
            await insert_async(connection, rows, self.schema)
        return [UUID(row.message_id) for row in rows]

    def _accept(self, session: Session, row: TaskRow) -> tuple[Acceptance, Engine]:
        connection = buffer.connection_for_write(session, self.schema)
        accepted = _checked(accept(connection, row, self.schema), row)
        if accepted.created:
            buffer.add(session, row.outbox_rows(), self.schema)
        return accepted, connection.engine

    async def _submit_async(self, target: AnyAsyncSession, row: TaskRow) -> TaskHandle:
        accepted, engine = await async_session(target).run_sync(self._accept, row)
        readable = AsyncEngine(engine)
        return TaskHandle(TaskId(accepted.task_id), row.group, accepted.created, readable, self.schema)

    async def _submit_asyncpg(self, connection: AsyncpgConnection, row: TaskRow) -> TaskHandle:
        _check(connection)  # it may be awaited later than it was called
        accepted = _checked(await accept_async(connection, row, self.schema), row)
        if accepted.created:
            await insert_async(connection, row.outbox_rows(), self.schema)
        return TaskHandle(TaskId(accepted.task_id), row.group, accepted.created, connection, self.schema)


def _check(target: Caller) -> None:
    """Raise NoTransaction unless the target can hold a message now."""
    if not is_asyncpg(target):
        buffer.check_transaction(sync_session(target))
    elif not target.is_in_transaction():
        raise NoTransaction(
            "the connection is not in a transaction: begin one first,"
            " as in `async with connection.transaction():`"
        )


def _checked(accepted: Acceptance, row: TaskRow) -> Acceptance:
    if not accepted.same_body:
        raise DedupeConflict(
            f"{row.type} was submitted before under this dedupe key with another body,"
            f" as task {accepted.task_id}",
            str(accepted.task_id),
        )
    return accepted
