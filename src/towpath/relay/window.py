"""The algebra of windows and polling, without any I/O.

Progress of a shard is a snapshot, its cut: everything visible in it is done. A window is what a
later snapshot sees and the cut does not. Shards at the same cut are read together. One that fell
behind (it was held up, or came from another relay) first catches up to the newest cut there is, and
so joins the others again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from towpath.store.outbox import KeyList, KeyRanges
from towpath.store.snapshot import Snapshot

_HOLD_POLLS = 20
_DROWSY_POLLS = 12
_SEVERAL_ROWS = 2.0
_CROWD_ROWS_PER_SECOND = 4000.0
_INTERVAL_ROWS_PER_SECOND = 1000.0
"""How many rows a second make a window fill for one more interval."""
_MOST_INTERVALS = 10
_LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class PollPlan:
    """Which shards to poll from which cut; `upto` is None for "up to now"."""

    shards: list[int]
    base: Snapshot
    upto: Snapshot | None


def plan_poll(cuts: Mapping[int, Snapshot]) -> PollPlan | None:
    """The next poll: the oldest cut up to the newest; with all at one cut, from there up to now."""
    if not cuts:
        return None
    by_age = sorted(set(cuts.values()), key=lambda cut: cut.age_order)
    oldest, newest = by_age[0], by_age[-1]
    shards = sorted(number for number, cut in cuts.items() if cut == oldest)
    return PollPlan(shards, oldest, None if oldest == newest else newest)


@dataclass(slots=True)
class OpenWindow:
    """A window too large for one poll, read by listed keys. Bounded in memory by the key lists."""

    base: Snapshot
    upto: Snapshot
    after: dict[int, int]
    """The last id read, by shard; a shard leaves when it is read to its end."""
    lists: dict[int, KeyList] = field(default_factory=dict)
    cut_short: set[int] = field(default_factory=set)
    """Shards whose list ended at the limit: more keys follow it."""
    list_at_once: int = 1
    """Shards to list with one statement; grows while they turn out to be small."""

    @property
    def listed_count(self) -> int:
        """Keys held."""
        return sum(map(len, self.lists.values()))

    def unlisted(self) -> dict[int, int]:
        """The next shards to list, with the ids to go on after."""
        waiting = [shard for shard in self.after if shard not in self.lists][: self.list_at_once]
        return {shard: self.after[shard] for shard in waiting}

    def listed(self, lists: Mapping[int, KeyList], *, limit: int, rows_wanted: int) -> None:
        """Take in key lists read with `limit`."""
        for shard, keys in lists.items():
            self.lists[shard] = keys
            if len(keys) >= limit:
                self.cut_short.add(shard)
        if sum(map(len, lists.values())) < rows_wanted:
            self.list_at_once *= 2

    def next_ranges(self, row_limit: int) -> tuple[KeyRanges, dict[int, int]]:
        """Keys to fetch, in equal shares of the listed shards, and the last id taken of each."""
        ranges = KeyRanges()
        active = {shard: keys for shard, keys in self.lists.items() if keys}
        share = max(1, row_limit // max(1, len(active)))
        last_ids = {shard: ranges.add(shard, keys.first(share)) for shard, keys in active.items()}
        return ranges, last_ids

    def consumed(self, last_ids: Mapping[int, int], upto_id: int | None) -> dict[int, int | None]:
        """Count keys as read, up to an id where the fetch was cut short by its size.

        Returns for each shard that moved the last id read, or None when its window is read to the
        end; such a shard is removed. A shard with an empty list is at its end too.
        """
        moved: dict[int, int | None] = {}
        for shard, last_id in last_ids.items():
            end = last_id if upto_id is None else min(last_id, upto_id)
            keys = self.lists[shard]
            before = len(keys)
            keys.consume_up_to(end)
            if len(keys) < before:
                self.after[shard] = end
                moved[shard] = end
        for shard, keys in list(self.lists.items()):
            if keys:
                continue
            del self.lists[shard]
            if shard in self.cut_short:
                self.cut_short.remove(shard)
            else:
                del self.after[shard]
                moved[shard] = None
        return moved

    def remove(self, shard: int) -> None:
        """Forget a shard."""
        self.after.pop(shard, None)
        self.lists.pop(shard, None)
        self.cut_short.discard(shard)


class Pace:
    """Poll intervals in seconds: the shortest while rows come and for a short hold after, then doubling.

    Half of that where each poll would find several rows.

    Where thousands of rows come a second a window is given longer to fill, and the longer the more there
    are, but not to more than half of what is published at once: polls and publishes cost by the window as
    well as by the row, and writers want the processors.

    Where rows are notified it goes on to the one for sleeping, after a time at the longest: a
    transaction that wrote before notifying was asked for is mostly over by then, and found sooner.
    """

    def __init__(self, shortest: float, longest: float, asleep: float, window_rows: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._asleep = max(longest, asleep)
        self._window_rows = window_rows
        self._quiet_polls = 0
        self._drowsy_polls = 0
        self._polled_at = float("-inf")
        self._usual_rate = 0.0
        """Rows a second, of late."""

    @property
    def is_idle(self) -> bool:
        """Whether the longest interval is reached."""
        return self._drowsy_polls > 0

    def after(self, row_count: int, now: float, *, is_notified: bool) -> float:
        """The wait after a poll that began now and returned so many rows."""
        self._quiet_polls = 0 if row_count else self._quiet_polls + 1
        current = row_count / max(now - self._polled_at, self._shortest / 2)
        rate = min(self._usual_rate, current)  # of a burst, which is over soon, neither may be taken alone
        self._usual_rate += (current - self._usual_rate) * _LEARNING_RATE
        self._polled_at = now
        if rate > _CROWD_ROWS_PER_SECOND:
            self._drowsy_polls = 0
            return min(self._longest, self._filling(rate))
        are_several = self._usual_rate * self._shortest > _SEVERAL_ROWS
        doublings = min(max(0, self._quiet_polls - _HOLD_POLLS), 30)
        wait = min(self._longest, self._shortest * 2.0 ** (doublings - are_several))
        self._drowsy_polls = self._drowsy_polls + 1 if wait == self._longest and not row_count else 0
        if is_notified and self._drowsy_polls > _DROWSY_POLLS:
            return self._asleep
        return wait

    def _filling(self, rows_per_second: float) -> float:
        """How long a window fills where so many come."""
        by_rate = min(rows_per_second / _INTERVAL_ROWS_PER_SECOND, _MOST_INTERVALS) * self._shortest
        return max(self._shortest, min(by_rate, self._window_rows / 2 / rows_per_second))
