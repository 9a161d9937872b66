"""A worker's beat: what it had to tell is told in the end."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from towpath.consumer.membership import Membership
from towpath.store.work import Work
from towpath.store.workers import WorkerStore

Reports = Mapping[tuple[UUID, UUID], Mapping[str, object]]


class SlowAtFirst:
    """Does not answer the first report within a beat."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.told: asyncio.Future[Reports] = asyncio.get_running_loop().create_future()

    async def report_progress(self, reports: Reports) -> None:
        if not self.asked.is_set():
            self.asked.set()
            await asyncio.get_running_loop().create_future()
        if not self.told.done():
            self.told.set_result(reports)

    async def beat(self) -> None: ...

    async def ensure_installed(self) -> None: ...

    async def cancellations(self, running: object) -> list[UUID]:
        return []


def work() -> Work:
    return Work(
        id=uuid4(), type="t", kind="task", source="s", key=None, lane=None, position=None, payload=None,
        content_type=None, headers=(), trace=None, token=uuid4(),
    )  # fmt: skip


@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_progress_whose_beat_was_cut_off_goes_out_with_the_next(is_overtaken: bool) -> None:
    """The latest report wins, also over one that was on its way."""

    async def nothing() -> None: ...

    store = SlowAtFirst()
    membership = Membership(
        cast(WorkerStore, store),
        lease_seconds=600,
        beat_seconds=0.02,
        running=list,
        on_cancel=lambda _: None,
        on_beat=nothing,
        on_progress=lambda _: None,
        on_outdated=lambda _: None,
    )
    first, second = work(), work()
    membership.report(first, {"done": 1})
    membership.report(second, {"done": 1})
    running: asyncio.Task[Any] = asyncio.create_task(membership.run())
    await store.asked.wait()
    if is_overtaken:
        membership.report(first, {"done": 2})
    told = await store.told
    running.cancel()
    await asyncio.wait([running])
    assert sorted(each["done"] for each in told.values()) == ([1, 2] if is_overtaken else [1, 1])
