"""Defects that are planted into processes, to see the checker find them.

Each is what a hasty change might do. `TOWPATH_TEST_DEFECT` names the one to plant; the table says which
invariant it breaks and which fault brings it to light, empty where none is needed.
"""

import asyncio
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from towpath.brokers.ports import PublishResult
from towpath.consumer.effects import once
from towpath.consumer.effects.executions import Failed
from towpath.consumer.held import Held
from towpath.consumer.receiving import Receiver
from towpath.context import Call, HandlerSession
from towpath.outbox import buffer, emit
from towpath.relay.publish import Sender
from towpath.settings import load
from towpath.store import statements
from towpath.store.claims import ClaimStore
from towpath.store.deaths import DeathStore
from towpath.store.outbox import OutboxReader
from towpath.store.snapshot import Snapshot

ENVIRONMENT_VARIABLE: Final = "TOWPATH_TEST_DEFECT"


def _rewrite(family: str, name: str, old: str, new: str) -> None:
    """Change a statement of the store, for whoever loads it from now on."""
    original = statements.load

    def load_changed(asked: str, *arguments: str) -> Mapping[str, str]:
        loaded = original(asked, *arguments)
        if asked != family:
            return loaded
        assert old in loaded[name], f"{family}.{name} has changed: plant the defect anew"
        return {**loaded, name: loaded[name].replace(old, new)}

    for module in list(sys.modules.values()):
        if getattr(module, "load", None) is original:
            module.load = load_changed  # type: ignore[attr-defined]


def _acks_on_receipt() -> None:
    accept = Receiver._accept

    def accept_and_forget(self: Any, deliveries: Any) -> None:
        accept(self, deliveries)
        self._subscriber.acknowledge(deliveries)

    def only_end(self: Any, all_received: Any) -> None:
        for received in all_received:
            self.lanes.finish(received)
        self._wake.set()

    Receiver._accept = accept_and_forget  # type: ignore[method-assign]
    Held.acknowledge = only_end  # type: ignore[method-assign]


def _runs_finished_work_again() -> None:
    claim = ClaimStore._claim_events

    async def forget_and_claim(
        self: Any, connection: Any, works: Any, token: Any, takes_over: bool, **rest: Any
    ) -> Any:
        await connection.execute(
            "delete from towpath.task"
            " where consumer_group = $1 and id = any($2::uuid[]) and state = 'SUCCEEDED'",
            self._group,
            [work.id for work in works],
        )
        return await claim(self, connection, works, token, takes_over, **rest)

    ClaimStore._claim_events = forget_and_claim  # type: ignore[method-assign]


def _sends_backwards() -> None:
    offer = Sender._offer

    async def backwards(self: Any, messages: Any) -> PublishResult:
        result = await offer(self, messages[::-1])
        last = len(messages) - 1
        result.acknowledged = {last - index for index in result.acknowledged}
        result.refused = {last - index: refusal for index, refusal in result.refused.items()}
        return result

    Sender._offer = backwards  # type: ignore[method-assign]


def _keeps_what_a_savepoint_dropped() -> None:
    event.remove(Session, "after_soft_rollback", buffer._on_soft_rollback)


def _forgets_the_parked() -> None:
    _rewrite("work", "promote", "and state || '' = 'PARKED'", "and false")


def _commits_past_a_gap() -> None:
    poll = OutboxReader.poll

    async def hasty(self: Any, *arguments: Any, **options: Any) -> Any:
        found = await poll(self, *arguments, **options)
        xmax = found.upto.xmax
        return dataclasses.replace(found, upto=Snapshot(f"{xmax}:{xmax}:"))

    OutboxReader.poll = hasty  # type: ignore[method-assign]


def _journals_before_publishing() -> None:
    offer = Sender._offer
    later: set[asyncio.Task[None]] = set()

    async def publish(sender: Any, messages: Any) -> None:
        await asyncio.sleep(2)
        await offer(sender, messages)

    async def promise(self: Any, messages: Any) -> PublishResult:
        task = asyncio.create_task(publish(self, messages))
        later.add(task)
        task.add_done_callback(later.discard)
        return PublishResult(acknowledged=set(range(len(messages))))

    Sender._offer = promise  # type: ignore[method-assign]


def _writes_beside_the_transaction() -> None:
    async def emit_elsewhere(target: Any, payload: object, **options: Any) -> Any:
        connection = await asyncpg.connect(load().database_url.get_secret_value(), timeout=10)
        try:
            async with connection.transaction():
                return await emit(connection, payload, **options)
        finally:
            await connection.close(timeout=10)

    producer: Any = sys.modules["__main__"]
    if hasattr(producer, "Producer"):
        producer.emit = emit_elsewhere


def _ignores_gates() -> None:
    async def none(self: Any, *_: Any) -> dict[Any, bool]:
        return {}

    ClaimStore._gated_lanes = none  # type: ignore[method-assign]


def _buries_without_catalog() -> None:
    async def nothing(self: Any, *_: Any, **__: Any) -> None:
        return None

    DeathStore.bury = nothing  # type: ignore[method-assign]


def _makes_a_key_for_each_attempt() -> None:
    key = Call.idempotency_key

    def other(self: Any, step: str | None = None) -> str:
        return f"{key(self, step)}:{self.attempt.attempt}"

    Call.idempotency_key = other  # type: ignore[method-assign]


def _repeats_what_is_in_doubt() -> None:
    once.InDoubt = Failed  # type: ignore[assignment,misc]


def _commits_when_a_handler_fails() -> None:
    async def keep(self: Any) -> None:
        await AsyncSession.commit(self)
        await self.close()

    HandlerSession.leave = keep  # type: ignore[method-assign]


def _keeps_descriptors() -> None:
    finish = Held.finish
    kept: list[socket.socket] = []

    def leak(self: Any, all_received: Any) -> None:
        kept.extend(socket.socket() for _ in all_received)
        finish(self, all_received)

    Held.finish = leak  # type: ignore[method-assign]


def _drops_the_due() -> None:
    _rewrite("scheduled", "move", "from due m order by", "from due m where false order by")


def _settles_without_its_token() -> None:
    held = "and t.token = $3 and t.state || '' = 'RUNNING'"
    for name in ("settle_one", "wait", "end"):
        _rewrite("work", name, held, "and $3::uuid is not null")


@dataclass(frozen=True)
class Defect:
    """One, with what it breaks."""

    plant: Callable[[], None]
    invariants: tuple[str, ...]
    """Any of these finds it."""
    fault: str = ""
    """Without which it does not show."""


DEFECTS: Final[Mapping[str, Defect]] = {
    "acks_on_receipt": Defect(_acks_on_receipt, ("I1", "I7"), "member_dies_claimed_before_handle"),
    "runs_finished_work_again": Defect(
        _runs_finished_work_again, ("I4", "I6", "I8"), "member_dies_committed_before_ack"
    ),
    "sends_backwards": Defect(_sends_backwards, ("I3",), "relay_broker_hung"),
    "keeps_what_a_savepoint_dropped": Defect(_keeps_what_a_savepoint_dropped, ("I2",)),
    "forgets_the_parked": Defect(_forgets_the_parked, ("I7",)),
    "commits_past_a_gap": Defect(_commits_past_a_gap, ("I1",)),
    "journals_before_publishing": Defect(_journals_before_publishing, ("I1",), "relay_killed"),
    "writes_beside_the_transaction": Defect(_writes_beside_the_transaction, ("I2",)),
    "ignores_gates": Defect(_ignores_gates, ("I3",)),
    "buries_without_catalog": Defect(_buries_without_catalog, ("I9",)),
    "makes_a_key_for_each_attempt": Defect(_makes_a_key_for_each_attempt, ("I5",)),
    "repeats_what_is_in_doubt": Defect(_repeats_what_is_in_doubt, ("I6",)),
    "commits_when_a_handler_fails": Defect(_commits_when_a_handler_fails, ("I4",)),
    "keeps_descriptors": Defect(_keeps_descriptors, ("I11",)),
    "drops_the_due": Defect(_drops_the_due, ("I1",)),
    "settles_without_its_token": Defect(
        _settles_without_its_token, ("I3", "I4", "I8", "I9"), "member_freezes_failed_before_settle"
    ),
}


def plant() -> None:
    """Plant what the environment asks for."""
    if name := os.environ.get(ENVIRONMENT_VARIABLE):
        DEFECTS[name].plant()
