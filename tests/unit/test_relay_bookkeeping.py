"""When a relay writes its progress down, beside publishing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from towpath.errors import StoreUnavailable
from towpath.relay.bookkeeping import Bookkeeping
from towpath.relay.options import RelayOptions

WINDOW = 100


class Desk:
    """Bookkeeping over a journal that counts what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, apart_seconds: float) -> None:
        monkeypatch.setattr("towpath.relay.bookkeeping._APART_SECONDS", apart_seconds)
        self.unwritten = 0
        self.rows: list[int] = []
        self.failures: list[Exception] = []
        self.ticks = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.began, self.wrote = asyncio.Event(), asyncio.Event()
        server: Any = SimpleNamespace(server=object())
        journal: Any = SimpleNamespace(
            due=lambda _: [0] * bool(self.unwritten), flush=self.flush, drop_connection=lambda: None
        )
        hooks: Any = SimpleNamespace(store_unavailable=lambda *_: None)
        options = RelayOptions(window_rows=WINDOW)
        self.books = Bookkeeping(server, journal, options, hooks, self.tick)

    def tick(self) -> None:
        self.ticks += 1

    async def flush(self, _server: object, *, unchanged_for: float) -> None:
        assert unchanged_for == 10.0
        self.began.set()
        await self.may_end.wait()
        if self.failures:
            raise self.failures.pop()
        count, self.unwritten = self.unwritten, 0
        if count:
            self.rows.append(count)
            self.wrote.set()

    async def publish(self, count: int) -> None:
        self.books.expect(count)
        await asyncio.sleep(0)
        self.unwritten += count
        await self.books.published(count)


async def test_windows_of_a_short_time_are_written_down_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: at the end, or when something else wants the journal's connection, without waiting for the time."""
    desk = Desk(monkeypatch, 3600)
    desk.books._wrote_at = float("inf")
    for _ in range(9):
        await desk.publish(10)
    await asyncio.sleep(0)
    assert desk.rows == []
    await desk.books.written()
    assert desk.rows == [90]
    await desk.publish(10)
    await desk.books.write()
    assert desk.rows == [90, 10]


async def test_what_waits_is_written_down_in_time_though_nothing_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R4"""
    desk = Desk(monkeypatch, 0.001)
    await desk.publish(1)
    await asyncio.wait_for(desk.wrote.wait(), 60)
    assert desk.rows == [1]


async def test_no_more_than_two_full_windows_are_ever_published_and_not_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R4: whatever the windows' sizes, one is published while the journal is slow, and the next waits."""
    desk = Desk(monkeypatch, 3600)
    desk.books._wrote_at = float("inf")
    await desk.publish(WINDOW // 2)
    desk.may_end.clear()
    desk.books.expect(WINDOW)
    await asyncio.wait_for(desk.began.wait(), 60)
    following = asyncio.create_task(desk.publish(WINDOW))
    await asyncio.sleep(0.01)
    assert not following.done()
    assert desk.unwritten == WINDOW // 2 + WINDOW
    desk.may_end.set()
    await asyncio.wait_for(following, 60)
    await desk.books.write()
    assert sum(desk.rows) == WINDOW // 2 + WINDOW


async def test_progress_is_written_down_however_long_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R4: and the loop that waits for it counts as alive."""
    desk = Desk(monkeypatch, 0.0)
    desk.failures = [StoreUnavailable("away"), StoreUnavailable("away")]
    await desk.publish(3)
    await asyncio.wait_for(desk.books.written(), 60)
    assert desk.rows == [3]
    assert desk.ticks == 2
    await desk.books.aclose()
