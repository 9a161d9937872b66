"""Group commit of successes: one transaction for whatever finished while the last one ran."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import asyncpg
import msgspec
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


class Success(msgspec.Struct, eq=False):
    """One finished handler whose row has to say so."""

    work: Work
    result: bytes | None
    outcome: bool | Exception | None = None
    """True: the row is SUCCEEDED. False: the token was gone. Or what the database says about this row."""

    @property
    def size_bytes(self) -> int:
        """What it adds to the statement."""
        return 64 + len(self.result or b"")


@dataclass(slots=True, eq=False)
class _Waiting:
    """Successes that somebody waits for, few enough for one statement."""

    successes: Sequence[Success]
    size_bytes: int
    is_settled: "asyncio.Future[None]" = field(repr=False)


class GroupCommit:
    """Collects successes and settles them in batches. `run` is its one owner."""

    def __init__(self, store: SettleStore, on_promoted: Callable[[], None]) -> None:
        self._store = store
        self._on_promoted = on_promoted
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    async def settle(self, successes: Sequence[Success]) -> None:
        """Return when each has its outcome. Waits while the database is away."""
        loop = asyncio.get_running_loop()
        parts = [
            _Waiting(part, size_bytes, loop.create_future()) for part, size_bytes in _within_limits(successes)
        ]
        self._queue.extend(parts)
        self._arrived.set()
        for part in parts:
            await part.is_settled

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not self._queue:
                self._arrived.clear()
            wanted = [part for part in batch if not part.is_settled.done()]  # else its owner was cancelled
            await self._commit([success for part in wanted for success in part.successes])
            for part in wanted:
                if not part.is_settled.done():
                    part.is_settled.set_result(None)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        count, size_bytes = 0, 0
        while self._queue:
            count += len(self._queue[0].successes)
            size_bytes += self._queue[0].size_bytes
            if batch and (count > BATCH_LIMIT or size_bytes > BATCH_LIMIT_BYTES):
                break
            batch.append(self._queue.popleft())
        return batch

    async def _commit(self, batch: Sequence[Success]) -> None:
        """A database that is away: the whole batch again. A row that offends: bisect to it."""
        if not batch:
            return
        try:
            settled = await until_available(
                lambda: self._store.succeed([(success.work, success.result) for success in batch])
            )
        except Exception as error:  # noqa: BLE001 - a data error: whoever waits classifies it
            if len(batch) == 1:
                batch[0].outcome = error
                return
            middle = len(batch) // 2
            await self._commit(batch[:middle])
            await self._commit(batch[middle:])
            return
        for success in batch:
            success.outcome = success.work.id in settled.ids
        if settled.promoted_count:
            self._on_promoted()


def _within_limits(successes: Sequence[Success]) -> Iterator[tuple[list[Success], int]]:
    """Parts that one statement can take, with their sizes; a success too large for any is alone."""
    part: list[Success] = []
    size_bytes = 0
    for success in successes:
        size = success.size_bytes
        if part and (len(part) == BATCH_LIMIT or size_bytes + size > BATCH_LIMIT_BYTES):
            yield part, size_bytes
            part, size_bytes = [], 0
        part.append(success)
        size_bytes += size
    if part:
        yield part, size_bytes


async def until_available(act: Callable[[], Awaitable[T]]) -> T:
    """Do it, and do it again while the database is away or a race was lost. Cancel it to give up."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((StoreUnavailable, *_LOST_RACES)),
        wait=wait_random_exponential(multiplier=0.1, max=2),
    )

    async def awaited() -> T:  # tenacity awaits coroutine functions only, not what a lambda returns
        return await act()

    return await retrying(awaited)
