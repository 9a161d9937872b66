"""What a worker runs at this moment, and how it is let end, cancelled or handed back."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from towpath.consumer.lanes import Received
from towpath.consumer.running import Runner
from towpath.errors import StoreUnavailable
from towpath.store.settles import Claim, SettleStore
from towpath.store.work import Work
from towpath.telemetry.logging import event_logger

GRACE_SECONDS: Final = 2.0

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    task: asyncio.Task[None]
    received: Received | None
    began_at: float


class Roster:
    """One task per message that runs, whether the broker or the database started it."""

    def __init__(self, group: str, runner: Runner, settles: SettleStore) -> None:
        self._group = group
        self._runner = runner
        self._settles = settles
        self._tasks: dict[Work, _Run] = {}
        self._strays: set[Claim] = set()
        self.broke: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the error of a run that no outcome covers: a bug, which ends the worker."""

    def young_count(self, seconds: float) -> int:
        """How many of those that run began within the last seconds."""
        after = time.monotonic() - seconds
        return sum(run.began_at > after for run in self._tasks.values())

    def received(self) -> list[Received]:
        """What runs and came by the broker."""
        return [run.received for run in self._tasks.values() if run.received is not None]

    def spawn(
        self,
        work: Work,
        run: Coroutine[Any, Any, None],
        *,
        received: Received | None,
        on_done: Callable[[], None],
    ) -> None:
        """Run it on its own; `received` is None for work from the database."""
        task = asyncio.create_task(run)
        self._tasks[work] = _Run(task, received, time.monotonic())

        def forget(ended: asyncio.Task[None]) -> None:
            del self._tasks[work]
            error = None if ended.cancelled() else ended.exception()
            if error is not None and not self.broke.done():
                self.broke.set_exception(error)
            on_done()

        task.add_done_callback(forget)

    def cancel(self, task_id: UUID) -> None:
        """Somebody wants this task CANCELLED; a handler that settles already is left alone."""
        for work, run in list(self._tasks.items()):
            if work.id == task_id and self._runner.cancel(work):
                run.task.cancel()

    async def finish(
        self, patience_seconds: float, which: Callable[[Received | None], bool] = lambda _: True
    ) -> None:
        """Let them end; hand back unspent those still in a handler, let settling ones try their token."""
        tasks = {work: run.task for work, run in self._tasks.items() if which(run.received)}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=patience_seconds)
        await self._hand_back({work: task for work, task in tasks.items() if not task.done()})

    async def _hand_back(self, unfinished: Mapping[Work, asyncio.Task[None]]) -> None:
        handling = [work for work in unfinished if self._runner.hand_back(work)]
        for work in handling:
            unfinished[work].cancel()
        if unfinished:
            await asyncio.wait(unfinished.values(), timeout=GRACE_SECONDS)
        claimed = [work for work in handling if work.token is not None]
        if claimed:
            await self._tell(claimed)

    async def _tell(self, works: Sequence[Work]) -> None:
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self._settles.hand_back(works)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("worker.store_unavailable", group=self._group, error=str(error))

    async def hand_back_strays(self) -> int:
        """Hand back what the database takes this worker to be running though it does not. Returns how many.

        That is left by a claim whose answer was lost. Only what two looks in turn find: a claim may
        be on its way. (If it arrives later still, its token is gone.) Raises StoreUnavailable.
        """
        claims = await self._settles.claims()
        strays = claims - {(work.id, work.token) for work in self._tasks if work.token is not None}
        lost, self._strays = strays & self._strays, strays - self._strays
        await self._settles.hand_back_claims(lost)
        return len(lost)

    async def cancel_all(self) -> None:
        """Nothing runs on."""
        await cancel([run.task for run in list(self._tasks.values())])


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
