"""Group commit of successes: one transaction for whatever finished while the last one ran."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import asyncpg
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from towpath.errors import StoreUnavailable
from towpath.store.settles import SettleStore
from towpath.store.work import Work

T = TypeVar("T")

BATCH_LIMIT: Final = 500
BATCH_LIMIT_BYTES: Final = 1_000_000
_LOST_RACES: Final = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
)


@dataclass(slots=True, eq=False)
class Success:
    """One finished handler that waits for its row to say so."""

    work: Work
    result: bytes | None
    is_settled: "asyncio.Future[bool]" = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """What it adds to the statement."""
        return 64 + len(self.result or b"")


class GroupCommit:
    """Collects successes and settles them in batches. `run` is its one owner."""

    def __init__(self, store: SettleStore, on_promoted: Callable[[], None]) -> None:
        self._store = store
        self._on_promoted = on_promoted
        self._queue: list[Success] = []
        self._arrived = asyncio.Event()

    async def settle(self, work: Work, result: bytes | None) -> bool:
        """True: the row is SUCCEEDED. False: the token was gone.

        Waits while the database is away. Raises what the database says about this one row.
        """
        success = Success(work, result, asyncio.get_running_loop().create_future())
        self._queue.append(success)
        self._arrived.set()
        return await success.is_settled

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not self._queue:
                self._arrived.clear()
            await self._commit([success for success in batch if not success.is_settled.done()])

    def _next_batch(self) -> list[Success]:
        count, size_bytes = 0, 0
        for success in self._queue[:BATCH_LIMIT]:
            size_bytes += success.size_bytes
            if count and size_bytes > BATCH_LIMIT_BYTES:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    async def _commit(self, batch: Sequence[Success]) -> None:
        """A database that is away: the whole batch again. A row that offends: bisect to it."""
        if not batch:
            return
        try:
            settled = await until_available(
                lambda: self._store.succeed([(success.work, success.result) for success in batch])
            )
        except Exception as error:  # noqa: BLE001 - a data error: the caller classifies it
            if len(batch) == 1:
                if not batch[0].is_settled.done():
                    batch[0].is_settled.set_exception(error)
                return
            middle = len(batch) // 2
            await self._commit(batch[:middle])
            await self._commit(batch[middle:])
            return
        for success in batch:
            if not success.is_settled.done():
                success.is_settled.set_result(success.work.id in settled.ids)
        if settled.promoted_count:
            self._on_promoted()


async def until_available(act: Callable[[], Awaitable[T]]) -> T:
    """Do it, and do it again while the database is away or a race was lost. Cancel it to give up."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((StoreUnavailable, *_LOST_RACES)),
        wait=wait_random_exponential(multiplier=0.1, max=2),
    )

    async def awaited() -> T:  # tenacity awaits coroutine functions only, not what a lambda returns
        return await act()

    return await retrying(awaited)
