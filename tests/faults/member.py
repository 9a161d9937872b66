"""A consumer group with a handler of each kind of effect, which does as its messages say.

Failing handlers fail after their writes and calls, so that whatever should be rolled back or repeated under
one key really is.
"""

import asyncio
import logging
import os
import threading
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text

from tests.faults import defects, freezing, holding
from tests.faults.ledger import Lapsed, Ledger, now
from tests.faults.messages import RETENTION_VARIABLE, Kind, declare
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.consumer import engine
from towpath.context import Attempt, Batch, Call, OnceCall, SyncTx, Tx
from towpath.outcomes import Dead, DidNotHappen, Happened, Reject, StillUnknown, Verdict

GROUP: Final = os.environ["TOWPATH_TEST_GROUP"]
(
    Transactional,
    Plain,
    Batched,
    Idempotent,
    AtMostOnce,
    Submitted,
    Requested,
    Garbled,
) = declare(GROUP, is_reader=True)
_FAILING: Final = 2
_TIMEOUT: Final = "4s"
_LONG_SECONDS: Final = 600.0
_LINGER_SECONDS: Final = 1.5
_DONE: Final = text("insert into done (id, kind, at) values (:id, :kind, :at)")

defects.plant()
freezing.arm()
holding.tell()
ledger = Ledger.of_this_process()


class _Lapses(logging.Handler):
    """Writes down when this member noticed that it had lost its lease: others may have taken over."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "worker.lease_lost":
            ledger.write(Lapsed(ledger.process, now()))


logging.getLogger(engine.__name__).addHandler(_Lapses())
app = App(
    GROUP,
    retry=RetryPolicy(attempts=20, max_age="1h", base="50ms", cap="1s"),
    retention=os.environ.get(RETENTION_VARIABLE, "7d"),
)


class PassingTrouble(Exception):
    """Gone at a later attempt."""


@app.transactional(timeout=_TIMEOUT)
async def transactional(message: Transactional, tx: Tx) -> Reject | None:
    """An effect in the same database."""
    return await _write(message, tx, "transactional")


@app.transactional(timeout=_TIMEOUT)
async def submitted(message: Submitted, tx: Tx) -> Reject | None:
    """The same for a task."""
    return await _write(message, tx, "submitted")


@app.transactional()
def plain(message: Plain, tx: SyncTx) -> Reject | None:
    """The same in a thread."""
    ledger.begun(tx.message_id, "plain")
    tx.session.execute(_DONE, _done(tx.message_id, "plain"))
    threading.Event().wait(0.01)  # libfaketime breaks `time.sleep`
    return _outcome(message, tx.message_id)


@app.batch(max_size=20, max_wait="20ms")
async def batch(batch: Batch[Batched], tx: Tx) -> None:
    """The same for many at once."""
    for message in batch:
        ledger.begun(message.id, "batch")
        await tx.session.execute(_DONE, _done(message.id, "batch"))
    for message in batch:
        _outcome(message.payload, message.id)


@app.idempotent(timeout=_TIMEOUT)
async def idempotent(message: Idempotent, call: Call) -> Reject | None:
    """An outside call under a stable key, and a row that is written with the end of the task."""
    ledger.begun(call.message_id, "idempotent")
    with ledger.call(call.message_id, "idempotent", call.idempotency_key("act")):
        rejection = await _meet(message, call.attempt)
        if rejection is None:
            async with call.transaction() as tx:
                await tx.session.execute(_DONE, _done(call.message_id, "idempotent"))
    return rejection


@app.idempotent()
async def requested(message: Requested, call: Call) -> str:
    """A task that is submitted more than once."""
    ledger.begun(call.message_id, "requested")
    with ledger.call(call.message_id, "requested", call.idempotency_key()):
        payload: Any = message
        return str(payload.request)


async def find(call: OnceCall) -> Verdict[Reject | None]:
    """The outside system tells of calls that were made; of others only when no process is frozen any more."""
    if ledger.has_called(call.message_id):
        return Happened(None)
    return DidNotHappen() if ledger.is_calm else StillUnknown()


@app.at_most_once(reconcile=find, timeout=_TIMEOUT)
async def at_most_once(message: AtMostOnce, call: OnceCall) -> Reject | None:
    """A call that may not be repeated; it fails before it, and hangs within."""
    payload: Any = message
    ledger.begun(call.message_id, "at_most_once")
    if payload.fate != "hangs" and (rejection := await _meet(message, call.attempt)) is not None:
        return rejection
    async with call.once():
        with ledger.call(call.message_id, "at_most_once", call.idempotency_key()):
            await _meet(message, call.attempt)
    return None


@app.transactional()
async def garbled(message: Garbled, tx: Tx) -> None:
    """Never reached: what is sent under this type cannot be decoded."""
    ledger.begun(tx.message_id, "garbled")


async def _write(message: Any, tx: Tx, kind: Kind) -> Reject | None:
    ledger.begun(tx.message_id, kind)
    await tx.session.execute(_DONE, _done(tx.message_id, kind))
    return await _meet(message, tx.attempt)


async def _meet(message: Any, attempt: Attempt) -> Reject | None:
    if message.fate == "lingers":
        await asyncio.sleep(_LINGER_SECONDS)
    if message.fate == "hangs" and attempt.attempt == 1:
        await asyncio.sleep(_LONG_SECONDS)
    if message.fate == "fails" and attempt.attempt <= _FAILING:
        freezing.failing()
        raise PassingTrouble(f"attempt {attempt.attempt} of {_FAILING} that fail")
    await asyncio.sleep(0.005)
    return _outcome(message, attempt.message_id)


def _outcome(message: Any, id_: UUID) -> Reject | None:
    if message.fate == "dies" and not ledger.is_cured(id_):
        freezing.failing()
        raise Dead("told_to")
    return Reject("told_to") if message.fate == "is_rejected" else None


def _done(id_: UUID, kind: Kind) -> dict[str, object]:
    return {"id": id_, "kind": kind, "at": now()}
