"""A consumer group with one handler of each kind, whose processes may be told where to die."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import text
from sqlalchemy.orm import Session

from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.brokers.factory import broker_from_url
from towpath.consumer.engine import Consumer
from towpath.context import Batch, Call, OnceCall, SyncTx, Tx
from towpath.crashpoints import ENVIRONMENT_VARIABLE
from towpath.messages import event, task
from towpath.outcomes import Dead, DidNotHappen, Happened, StillUnknown, Verdict
from towpath.settings import WorkerSettings
from towpath.store.database import Database

Kind = Literal["transactional", "plain", "submitted", "idempotent", "at_most_once", "batch"]
Fate = Literal["succeeds", "fails", "dies", "takes_long", "is_killed_after"]

EFFECTS: Final = (
    "create table public.effect (seq bigint generated always as identity, id uuid, key text, n integer)"
)
_EFFECT: Final = text("insert into public.effect (id, key, n) values (:id, :key, :n)")
_LONG_SECONDS: Final = 600.0


def declare(group: str) -> dict[Kind, type[Any]]:
    """The message classes of a group: `fate` is what a process does that is to die."""
    address = f"crashing.{group}"

    @event("crashing.transactional", destination=address, key="key")
    @dataclass(frozen=True)
    class Transactional:
        key: str
        n: int
        fate: Fate = "succeeds"

    @event("crashing.plain", destination=address, key="key")
    @dataclass(frozen=True)
    class Plain(Transactional):
        pass

    @event("crashing.idempotent", destination=address, key="key")
    @dataclass(frozen=True)
    class Idempotent(Transactional):
        pass

    @event("crashing.at_most_once", destination=address, key="key")
    @dataclass(frozen=True)
    class AtMostOnce(Transactional):
        pass

    @event("crashing.batch", destination=address, key="key")
    @dataclass(frozen=True)
    class Batched(Transactional):
        pass

    @task("crashing.submitted", group=group, key="key", destination=address)
    @dataclass(frozen=True)
    class Submitted(Transactional):
        pass

    return {
        "transactional": Transactional,
        "plain": Plain,
        "submitted": Submitted,
        "idempotent": Idempotent,
        "at_most_once": AtMostOnce,
        "batch": Batched,
    }


class Ledger:
    """What the outside was asked to do: a file, which no crash of ours takes back."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, id_: object, key: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{id_} {key}\n")

    def lines(self) -> list[tuple[str, str]]:
        """Message id and idempotency key of each call."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines()
        return [(id_, key) for id_, _, key in (line.partition(" ") for line in lines)]


class Crashing:
    """The app of one process of a group. In one that is not to die every fate but `dies` succeeds."""

    def __init__(self, group: str, ledger: Ledger) -> None:
        self._ledger = ledger
        self._is_doomed = ENVIRONMENT_VARIABLE in os.environ
        self.answers = False
        """Whether the provider tells what became of a call."""
        classes = declare(group)
        self.app = app = App(group, retry=RetryPolicy(attempts=4, base="20ms", cap="50ms"))
        for kind, handler, register in (
            ("transactional", self._transactional, app.transactional()),
            ("plain", self._plain, app.transactional()),
            ("submitted", self._submitted, app.transactional()),
            ("idempotent", self._idempotent, app.idempotent()),
            ("at_most_once", self._at_most_once, app.at_most_once(reconcile=self._ask)),
            ("batch", self._batch, app.batch(max_size=10, max_wait="20ms")),
        ):
            register(_for(handler, classes[kind]))  # type: ignore[index,operator]

    async def _transactional(self, message: Any, tx: Tx) -> None:
        await tx.session.execute(_EFFECT, {"id": tx.message_id, "key": message.key, "n": message.n})
        await self._meet(message.fate)

    async def _submitted(self, message: Any, tx: Tx) -> None:
        await self._transactional(message, tx)

    def _plain(self, message: Any, tx: SyncTx) -> None:
        session: Session = tx.session
        session.execute(_EFFECT, {"id": tx.message_id, "key": message.key, "n": message.n})
        if self._seconds(message.fate):
            time.sleep(_LONG_SECONDS)

    async def _idempotent(self, message: Any, call: Call) -> None:
        await self._meet(message.fate if message.fate != "is_killed_after" else "succeeds")
        self._ledger.write(call.message_id, call.idempotency_key("act"))
        await self._meet(message.fate)

    async def _at_most_once(self, message: Any, call: OnceCall) -> None:
        await self._meet(message.fate if message.fate != "is_killed_after" else "succeeds")
        async with call.once():
            self._ledger.write(call.message_id, call.idempotency_key())
            await self._meet(message.fate)

    async def _ask(self, call: OnceCall) -> Verdict[None]:
        if not self.answers:
            return StillUnknown()
        is_known = any(id_ == str(call.message_id) for id_, _ in self._ledger.lines())
        return Happened(None) if is_known else DidNotHappen()

    async def _batch(self, batch: Batch[Any], tx: Tx) -> None:
        for message in batch:
            payload = message.payload
            await tx.session.execute(_EFFECT, {"id": message.id, "key": payload.key, "n": payload.n})
        for message in batch:
            await self._meet(message.payload.fate)

    async def _meet(self, fate: Fate) -> None:
        await asyncio.sleep(self._seconds(fate))

    def _seconds(self, fate: Fate) -> float:
        """How long it takes, if it comes to that."""
        if fate == "dies":
            raise Dead("told_to")
        if self._is_doomed and fate == "fails":
            raise RuntimeError("not here")
        if self._is_doomed and fate == "is_killed_after":
            os.kill(os.getpid(), signal.SIGKILL)
        return _LONG_SECONDS if self._is_doomed and fate == "takes_long" else 0.0


def _for(handler: Any, message_class: type[Any]) -> Any:
    """The handler as a function of this class of messages."""
    if asyncio.iscoroutinefunction(handler):

        async def function(message: Any, context: Any) -> None:
            await handler(message, context)
    else:

        def function(message: Any, context: Any) -> None:  # type: ignore[misc]
            handler(message, context)

    hints = dict(handler.__annotations__)
    context = hints.pop("tx", None) or hints.pop("call")
    payload = Batch[message_class] if "batch" in hints else message_class  # type: ignore[valid-type]
    function.__annotations__ = {"message": payload, "context": context, "return": None}
    function.__name__ = handler.__name__
    return function


@dataclass(frozen=True)
class Process:
    """What a process needs to be a member."""

    group: str
    database_url: str
    broker_url: str
    broker_options: Mapping[str, object]
    ledger: Path

    def consumer(self, app: App, settings: WorkerSettings) -> Consumer:
        """One member, to be run."""
        broker = broker_from_url(self.broker_url, self.broker_options)
        return Consumer(app, Database(self.database_url, pool_size=5), broker, settings)


def die(process: Process, settings: WorkerSettings, crash_at: str) -> None:
    """The life of a process that ends at a crash point."""
    os.environ[ENVIRONMENT_VARIABLE] = crash_at
    crashing = Crashing(process.group, Ledger(process.ledger))
    asyncio.run(process.consumer(crashing.app, settings).run(asyncio.Event()))
