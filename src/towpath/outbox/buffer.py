"""Messages wait on the SQLAlchemy session and are written just before COMMIT is sent.

The last moment is the `commit` event of the connection: the session has flushed everything, all
listeners have run, and the row locks that decide the order are held. (`before_commit` of the
session comes before the final flush: ids drawn there overtake the rows they tell about.)

A message emitted inside a savepoint is dropped when that savepoint is rolled back. The listeners
are registered for all sessions, once, since a transaction may have begun before its first emit.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from towpath.errors import NoTransaction
from towpath.outbox import binds
from towpath.outbox.rows import EventRow
from towpath.outbox.statements import insert

_INFO_KEY: Final = "towpath.outbox"
_LAST_MOMENTS: Final = ("commit", "prepare_twophase")


@dataclass(slots=True)
class _Pending:
    """What one session has to write before its transaction commits."""

    rows: list[tuple[str, EventRow]] = field(default_factory=list)
    """With the schema they go to, in emit order."""
    marks: WeakKeyDictionary[SessionTransaction, int] | None = None
    """How many rows there were when a savepoint began; absent: none."""
    connections: list[Connection] = field(default_factory=list)
    """In use by this transaction."""
    guarded: set[Connection] = field(default_factory=set)
    is_checked: bool = False
    """Whether this transaction was found to be a real one."""
    is_committing: bool = False
    is_committed: bool = False


class _Guard:
    """Found by the connection that is about to commit, in its `info`.

    That belongs to the pooled connection and outlives this one, so nothing in it is trusted or kept
    alive: an entry counts only for the `Connection` it was made for.
    """

    def __init__(self, session: Session, connection: Connection) -> None:
        self._session = weakref.ref(session)
        self._connection = weakref.ref(connection)
        for name in _LAST_MOMENTS:
            if not event.contains(connection.engine, name, _on_last_moment):
                event.listen(connection.engine, name, _on_last_moment)
        others = connection.info.get(_INFO_KEY, ())
        connection.info[_INFO_KEY] = [*(other for other in others if other.is_for(connection)), self]

    def is_for(self, connection: Connection) -> bool:
        return self._connection() is connection

    def write(self) -> None:
        session = self._session()
        if session is not None and (pending := _pending(session)).rows:
            _write(session, pending)


def _on_last_moment(connection: Connection, *_: object) -> None:
    guards: list[_Guard] = connection.info.get(_INFO_KEY, [])
    for guard in guards:
        if guard.is_for(connection):
            try:
                guard.write()
            except BaseException:
                # SQLAlchemy takes the transaction for ended from here on; it must not reach the pool open.
                _end(connection)
                raise


def check_transaction(session: Session) -> None:
    """Raise NoTransaction unless the session is in a transaction that can hold a message.

    Costs nothing but the first time in a transaction; never waits for the database.
    """
    if not session.in_transaction():
        raise NoTransaction(
            "the session is not in a transaction: begin one first, as in `with session.begin():`"
        )
    pending = _pending(session)
    if pending.is_committed:
        raise NoTransaction("the session's transaction is committed already: emit before, or in the next one")
    if not pending.is_checked:
        _check_real(session, pending)
        pending.is_checked = True


def add(session: Session, rows: Iterable[EventRow], schema: str) -> None:
    """Keep rows until the session's transaction commits."""
    pending = _pending(session)
    pending.rows.extend((schema, row) for row in rows)
    if not pending.rows:
        return
    if pending.is_committing:
        _prepare_to_commit(session, pending)
    _guard(session, pending)


def connection_for_write(session: Session, schema: str) -> Connection:
    """The connection that holds the session's change so far; may connect. Raises NoTransaction."""
    pending = _pending(session)
    _reach_writer(session, pending, schema)
    return binds.holder(session, pending.connections, schema)


def _pending(session: Session) -> _Pending:
    pending: _Pending | None = session.info.get(_INFO_KEY)
    if pending is None:
        pending = session.info[_INFO_KEY] = _Pending()
    return pending


def _check_real(session: Session, pending: _Pending) -> None:
    bind = binds.route(session)
    if bind is None:
        return
    binds.check_options(session.execution_options, bind)
    for connection in pending.connections:
        if connection.engine is bind.engine:
            binds.check_connection(connection)


def _prepare_to_commit(session: Session, pending: _Pending) -> None:
    """SQLAlchemy commits what is connected: let the connection be there that will be needed."""
    is_flushed = not (session.new or session.dirty or session.deleted)
    if is_flushed or not pending.connections:
        _reach_writer(session, pending, pending.rows[0][0])


def _reach_writer(session: Session, pending: _Pending, schema: str) -> None:
    """Connect where the session sends writes, unless a connection has changes already."""
    if not pending.connections:
        _connect(session)
        return
    bind = binds.route(session)
    if bind is None or any(connection.engine is bind.engine for connection in pending.connections):
        return
    if not binds.changed(pending.connections, schema):
        session.connection(bind_arguments={"bind": bind})


def _connect(session: Session) -> None:
    """Let the session begin on the connection where it sends writes."""
    bind = binds.route(session)
    if bind is not None:
        session.connection(bind_arguments={"bind": bind})
        return
    session.flush()  # which knows where the classes live
    if not _pending(session).connections:
        raise NoTransaction("the session has several binds and changed none: emit on a session with one bind")


def _guard(session: Session, pending: _Pending) -> None:
    for connection in pending.connections:
        if connection not in pending.guarded:
            _Guard(session, connection)
            pending.guarded.add(connection)


def _write(session: Session, pending: _Pending) -> None:
    rows, pending.rows = pending.rows, []
    by_schema: dict[str, list[EventRow]] = {}
    for schema, row in rows:
        by_schema.setdefault(schema, []).append(row)
    for schema, of_schema in by_schema.items():
        insert(binds.holder(session, pending.connections, schema), of_schema, schema)


def _end(connection: Connection) -> None:
    """Roll back beneath SQLAlchemy's own books."""
    if connection.invalidated:
        return
    try:
        connection.connection.rollback()
    except connection.dialect.loaded_dbapi.Error:
        connection.invalidate()


def _on_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    pending = _pending(session)
    if connection not in pending.connections:
        pending.connections.append(connection)
    if pending.rows:
        _check_real(session, pending)
        _guard(session, pending)


def _on_create(session: Session, transaction: SessionTransaction) -> None:
    pending: _Pending | None = session.info.get(_INFO_KEY)
    if transaction.nested and pending is not None and pending.rows:
        if pending.marks is None:
            pending.marks = WeakKeyDictionary()
        pending.marks[transaction] = len(pending.rows)


def _on_before_commit(session: Session) -> None:
    pending = _pending(session)
    pending.is_committing = True
    if pending.rows:
        _prepare_to_commit(session, pending)


def _on_after_commit(session: Session) -> None:
    if session.in_nested_transaction():
        return
    pending = _pending(session)
    pending.is_committed = True
    # Left over only inside somebody else's transaction, where this commit reaches no connection.
    if pending.rows:
        if not all(connection.in_transaction() for connection in pending.connections):
            raise NoTransaction("emitted after the commit: the message is lost, emit before")
        _write(session, pending)


def _on_soft_rollback(session: Session, previous: SessionTransaction) -> None:
    pending: _Pending | None = session.info.get(_INFO_KEY)
    if pending is None:
        return
    ended: SessionTransaction | None = previous
    while ended is not None and not ended.nested:
        ended = ended.parent  # a failed flush ends the savepoint around it
    if ended is not None:
        del pending.rows[pending.marks.get(ended, 0) if pending.marks else 0 :]


def _on_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    pending: _Pending | None = session.info.get(_INFO_KEY)
    if pending is None:
        return
    if transaction.nested:
        pending.is_committing = False
    elif transaction.parent is None:
        del session.info[_INFO_KEY]


event.listen(Session, "after_begin", _on_begin)
event.listen(Session, "after_transaction_create", _on_create)
event.listen(Session, "before_commit", _on_before_commit)
event.listen(Session, "after_commit", _on_after_commit)
event.listen(Session, "after_soft_rollback", _on_soft_rollback)
event.listen(Session, "after_transaction_end", _on_transaction_end)
