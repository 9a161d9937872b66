"""A consumer dies by SIGKILL at every step of claim, handle, settle and acknowledge; another finishes."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, get_args
from uuid import UUID, uuid4

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from tests.acceptance.brokers import WireBroker
from tests.acceptance.world import apply_topology
from tests.integration.crashing import EFFECTS, Crashing, Fate, Kind, Ledger, Process, declare, die
from tests.integration.engine import until
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import OutboundMessage
from towpath.crashpoints import CrashPoint
from towpath.messages import Envelope, encode, spec_of, wire_headers
from towpath.settings import WorkerSettings

AT_ONCE: Final = 8
"""Cases that run side by side."""
_PATIENCE_SECONDS: Final = 120.0
_IN_DATABASE: Final = ("transactional", "plain", "submitted", "batch")
SETTINGS: Final = WorkerSettings(
    lease=timedelta(minutes=5),
    beat_every=timedelta(seconds=1),
    concurrency=8,
    due_poll_min=timedelta(milliseconds=20),
    due_poll_max=timedelta(milliseconds=200),
    reap_every=timedelta(milliseconds=300),
    drain_timeout=timedelta(seconds=5),
)


@dataclass(frozen=True)
class Case:
    """Where the process dies that runs the first message."""

    kind: Kind
    point: CrashPoint | None
    """None: within the handler, after its effect."""
    fate: Fate = "succeeds"

    @property
    def is_in_doubt(self) -> bool:
        """Whether nobody can know if the effect happened."""
        points = (CrashPoint.MARKED_BEFORE_EFFECT, CrashPoint.HANDLED_BEFORE_SETTLE, None)
        return self.kind == "at_most_once" and self.point in points

    def __str__(self) -> str:
        return f"{self.kind} at {self.point or 'the end of its handler'}"


def cases() -> Iterator[Case]:
    """Every kind of effect at every point that it passes."""
    for kind in get_args(Kind):
        yield Case(kind, CrashPoint.RECEIVED_BEFORE_CLAIM)
        yield Case(kind, CrashPoint.CLAIMED_BEFORE_HANDLE)
        yield Case(kind, CrashPoint.HANDLED_BEFORE_SETTLE)
        yield Case(kind, CrashPoint.COMMITTED_BEFORE_ACK)
        yield Case(kind, CrashPoint.WAITING_BEFORE_ACK, "fails")
        yield Case(kind, CrashPoint.DUE_STARTED, "fails")
        yield Case(kind, CrashPoint.BURIED_BEFORE_ACK, "dies")
        yield Case(kind, CrashPoint.KEPT_BEFORE_ACK, "takes_long")
        if kind in _IN_DATABASE:
            yield Case(kind, CrashPoint.SETTLED_BEFORE_COMMIT)
        else:
            yield Case(kind, None, "is_killed_after")
    yield Case("at_most_once", CrashPoint.MARKED_BEFORE_EFFECT)


class Trial:
    """One case on a database, a group and addresses of its own."""

    def __init__(self, case: Case, url: str, wire: WireBroker, directory: Path, victims: Any) -> None:
        self.case = case
        self.wire = wire
        self.group = f"c{uuid4().hex[:10]}"
        self.address = f"crashing.{self.group}"
        self.ledger = Ledger(directory / self.group)
        self.process = Process(self.group, url, wire.url, wire.options, directory / self.group)
        self._victims = victims
        self._sequence = 0

    async def run(self) -> None:
        """Raises AssertionError where the promise was broken."""
        await apply_topology(self.wire, self.group, (self.address,))
        self.db = await asyncpg.connect(self.process.database_url, timeout=60, command_timeout=60)
        try:
            await self.db.execute(EFFECTS)
            ids = [await self.publish("a", 1, self.case.fate), await self.publish("a", 2, "succeeds")]
            await self.lose_a_process()
            ids.append(await self.publish("b", 1, "succeeds"))
            await self.finish(ids)
            await self.judge(ids)
        finally:
            await self.db.close(timeout=30)

    async def publish(self, key: str, n: int, fate: Fate) -> UUID:
        """As the relay would; a submitted task has its row before."""
        payload = declare(self.group)[self.case.kind](key, n, fate)
        spec, (data, content_type) = spec_of(payload), encode(payload)
        self._sequence += 1
        id_: UUID = uuid7()
        is_row = spec.kind == "task"
        if is_row:
            await self.db.execute(
                "insert into towpath.task (consumer_group, id, type, kind, source, key, state, held_by, "
                "payload, content_type) values ($1, $2, $3, 'task', $4, $5, 'ACCEPTED', 'broker', $6, $7)",
                *(self.group, id_, spec.type, self.address, key, data, content_type),
            )
        installation = await self.db.fetchval("select value from towpath.meta where name = 'installation_id'")
        envelope = Envelope(
            message_id=id_,
            type=spec.type,
            source="/test",
            occurred_at=datetime.now(UTC),
            content_type=content_type,
            kind=spec.kind,
            body="row" if is_row else "inline",
            sequence=self._sequence,
            installation=installation,
        )
        message = OutboundMessage(
            id_,
            self._sequence,
            self.address,
            spec.type,
            key,
            0,
            wire_headers(envelope),
            None if is_row else data,
        )
        publisher = broker_from_url(self.wire.url, self.wire.options).publisher()
        try:
            result = await publisher.publish([message], timeout_seconds=30)
        finally:
            await publisher.aclose()
        assert {0} == result.acknowledged
        return id_

    async def lose_a_process(self) -> None:
        """It dies where it was told to, and its lease lapses."""
        at = self.case.point or CrashPoint.REPLAYED_BATCH  # which no consumer passes
        victim = self._victims.Process(target=die, args=(self.process, self.settings, at.value), daemon=True)
        await asyncio.to_thread(victim.start)
        try:
            await until(lambda: victim.exitcode is not None, seconds=_PATIENCE_SECONDS)
            assert victim.exitcode == -signal.SIGKILL
        finally:
            victim.kill()
            await asyncio.to_thread(victim.join, 10)
            victim.close()
        await self.db.execute("update towpath.worker set lease_until = '-infinity'")

    async def finish(self, ids: list[UUID]) -> None:
        """Other members bring everything to its end; one may be stopped before its last acknowledgement."""
        await self.work(ids, is_in_doubt=self.case.is_in_doubt)
        while not await self.is_read():
            await self.work(ids, is_in_doubt=False)

    async def work(self, ids: list[UUID], *, is_in_doubt: bool) -> None:
        """One member, until nothing is left to do, once the provider answers."""
        crashing = Crashing(self.group, self.ledger)
        stop = asyncio.Event()
        running = asyncio.create_task(self.process.consumer(crashing.app, self.settings).run(stop))
        try:
            if is_in_doubt:
                await self.states(ids, ["UNKNOWN", "PARKED", "SUCCEEDED"], running)
                assert len([id_ for id_, _ in self.ledger.lines() if id_ == str(ids[0])]) <= 1
            crashing.answers = True
            await self.states(ids, self.expected, running)
            await until(self.is_read, seconds=_PATIENCE_SECONDS, told=lambda: "acknowledged too little")
        finally:
            stop.set()
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await running

    @property
    def settings(self) -> WorkerSettings:
        """Only long work is to be acknowledged early: a slow process must not do it to the others."""
        soon = timedelta(milliseconds=300)
        return SETTINGS.model_copy(update={"ack_after": soon}) if self.case.fate == "takes_long" else SETTINGS

    @property
    def expected(self) -> list[str]:
        """How the three messages end."""
        return ["DEAD" if self.case.fate == "dies" else "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]

    async def states(self, ids: list[UUID], expected: list[str], running: "asyncio.Task[None]") -> None:
        """Wait until the tasks are in these states."""
        found: list[str | None] = []

        async def are_so() -> bool:
            nonlocal found
            if running.done():
                running.result()
            rows = {
                row["id"]: row["state"] for row in await self.db.fetch("select id, state from towpath.task")
            }
            found = [rows.get(id_) for id_ in ids]
            return found == expected

        await until(are_so, seconds=_PATIENCE_SECONDS, told=lambda: f"{found}, not {expected}")

    async def judge(self, ids: list[UUID]) -> None:
        """Once in the database, under one key outside, at most once where it must not be repeated."""
        done = [id_ for id_, state in zip(ids, self.expected, strict=True) if state == "SUCCEEDED"]
        effects = [row["id"] for row in await self.db.fetch("select id from public.effect order by key, seq")]
        calls = self.ledger.lines()
        if self.case.kind in _IN_DATABASE:
            assert (done, []) == (effects, calls)
        else:
            assert [] == effects
            assert list(map(str, done)) == sorted(dict(calls), key=list(map(str, ids)).index)
            assert len(set(calls)) == len(done), "one key for each message"
            again = self.case.kind == "idempotent" and self.case.point in (
                CrashPoint.HANDLED_BEFORE_SETTLE,
                None,
            )
            assert len(calls) - len(done) in ({0, 1} if again else {0})
        letters = await self.db.fetch("select message_id, death_count from towpath.dead_letter")
        assert [(id_, 1) for id_ in ids if id_ not in done] == [tuple(letter) for letter in letters]
        attempts = [
            row["attempt"] for row in await self.db.fetch("select attempt from towpath.task order by id")
        ]
        spent = 1 + (self.case.fate == "fails" or self.case.point is CrashPoint.MARKED_BEFORE_EFFECT)
        assert [spent, 1, 1] == attempts, "a crash spends no attempt"
        assert await self.db.fetchval("select count(*) from towpath.key_gate") == 0

    async def is_read(self) -> bool:
        """Whether the broker takes everything for done."""
        return await self.wire.unread(self.group, self.address) == 0


@pytest.fixture(scope="module")
def victims() -> Iterator[Any]:
    """Processes forked from one that has everything imported already."""
    context = multiprocessing.get_context("forkserver")
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'src'}")
        context.set_forkserver_preload(["tests.integration.crashing"])
        yield context


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_what_a_dying_consumer_left_is_finished(
    wire: WireBroker, new_database: Any, schema_template: str, tmp_path: Path, victims: Any
) -> None:
    """C6, C9, C23, D1, D5, R4, S3: for each kind of effect and each step, side by side."""
    at_once = asyncio.Semaphore(AT_ONCE)
    broken: dict[str, str] = {}

    async def one(case: Case) -> None:
        async with at_once:
            database = new_database(schema_template)
            url = await asyncio.to_thread(database.__enter__)
            try:
                await Trial(case, url, wire, tmp_path, victims).run()
            except (AssertionError, asyncpg.PostgresError) as error:
                broken[str(case)] = str(error)
            finally:
                await asyncio.to_thread(database.__exit__, None, None, None)

    await asyncio.gather(*map(one, cases()))
    assert not broken, "\n".join(f"{case}: {fault}" for case, fault in sorted(broken.items()))
