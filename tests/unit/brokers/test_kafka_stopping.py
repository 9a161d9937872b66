"""A client that ends in its own way cancels nobody."""

import asyncio
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from towpath.brokers.kafka.connection import stop_consumer


class _Consumer:
    """Stops as it is told to."""

    _coordinator = None

    def __init__(self, how: str) -> None:
        self._how = how
        self.was_stopped = False

    async def stop(self) -> None:
        match self._how:
            case "cancels":  # as `stop` does when a task that it cancels lets that through
                heartbeat = asyncio.create_task(asyncio.sleep(60))
                heartbeat.cancel()
                await heartbeat
            case "hangs":
                await asyncio.get_running_loop().create_future()
            case "fails":
                raise KafkaError("no coordinator")
        self.was_stopped = True


async def _stop(how: str, seconds: float = 60) -> _Consumer:
    consumer = _Consumer(how)
    await stop_consumer(cast("AIOKafkaConsumer", consumer), timeout_seconds=seconds)
    return consumer


async def test_a_consumer_stops() -> None:
    """Nothing is raised."""
    assert (await _stop("well")).was_stopped


@pytest.mark.parametrize(
    ("how", "seconds", "error"),
    [("cancels", 60, KafkaError), ("fails", 60, KafkaError), ("hangs", 0.01, TimeoutError)],
)
async def test_a_stop_that_goes_wrong_is_an_error_of_the_client(
    how: str, seconds: float, error: type[Exception]
) -> None:
    """Not a cancellation of its caller, which would end the worker as if somebody had interrupted it."""
    with pytest.raises(error):
        await _stop(how, seconds)
    task: Any = asyncio.current_task()
    assert task.cancelling() == 0
