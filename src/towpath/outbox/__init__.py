"""Producing: messages written in the caller's transaction, so that they exist if and only if it commits.

```python
async with session.begin():
    session.add(Order(id=order_id))
    emit(session, OrderPlaced(order_id=order_id, amount=amount))
    handle = await submit(session, Charge(order_id=order_id, amount=amount))
```

With a SQLAlchemy session (sync or async) `emit` and `send` return at once and the message is
written just before COMMIT, behind everything the session flushes; `submit` asks the database at
the call. On a connection without a session (SQLAlchemy Core, asyncpg, psycopg 3) all of them write at
the call; async ones are awaited.

Order: of transactions that write or lock the same row before they emit, and hold it to COMMIT,
messages arrive in commit order. Bad input is a `UsageError` raised before the database is asked:
the transaction is still usable.
"""

from towpath.outbox.outbox import DEFAULT_MAX_PAYLOAD_BYTES, Outbox
from towpath.outbox.rows import DECLARED, Declared, Key

__all__ = [
    "DECLARED",
    "DEFAULT_MAX_PAYLOAD_BYTES",
    "Declared",
    "Key",
    "Outbox",
    "emit",
    "emit_many",
    "send",
    "submit",
]

_default = Outbox()
emit = _default.emit
emit_many = _default.emit_many
send = _default.send
submit = _default.submit
