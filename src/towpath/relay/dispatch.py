"""The publishing loop: batches to the broker, results to progress, progress to the journal."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from towpath.brokers.ports import PublishResult
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import StoreUnavailable
from towpath.relay.admission import Admission, only
from towpath.relay.aside import Aside
from towpath.relay.away import Away
from towpath.relay.bookkeeping import Bookkeeping
from towpath.relay.canary import Canaries
from towpath.relay.gates import Gates
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter
from towpath.relay.options import RelayOptions
from towpath.relay.pauses import Pauses
from towpath.relay.poison import Poison
from towpath.relay.progress import Batch, Shard, Shards, boot_time
from towpath.relay.publish import Sender, Verdicts, judge
from towpath.relay.reader import MemoryStale
from towpath.relay.reading import Reading
from towpath.store.parking import Gated

_TICK_SECONDS: Final = 0.25


class Dispatch:
    """Publishes one batch at a time, in order per shard, and settles it.

    What the broker failed is published beside that, so that it holds up nothing else.
    """

    def __init__(
        self,
        reading: Reading,
        sender: Sender,
        journal: JournalWriter,
        poison: Poison,
        gates: Gates,
        canaries: Canaries,
        shards: Shards,
        pauses: Pauses,
        away: Away,
        aside: Aside,
        options: RelayOptions,
        hooks: RelayHooks,
    ) -> None:
        self._reading = reading
        self._sender = sender
        self._journal = journal
        self._poison = poison
        self._gates = gates
        self._canaries = canaries
        self._shards = shards
        self._pauses = pauses
        self._away = away
        self._aside = aside
        self._options = options
        self._hooks = hooks
        self._admission = Admission(shards, aside, options)
        self._bookkeeping = Bookkeeping(reading, journal, options, hooks, self._tick)
        self._waiting: asyncio.Timeout | None = None
        self._reach_at = 0.0
        self._reach_failures = 0
        self.ticked_at = boot_time()
        self.published_count = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until told to stop; then write progress down. What was read and not sent is left."""
        while not stop.is_set():
            self._tick()
            batch = await self._next()
            taken_count = await self._take_aside()
            leaving = [shard for shard in self._shards if shard.is_leaving and self._is_quiet(shard)]
            if leaving:
                await self._release(leaving)
            if batch is not None:
                await self._handle(batch)
            elif not self._sender.is_started and not self._aside.is_busy:
                await self._reach()
            await self._start_aside()
            if self._may_publish(boot_time()) and self._may_resend(boot_time()):
                await self._resend()
            count = taken_count + (0 if batch is None else len(batch.messages))
            await self._bookkeeping.published(count)
        await self._aside.ended()
        await self._take_aside()
        await self._bookkeeping.write()

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._bookkeeping.aclose()
        await self._aside.aclose()

    def _tick(self) -> None:
        self.ticked_at = boot_time()

    async def _next(self) -> Batch | None:
        """The next batch: one that must be tried again, else one that was read; None after a tick."""
        now = boot_time()
        if not self._may_publish(now):
            wait = _TICK_SECONDS if self._pauses.is_everything else self._away.until - now
            await asyncio.sleep(min(wait, _TICK_SECONDS))
            return None
        options, batches = self._options, self._reading.batches
        limits = {"row_limit": options.window_rows, "byte_limit": options.window_bytes}
        held = self._shards.due(now, **limits, are_aside=False)
        if held is not None:
            return held
        if not batches.empty():
            return batches.get_nowait()
        if self._may_resend(now):
            await asyncio.sleep(0)
            return None
        until = min(now + _TICK_SECONDS, self._shards.next_retry(are_aside=False))
        if self._aside.is_over:
            return None
        if not self._aside.is_busy:
            until = min(until, max(self._shards.next_retry(are_aside=True), self._aside.away.until))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - now) as self._waiting:
                return await batches.get()
        return None

    def _stir(self, _: object) -> None:
        """Something is to be done: wait for no batch any longer."""
        if self._waiting is not None and not self._waiting.expired():
            with contextlib.suppress(RuntimeError):  # it is over
                self._waiting.reschedule(0)

    async def _reach(self) -> None:
        """Connect before there is anything to publish, so that readiness tells the truth."""
        now = boot_time()
        if now < max(self._away.until, self._reach_at):
            return
        problem = await self._sender.connect()
        now = boot_time()
        if problem is None:
            self._away.reached(now)
            self._reach_failures = 0
            return
        self._away.observe(problem, now)
        self._reach_failures += 1
        self._reach_at = now + self._options.backoff.delay(self._reach_failures).total_seconds()

    def _may_publish(self, now: float) -> bool:
        return now >= self._away.until and not self._pauses.is_everything

    def _may_resend(self, now: float) -> bool:
        return self._reading.server is not None and self._gates.is_due(now)

    async def _handle(self, batch: Batch) -> None:
        """Publish what may be published of a batch, and settle it."""
        problem = await self._sender.connect() if batch.messages else None
        batch.parked = {}
        if batch.messages and self._gates.concerns(batch) and not await self._find_parked(batch):
            return
        current = self._admission.admitted(batch)
        if current is None:
            return
        if not current.messages:
            self._shards.settle(current, {})
            return
        crash_point(CrashPoint.READ_BEFORE_PUBLISH)
        self._bookkeeping.expect(len(current.messages))
        await self._settle(current, problem or await self._sender.send(current), self._away)

    async def _start_aside(self) -> None:
        """Publish what waits of shards that are kept apart, if the way is free."""
        aside, options, now = self._aside, self._options, boot_time()
        if aside.is_busy or now < aside.away.until or not self._may_publish(now):
            return
        limits = {"row_limit": options.window_rows, "byte_limit": options.window_bytes}
        batch = self._shards.due(now, **limits, are_aside=True)
        if batch is None:
            if aside.away.problem is not None and not any(shard.failures for shard in self._shards):
                aside.away.forget()
            return
        batch.parked = {}
        if not self._gates.concerns(batch) or await self._find_parked(batch):
            aside.start(batch, self._offer_aside(batch), self._stir)

    async def _offer_aside(self, batch: Batch) -> PublishResult | None:
        """Runs beside the publishing loop: uses nothing that the loop uses across an await."""
        sender = self._aside.sender
        problem = await sender.connect()
        current = self._aside.batch = self._admission.admitted(batch)
        if current is None:
            return None
        crash_point(CrashPoint.READ_BEFORE_PUBLISH)
        self._bookkeeping.expect(len(current.messages))
        return problem or await sender.send(current)

    async def _take_aside(self) -> int:
        """Settle what came of the window beside; how many messages were in it."""
        taken = self._aside.take()
        if taken is None:
            return 0
        batch, result, was_long = taken
        await self._settle(batch, result, self._aside.away)
        if result.acknowledged:
            self._away.reached(boot_time())
        if not was_long:
            for shard in filter(None, map(self._shards.get, batch.parts)):
                shard.is_aside = shard.failures > 0
        return len(batch.messages)

    async def _find_parked(self, batch: Batch) -> bool:
        """Mark what waits behind a gate; where that cannot be found out the batch is left for later."""
        try:
            if self._reading.server is None:
                raise StoreUnavailable("the database session ended")
            await self._bookkeeping.written()
            batch.parked = await self._gates.parked(batch, self._reading.server)
        except StoreUnavailable as error:
            self._journal.drop_connection()
            wait = self._options.backoff.delay(1).total_seconds()
            self._hooks.store_unavailable(error, wait)
            self._admission.leave(batch, list(batch.parts), boot_time() + wait)
            return False
        return True

    async def _resend(self) -> None:
        """Publish the next of what waited behind gates that were opened, beside the flow of the outbox."""
        server, outbound = self._reading.server, self._reading.outbound
        if server is None or outbound is None:
            return
        await self._bookkeeping.written()
        try:
            batch = await self._gates.released(outbound, server)
            if batch is None:
                return
            problem = await self._sender.connect() if batch.messages else None
            covered, _ = self._admission.covered(batch)
            batch = only(batch, covered)
            result = problem or await self._sender.send(batch)
            crash_point(CrashPoint.PUBLISHED_BEFORE_JOURNAL)
            self.published_count += len(result.acknowledged)
            verdicts = judge(
                batch,
                result,
                self._options.publish_attempts,
                tries_of=self._gates.tries_of,
                policies=self._reading.policies,
            )
            if batch.is_offered:
                self._away.observe(result, boot_time())
            await self._gates.settle(batch, verdicts, server)
        except StoreUnavailable as error:
            self._journal.drop_connection()
            self._hooks.store_unavailable(error, 0.0)
        except MemoryStale as stale:
            self._reading.forget(str(stale))

    async def _settle(self, batch: Batch, result: PublishResult, away: Away) -> None:
        crash_point(CrashPoint.PUBLISHED_BEFORE_JOURNAL)
        self.published_count += len(result.acknowledged)
        self._canaries.published(batch, result.acknowledged)
        verdicts = judge(
            batch,
            result,
            self._options.publish_attempts,
            tries_of=self._shards.tries_of,
            policies=self._reading.policies,
        )
        gated: dict[int, Gated] = {}
        if verdicts.refused or verdicts.parked:
            gated = await self._put_aside(batch, verdicts)
        self._shards.settle(batch, verdicts.left)
        for number, state in gated.items():
            self._shards.gate(number, state)
        now = boot_time()
        if batch.is_offered:
            away.observe(result, now)
        for number in verdicts.left:
            shard = self._shards.get(number)
            if shard is None:
                continue
            problem = result.unavailable or result.configuration
            if problem is not None:
                self._aside.away.doubt(problem, now)
                shard.failures += 1
                shard.is_aside = True
            if number in verdicts.retry_refused or shard.failures:
                tries = max([shard.failures, *shard.tries.values()])
                shard.retry_at = now + self._options.backoff.delay(tries).total_seconds()
            else:
                shard.retry_at = now  # followers of a message that is out of the way now

    async def _put_aside(self, batch: Batch, verdicts: Verdicts) -> dict[int, Gated]:
        await self._bookkeeping.written()
        server = self._reading.server
        if server is None:  # the session ended, and with it the stamps
            return {}
        try:
            return await self._poison.put_aside(batch, verdicts, server)
        except MemoryStale as stale:
            self._reading.forget(str(stale))
            return {}

    def _is_quiet(self, shard: Shard) -> bool:
        """Whether another relay could go on without repeating anything, or this one cannot finish."""
        if shard.number in self._aside.shards:
            return False
        is_failing = self._away.problem is not None or self._aside.away.problem is not None
        return shard.held is None or is_failing or self._pauses.is_everything

    async def _release(self, leaving: list[Shard]) -> None:
        """Give up shards that other relays are to have; nothing of them is in flight here."""
        await self._bookkeeping.write()
        try:
            await self._journal.release(
                {shard.number: shard.epoch for shard in leaving if shard in self._shards}
            )
        except StoreUnavailable as error:
            self._journal.drop_connection()
            self._hooks.store_unavailable(error, 0.0)
