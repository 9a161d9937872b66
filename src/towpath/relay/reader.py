"""Reads batches of one database session: polls at cuts, and large windows by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from towpath.errors import ConfigurationError
from towpath.relay.options import RelayOptions
from towpath.relay.outbound import Outbound
from towpath.relay.progress import Batch, Part, Shard
from towpath.relay.window import OpenWindow, plan_poll
from towpath.store.journal import Progress
from towpath.store.outbox import OutboxReader, Row, Server
from towpath.store.scheduled import Outlook
from towpath.store.snapshot import Snapshot

_POLL_BETWEEN_SECONDS: Final = 0.05
"""How often shards at a cut are polled while others work through a large window."""


class MemoryStale(Exception):
    """The server restarted, failed over or was replaced: memory may be ahead of it, reload."""


class Reader:
    """Where reading stands, ahead of what is published. Ends with its connection."""

    def __init__(
        self, store: OutboxReader, server: Server, outbound: Outbound, options: RelayOptions
    ) -> None:
        self._store = store
        self.server = server
        self.outbound = outbound
        self._options = options
        self._stamps: dict[int, int] = {}
        self._cuts: dict[int, Snapshot] = {}
        self._windows: list[OpenWindow] = []
        self._polled_at = float("-inf")
        self.outlook: Outlook | None = None
        """What the last poll saw of delayed events; None where it did not look."""

    @property
    def has_open_window(self) -> bool:
        """Whether more rows can be read at once."""
        return bool(self._windows)

    async def read(self, shards: Sequence[Shard], now: float, *, looks_too: bool = False) -> Batch | None:
        """The next batch of these shards, maybe without rows; None when there is nothing to read.

        With `looks_too` a poll notes the outlook of delayed events as well.

        Raises MemoryStale, and StoreUnavailable when the server became a standby.
        """
        self._follow(shards)
        self.outlook = None
        if self._windows and (not self._cuts or now - self._polled_at < _POLL_BETWEEN_SECONDS):
            return await self._read_window()
        self._polled_at = now
        return await self._poll(looks_too=looks_too)

    def _follow(self, shards: Sequence[Shard]) -> None:
        """Take up shards that are new or begin again, and forget those that are not to be read."""
        stamps = {shard.number: shard.stamp for shard in shards}
        if stamps == self._stamps:
            return
        for number, stamp in list(self._stamps.items()):
            if stamps.get(number) != stamp:
                self._remove(number)
        for shard in shards:
            if shard.number not in self._stamps and shard.done is not None:
                self._place(shard.number, shard.done)
                self._stamps[shard.number] = shard.stamp

    def _remove(self, number: int) -> None:
        del self._stamps[number]
        self._cuts.pop(number, None)
        for window in self._windows:
            window.remove(number)
        self._windows = [window for window in self._windows if window.after]

    def _place(self, number: int, done: Progress) -> None:
        if done.last_id is None:
            self._cuts[number] = done.upto
            return
        for window in self._windows:
            if window.base == done.base and window.upto == done.upto:
                window.after[number] = done.last_id
                return
        self._windows.append(OpenWindow(done.base, done.upto, {number: done.last_id}))

    async def _poll(self, *, looks_too: bool) -> Batch | None:
        plan = plan_poll(self._cuts)
        if plan is None:
            return None
        options = self._options
        poll = await self._store.poll(
            plan.shards,
            plan.base,
            plan.upto,
            row_limit=options.window_rows,
            byte_limit=options.window_bytes,
            looks_too=looks_too,
        )
        self.outlook = poll.outlook
        if poll.server != self.server:
            raise MemoryStale("the server restarted or was replaced")
        if poll.now.xmax < max(plan.base.xmax, poll.upto.xmax):
            raise MemoryStale("the server's snapshot went back")
        if poll.is_truncated:
            for number in plan.shards:
                del self._cuts[number]
            self._windows.append(OpenWindow(plan.base, poll.upto, dict.fromkeys(plan.shards, 0)))
            return await self._read_window()
        self._cuts.update(dict.fromkeys(plan.shards, poll.upto))
        done = Progress(plan.base, poll.upto)
        return self._batch(poll.rows, {number: Part(done, self._stamps[number]) for number in plan.shards})

    async def _read_window(self) -> Batch:
        window = self._windows.pop(0)
        try:
            return await self._read_chunk(window)
        finally:
            if window.after:
                self._windows.append(window)  # several windows take turns

    async def _read_chunk(self, window: OpenWindow) -> Batch:
        options = self._options
        while (unlisted := window.unlisted()) and window.listed_count < options.listed_keys:
            was_enough = window.listed_count >= options.window_rows
            limit = max(options.window_rows, options.listed_keys // len(unlisted))
            lists = await self._store.list_keys(unlisted, window.base, window.upto, limit=limit)
            window.listed(lists, limit=limit, rows_wanted=options.window_rows)
            if was_enough or window.listed_count >= options.window_rows:
                break
        ranges, last_ids = window.next_ranges(options.window_rows)
        rows: Sequence[Row] = ()
        upto_id: int | None = None
        if ranges.count:
            rows = await self._store.fetch(ranges, byte_limit=options.window_bytes)
            if rows and len(rows) < ranges.count:  # cut short by size, or rows somebody deleted
                upto_id = rows[-1][0]
        parts: dict[int, Part] = {}
        for number, last_id in window.consumed(last_ids, upto_id).items():
            parts[number] = Part(Progress(window.base, window.upto, last_id), self._stamps[number])
            if last_id is None:
                self._cuts[number] = window.upto
        return self._batch(rows, parts)

    def _batch(self, rows: Sequence[Row], parts: dict[int, Part]) -> Batch:
        messages, refused = self.outbound.messages(rows)
        return Batch(rows, messages, parts, refused)


def check_not_ahead(loaded: Sequence[Progress], now: Snapshot) -> None:
    """Refuse a journal that is ahead of its own database: nothing in it can be trusted.

    Raises ConfigurationError; it happens when a journal or database was restored separately.
    """
    if any(progress.upto.xmax > now.xmax for progress in loaded):
        raise ConfigurationError(
            "the relay's journal is ahead of this database's transaction ids: the database was restored or "
            "replaced; the relay does not run here, since it could skip messages, before a new starting "
            "point is set: towpath outbox rebase --to oldest --dry-run"
        )
