"""Handlers' timeouts: one timer for all that may take equally long."""

import asyncio

import pytest

from towpath.consumer.effects.timeouts import Timeouts


class Timers:
    """Counts those that the loop is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def counted(when: float, *arguments: object, **options: object) -> asyncio.TimerHandle:
            timer = call_at(when, *arguments, **options)  # type: ignore[arg-type]  # what it was given
            self.made.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_at", counted)


async def test_those_that_run_side_by_side_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, timeouts, go = Timers(monkeypatch), Timeouts(), asyncio.Event()

    async def wait() -> None:
        with timeouts.after(600):
            await go.wait()

    tasks = [asyncio.create_task(wait()) for _ in range(10)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert [timer.cancelled() for timer in timers.made] == [True], "and nothing is left of it"


async def test_each_is_stopped_when_its_own_time_is_up() -> None:
    """In turn, though the timer was made for the first, which was over before."""
    timeouts, stopped = Timeouts(), list[str]()

    async def wait(name: str, seconds: float, until: float) -> None:
        began = asyncio.get_running_loop().time()
        try:
            with timeouts.after(seconds) as bound:
                await asyncio.sleep(until)
        except TimeoutError:
            assert bound.is_expired
            assert asyncio.get_running_loop().time() >= began + seconds - 1e-6
            stopped.append(name)

    first = asyncio.create_task(wait("first", 0.05, 0.001))
    second = asyncio.create_task(wait("second", 0.05, 600))
    await first
    third = asyncio.create_task(wait("third", 0.05, 600))
    other = asyncio.create_task(wait("other", 0.2, 600))
    await asyncio.gather(second, third, other)
    assert stopped == ["second", "third", "other"]


async def test_a_call_that_swallows_it_goes_on_and_its_task_is_not_being_cancelled() -> None:
    """As with `asyncio.timeout`."""
    timeouts = Timeouts()
    with timeouts.after(0.01) as bound:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            result = "mine"
    task = asyncio.current_task()
    assert task is not None
    assert (bound.is_expired, result, task.cancelling()) == (True, "mine", 0)


async def test_a_failure_on_the_way_out_is_raised_as_it_is() -> None:
    timeouts = Timeouts()

    async def lose() -> None:
        with timeouts.after(0.01):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                raise ValueError("lost") from None

    with pytest.raises(ValueError, match="lost"):
        await lose()


async def test_a_cancellation_by_somebody_else_remains_one_even_when_time_is_up_as_well() -> None:
    timeouts, waiting = Timeouts(), asyncio.Event()

    async def wait() -> None:
        with timeouts.after(0.02):
            waiting.set()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.1))])

    task = asyncio.create_task(wait())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
