"""What a worker runs at this moment, and how it is let end, cancelled or handed back."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextvars import Context
from typing import Any, Final
from uuid import UUID

from towpath.consumer.lanes import Received
from towpath.consumer.runs import Phase, Run, by_owner
from towpath.consumer.settling import until_available
from towpath.store.database import within
from towpath.store.doubts import DoubtStore
from towpath.store.settles import Claim, SettleStore
from towpath.store.work import Work
from towpath.telemetry.logging import event_logger

GRACE_SECONDS: Final = 2.0

log = event_logger(__name__)


class Roster:
    """Every message that runs, whether the broker or the database started it, and the tasks that do it."""

    def __init__(self, group: str, settles: SettleStore, doubts: DoubtStore) -> None:
        self._group = group
        self._settles = settles
        self._doubts = doubts
        self._runs: dict[Run, asyncio.Future[None] | None] = {}
        """With a future where somebody waits for the end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._strays: set[Claim] = set()
        self.broke: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the error of a run that no outcome covers: a bug, which ends the worker."""

    @property
    def count(self) -> int:
        """Everything that runs."""
        return len(self._runs)

    def young_count(self, seconds: float) -> int:
        """How many of those that run were started within the last seconds."""
        after = time.monotonic() - seconds
        return sum(run.started_at > after for run in self._runs)

    def runs(self) -> list[Run]:
        """What runs now."""
        return list(self._runs)

    def running_ids(self) -> list[UUID]:
        """The tasks of what runs now."""
        return [run.work.id for run in self._runs]

    def add(self, run: Run) -> None:
        """It runs without a task for now."""
        self._runs.setdefault(run)

    def spawn(
        self, runs: Sequence[Run], act: Coroutine[Any, Any, None], context: Context | None = None
    ) -> None:
        """Let one task do these, also when another had them before. When it ends, they have ended.

        Without a context of its own it has a copy of the caller's.
        """
        task = asyncio.get_running_loop().create_task(act, context=context)
        self._tasks.add(task)
        for run in runs:
            run.task = task
            self.add(run)

        def end(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            error = None if ended.cancelled() else ended.exception()
            if error is not None and not self.broke.done():
                self.broke.set_exception(error)
            self.forget([run for run in runs if run.task is ended])

        task.add_done_callback(end)

    def forget(self, runs: Iterable[Run]) -> None:
        """They run no more. Those that were forgotten before are left out."""
        ended = [run for run in runs if run in self._runs]
        for run in ended:
            awaited = self._runs.pop(run)
            if awaited is not None and not awaited.done():
                awaited.set_result(None)
        for owner, own in by_owner(ended):
            owner.ended(own)

    def cancel(self, task_id: UUID) -> None:
        """Somebody wants this task CANCELLED; a handler that settles already is left alone."""
        for run in list(self._runs):
            if run.work.id == task_id:
                run.cancel()

    async def finish(
        self, patience_seconds: float, which: Callable[[Received | None], bool] = lambda _: True
    ) -> None:
        """Let them end; hand back unspent those still in a handler, let settling ones try their token."""
        runs = [run for run in self._runs if which(run.received)]
        await self._wait(runs, patience_seconds)
        await self._hand_back([run for run in runs if run in self._runs])

    async def _wait(self, runs: Iterable[Run], seconds: float) -> None:
        """Until they have ended, at most this long."""
        loop = asyncio.get_running_loop()
        ends = []
        for run in runs:
            if run in self._runs:
                end = self._runs[run] = self._runs[run] or loop.create_future()
                ends.append(end)
        if ends:
            await asyncio.wait(ends, timeout=seconds)

    async def _hand_back(self, unfinished: Sequence[Run]) -> None:
        handling = [run for run in unfinished if run.hand_back()]
        await self._wait(unfinished, GRACE_SECONDS)
        claimed = [run.work for run in handling if run.work.token is not None]
        if claimed:
            await self._tell(claimed)

    async def _tell(self, works: Sequence[Work]) -> None:
        claims = {(work.id, work.token) for work in works if work.token is not None}
        await self._within_grace(lambda: self._give_up(claims))

    async def _within_grace(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await within(GRACE_SECONDS, until_available(act))
        except TimeoutError:
            log.warning("worker.store_unavailable", group=self._group, error="no answer to a hand-back")

    async def _give_up(self, claims: Collection[Claim]) -> None:
        """Unspent back to work; in doubt where an effect had begun: nobody else would look after it."""
        await self._settles.hand_back_claims(claims)
        await self._doubts.doubt_given_up(claims)

    @property
    def has_strays(self) -> bool:
        """Whether the last look found some that the next one may hand back."""
        return bool(self._strays)

    async def hand_back_strays(self) -> int:
        """Hand back what the database takes this worker to be running though it does not. Returns how many.

        That is left by a claim whose answer was lost. Only what two looks in turn find: a claim may
        be on its way. (If it arrives later still, its token is gone.) Raises StoreUnavailable.
        """
        strays = await self._unknown_claims()
        lost, self._strays = strays & self._strays, strays - self._strays
        for claim in lost:  # one at a time, so that no deadlock can end the reaper
            await self._give_up({claim})
        return len(lost)

    async def hand_back_rest(self) -> None:
        """The same at shutdown, of all: a claim that was on its way has nobody left who waits for it."""

        async def give_up() -> None:
            await self._give_up(await self._unknown_claims())

        await self._within_grace(give_up)

    async def _unknown_claims(self) -> set[Claim]:
        claims = await self._settles.claims()
        return claims - {(run.work.id, run.work.token) for run in self._runs if run.work.token is not None}

    async def cancel_all(self) -> None:
        """Nothing runs on, and what has not begun does not begin."""
        for run in self._runs:
            if run.task is None and run.phase is Phase.QUEUED:
                run.phase = Phase.HANDED_BACK
        running = list(self._tasks)
        await cancel(running)
        await cancel([task for task in self._tasks if task not in running])  # to which they left an outcome


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel and wait, for a bounded time."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most this long."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return
