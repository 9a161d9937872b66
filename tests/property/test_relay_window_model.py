"""The window algebra against a model: whatever transactions do, each committed row is read once.

A model server gives out transaction ids and snapshots as Postgres does. Rows are found by the rules
of the poll statement, written here in Python; the planner of polls and the progress rules are the
real ones.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towpath.relay.window import plan_poll
from towpath.store.snapshot import Snapshot

SHARDS = (0, 1, 2)


@dataclass
class Server:
    """Transaction ids, what is in progress, what committed, and the rows."""

    next_xid: int = 10
    running: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """(id, shard) of the rows written so far, by transaction."""
    committed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    next_id: int = 1

    def snapshot(self) -> Snapshot:
        running = sorted(self.running)
        xmin = running[0] if running else self.next_xid
        return Snapshot(f"{xmin}:{self.next_xid}:{','.join(map(str, running))}")

    def window(self, shards: list[int], base: Snapshot, upto: Snapshot) -> list[tuple[int, int]]:
        """(id, shard) of the rows that the poll statement returns."""
        late = [xid for xid in base.in_progress if upto.sees(xid)]
        young = [xid for xid in self.committed if base.xmax <= xid < upto.xmax and upto.sees(xid)]
        rows = [row for xid in (*late, *young) for row in self.committed.get(xid, [])]
        return sorted(row for row in rows if row[1] in shards)


class Windows(RuleBasedStateMachine):
    """Transactions begin, write, commit and roll back; shards are read, fall behind and catch up."""

    @initialize()
    def begin_reading(self) -> None:
        self.server = Server()
        start = self.server.snapshot()
        self.cuts = dict.fromkeys(SHARDS, start)
        self.held: set[int] = set()
        self.seen: list[tuple[int, int]] = []

    @rule()
    def begin(self) -> None:
        self.server.running[self.server.next_xid] = []
        self.server.next_xid += 1

    @precondition(lambda self: self.server.running)
    @rule(data=st.data(), shard=st.sampled_from(SHARDS))
    def write(self, data: st.DataObject, shard: int) -> None:
        xid = data.draw(st.sampled_from(sorted(self.server.running)))
        self.server.running[xid].append((self.server.next_id, shard))
        self.server.next_id += 1

    @precondition(lambda self: self.server.running)
    @rule(data=st.data(), is_committed=st.booleans())
    def end(self, data: st.DataObject, is_committed: bool) -> None:
        xid = data.draw(st.sampled_from(sorted(self.server.running)))
        rows = self.server.running.pop(xid)
        if is_committed:
            self.server.committed[xid] = rows

    @rule(shard=st.sampled_from(SHARDS))
    def hold_up(self, shard: int) -> None:
        """The shard is not read for a while: its broker partition is slow, or its relay is gone."""
        self.held ^= {shard}

    @rule()
    def crash(self) -> None:
        """Transactions in progress are gone; their ids are not given out again."""
        self.server.running.clear()

    @rule()
    def poll(self) -> None:
        plan = plan_poll({shard: cut for shard, cut in self.cuts.items() if shard not in self.held})
        if plan is None:
            return
        upto = plan.upto or self.server.snapshot()
        assert upto.age_order >= plan.base.age_order
        self.seen += self.server.window(plan.shards, plan.base, upto)
        self.cuts.update(dict.fromkeys(plan.shards, upto))

    @invariant()
    def nothing_is_seen_twice_nor_uncommitted(self) -> None:
        committed = {row for rows in self.server.committed.values() for row in rows}
        assert len(set(self.seen)) == len(self.seen)
        assert set(self.seen) <= committed

    def teardown(self) -> None:
        """In the end, with nothing held up, everything committed was seen and all cuts are one."""
        self.held = set()
        for _ in range(len(SHARDS) + 1):
            self.poll()
        committed = {row for rows in self.server.committed.values() for row in rows}
        assert set(self.seen) == committed
        assert len(set(self.cuts.values())) == 1


TestWindows = Windows.TestCase
TestWindows.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
