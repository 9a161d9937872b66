"""Producers under a steady load: python -m tests.faults.soak.producer SEED FIRST_LANE LANES

The controller writes into a file how many transactions a lane begins in a second; what is late is not made
up for.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from tests.faults.ledger import ENVIRONMENT_VARIABLE, Ledger
from tests.faults.plan import steady_lane
from tests.faults.producer import Producer, until_terminated
from towpath.settings import load

LANES: Final = 16
_LOOK_SECONDS: Final = 0.5
_END: Final = "end"


class Load:
    """Transactions of a lane in a second."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "load"

    def set(self, rate: float | None) -> None:
        """None ends the producers."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(_END if rate is None else str(rate))
        draft.replace(self._file)

    def get(self) -> float | None:
        """As it was set last."""
        text = self._file.read_text()
        return None if text == _END else float(text)

    async def turn(self, last: float) -> float | None:
        """Wait until a transaction may begin after the last one; the time of this one, None at the end."""
        clock = asyncio.get_running_loop().time
        while (rate := self.get()) is not None:
            wait = last + 1 / rate - clock() if rate else _LOOK_SECONDS
            if wait <= 0:
                return max(last + 1 / rate, clock() - 1 / rate)
            await asyncio.sleep(min(wait, _LOOK_SECONDS))
        return None


async def _run(producer: Producer, seed: int, lane: int, load_: Load) -> None:
    last: float | None = asyncio.get_running_loop().time()
    for transaction in steady_lane(seed, lane):
        if producer.has_begun(f"{transaction.name}.0"):
            continue
        assert last is not None
        last = await load_.turn(last)
        if last is None:
            return
        await producer.run((transaction,))


async def produce(seed: int, first_lane: int, count: int) -> None:
    """Some lanes, until the end of the load."""
    producer = Producer(
        os.environ["TOWPATH_TEST_GROUP"],
        load().database_url.get_secret_value(),
        Ledger.of_this_process(),
    )
    load_ = Load(Path(os.environ[ENVIRONMENT_VARIABLE]))
    lanes = range(first_lane, first_lane + count)
    await until_terminated(*(_run(producer, seed, lane, load_) for lane in lanes))


if __name__ == "__main__":
    asyncio.run(produce(*map(int, sys.argv[1:4])))
