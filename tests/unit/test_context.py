"""What a handler is given has the powers of its effect and no more."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from towpath.context import Attempt, Call, HandlerSession, Tx
from towpath.errors import UsageError
from towpath.messages import Envelope
from towpath.outbox import Outbox

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def attempt(run_no: int = 0) -> Attempt:
    envelope = Envelope(ID, "parcel.posted", "/s", datetime(2026, 1, 2, tzinfo=UTC), "application/json")
    return Attempt(ID, "a", 2, run_no, envelope, "ann")


def call(run_no: int = 0, reports: list[Mapping[str, object]] | None = None) -> Call:
    @asynccontextmanager
    async def settling() -> AsyncIterator[AsyncSession]:
        yield HandlerSession()

    return Call(
        attempt(run_no),
        outbox=Outbox(),
        settling=settling,
        report=lambda progress: None if reports is None else reports.append(progress),
    )


@pytest.mark.parametrize(
    ("run_no", "step", "key"),
    [
        (0, None, f"{ID}"),
        (0, "book", f"{ID}:book"),
        (3, None, f"{ID}:3"),
        (3, "book", f"{ID}:3:book"),
    ],
)
def test_an_idempotency_key_is_stable_over_retries_and_new_on_a_rerun(
    run_no: int, step: str | None, key: str
) -> None:
    assert call(run_no).idempotency_key(step) == key


@pytest.mark.parametrize("step", ["", "a:b", "x" * 101])
def test_a_step_cannot_be_mistaken_for_a_run(step: str) -> None:
    with pytest.raises(UsageError, match="a step is 1 to 100 characters without ':'"):
        call().idempotency_key(step)


async def test_progress_is_a_fraction_with_an_optional_step() -> None:
    reports: list[Mapping[str, object]] = []
    made = call(reports=reports)
    await made.progress(0)
    await made.progress(0.5, step="booked")
    assert reports == [{"fraction": 0}, {"fraction": 0.5, "step": "booked"}]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), float("inf")])
async def test_other_progress_is_refused(fraction: float) -> None:
    with pytest.raises(UsageError, match="progress is a fraction from 0 to 1"):
        await call().progress(fraction)


async def test_a_handler_cannot_commit_or_roll_back_its_session() -> None:
    session = HandlerSession()
    with pytest.raises(
        UsageError, match=r"tx\.session\.commit\(\) is refused: the transaction commits together"
    ):
        await session.commit()
    with pytest.raises(UsageError, match=r"tx\.session\.rollback\(\) is refused: raise to roll back"):
        await session.rollback()


@pytest.mark.parametrize("way", ["close", "reset", "sync"])
async def test_a_handler_that_ended_its_transaction_in_another_way_is_found_out(way: str) -> None:
    session = HandlerSession()
    session.begin_for_handler()
    session.check_transaction()
    if way == "sync":
        await session.run_sync(lambda sync: sync.rollback())
    else:
        await getattr(session, way)()
    with pytest.raises(UsageError, match=r"closed or ended tx\.session"):
        session.check_transaction()


def test_a_context_names_its_message() -> None:
    assert Tx(HandlerSession(), attempt(), Outbox()).message_id == ID == call().message_id
    assert (call().attempt.attempt, call().attempt.owner) == (2, "ann")


def test_a_call_has_no_session_and_no_way_to_emit() -> None:
    """A long handler cannot sit in a transaction by mistake."""
    for name in ("session", "emit"):
        made: Any = call()
        with pytest.raises(AttributeError):
            getattr(made, name)


async def test_a_calls_transaction_is_a_tx() -> None:
    async with call().transaction() as tx:
        assert isinstance(tx, Tx)
        assert tx.message_id == ID
