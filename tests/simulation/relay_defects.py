"""Ways to break the promise, planted into the engine or into the rules of its statements."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from tests.simulation.gates import GatedSchema
from tests.simulation.leases import LeasedSchema
from tests.simulation.loop import PROCESS
from tests.simulation.schema import Schema
from towpath.relay import admission, heartbeat, progress, publish
from towpath.relay.admission import Admission
from towpath.relay.dispatch import Dispatch
from towpath.relay.gates import Gates
from towpath.relay.heartbeat import Heartbeat
from towpath.relay.progress import Batch, Shards
from towpath.relay.reader import Reader
from towpath.store.journal import Progress
from towpath.store.parking import Parking
from towpath.store.snapshot import Snapshot

Patch = pytest.MonkeyPatch
_SERVER: Final = {"started_at": "1", "timeline": "1", "backend": "1"}


def fencing_is_skipped(patch: Patch) -> None:
    """Nobody looks whether the lease covers a publish, nor whether it is still held."""
    patch.setattr(LeasedSchema, "holds", lambda *_: True)
    patch.setattr(Admission, "covered", lambda _, batch: (list(batch.parts), []))


def leases_end_by_the_wall_clock(patch: Patch) -> None:
    """Which is behind after the machine was suspended."""
    boot_time, covered = progress.boot_time, Admission.covered

    def wall_clock() -> float:
        process = PROCESS.get()
        return boot_time() - (process.suspended_seconds if process else 0.0)

    def covered_by_the_wall_clock(self: Admission, batch: Batch) -> Any:
        with patch.context() as inner:
            inner.setattr(admission, "boot_time", wall_clock)
            return covered(self, batch)

    patch.setattr(heartbeat, "boot_time", wall_clock)
    patch.setattr(Admission, "covered", covered_by_the_wall_clock)


def shards_are_released_while_they_publish(patch: Patch) -> None:
    beat = Heartbeat.beat

    async def and_release(self: Heartbeat) -> bool:
        is_satisfied = await beat(self)
        leaving = {shard.number: shard.epoch for shard in self._shards if shard.is_leaving}
        if leaving:
            await self._leases.release(await self._link.connection(), self._relay, leaving)
        return is_satisfied

    patch.setattr(Heartbeat, "beat", and_release)


def shards_are_released_while_they_publish_beside(patch: Patch) -> None:
    patch.setattr(Dispatch, "_is_quiet", lambda *_: True)


def late_commits_are_not_looked_for(patch: Patch) -> None:
    """As reading by `id > last` does."""
    patch.setattr(Snapshot, "bounds", property(lambda self: (str(self.xmax), "{}")))


def late_transactions_are_taken_for_finished(patch: Patch) -> None:
    """The next window probes nothing of this one's transactions in progress."""
    poll = Schema.poll

    def finished(self: Schema, x: Any, *arguments: Any) -> Any:
        head, *rows = poll(self, x, *arguments)
        end = Snapshot(head["destination"])
        return [head.but(destination=f"{end.xmax}:{end.xmax}:"), *rows]

    patch.setattr(Schema, "poll", finished)


def a_window_reaches_beyond_its_end(patch: Patch) -> None:
    """What committed since the end of the window is read with it."""
    patch.setattr(Schema, "_is_seen", lambda self, xid, _: xid not in self.running)


def rows_are_ordered_by_time(patch: Patch) -> None:
    """By transaction, as if those began in the order in which they commit."""
    poll = Schema.poll

    def by_transaction(self: Schema, x: Any, *arguments: Any) -> Any:
        xids = {row["id"]: xid for xid, rows in self.outbox.items() for row in rows}
        head, *rows = poll(self, x, *arguments)
        return [head, *sorted(rows, key=lambda row: xids[row["id"]])]

    patch.setattr(Schema, "poll", by_transaction)


def progress_moves_before_the_acknowledgement(patch: Patch) -> None:
    send = publish.Sender.send

    async def settled_first(self: Any, batch: Batch) -> Any:
        result = await send(self, batch)
        result.acknowledged = set(range(len(batch.messages))) - result.refused.keys()
        return result

    patch.setattr(publish.Sender, "send", settled_first)


def the_journal_is_written_before_the_publish(patch: Patch) -> None:
    handle = Dispatch._handle

    async def journal_first(self: Dispatch, batch: Batch) -> None:
        for number, part in batch.parts.items():
            shard = self._shards.get(number)
            if shard is not None and shard.stamp == part.stamp:
                shard.done, shard.dirty_since = part.done, progress.boot_time()
        await self._flush()
        await handle(self, batch)

    patch.setattr(Dispatch, "_handle", journal_first)


def a_gap_is_passed(patch: Patch) -> None:
    """Progress goes to the last acknowledged message, and not to the first that is not."""
    settle = Shards.settle
    patch.setattr(
        Shards,
        "settle",
        lambda self, batch, left: settle(
            self, batch, {number: list(indexes)[1:] for number, indexes in left.items()}
        ),
    )


def memory_outlives_the_server(patch: Patch) -> None:
    """No statement tells which server it ran on, and a snapshot that went back is not believed."""
    poll, append = Schema.poll, LeasedSchema.append_progress

    def of_any_server(self: Schema, x: Any, xmax: str, *arguments: Any) -> Any:
        head, *rows = poll(self, x, xmax, *arguments)
        upto = max(Snapshot(head["destination"]), Snapshot(f"{xmax}:{xmax}:"), key=lambda each: each.xmax)
        return [head.but(type="1", key="1", kind="1:1000000000:", destination=upto.text), *rows]

    for statement in ("state", "gates_of", "released"):
        asks = getattr(GatedSchema, statement)
        patch.setattr(
            GatedSchema,
            statement,
            lambda self, x, *arguments, asks=asks: asks(self, x, *arguments[:-1], str(self.starts)),
        )
    patch.setattr(Schema, "poll", of_any_server)
    patch.setattr(Schema, "server", lambda self, _: [_SERVER | {"snapshot": self.snapshot().text}])
    patch.setattr(
        LeasedSchema,
        "append_progress",
        lambda self, x, *arguments: append(self, x, *arguments[:-2], str(self.starts), str(self.timeline)),
    )


def a_window_begun_is_taken_for_done(patch: Patch) -> None:
    """Who resumes in the middle of a window begins with the next one."""
    place = Reader._place
    patch.setattr(
        Reader, "_place", lambda self, number, done: place(self, number, Progress(done.base, done.upto))
    )


def a_stale_batch_counts(patch: Patch) -> None:
    """What was read before a failure or a reload is sent, and moves progress, all the same."""
    handle = Dispatch._handle

    async def whatever_its_stamp(self: Dispatch, batch: Batch) -> None:
        for number, part in list(batch.parts.items()):
            shard = self._shards.get(number)
            if shard is not None:
                batch.parts[number] = replace(part, stamp=shard.stamp)
        await handle(self, batch)

    patch.setattr(Dispatch, "_handle", whatever_its_stamp)


def parked_messages_are_forgotten(patch: Patch) -> None:
    async def forget(*_: object) -> None:
        """They are past progress, and nowhere else."""

    patch.setattr(Parking, "park", forget)


def gates_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(Gates, "concerns", lambda *_: False)


def a_gate_is_removed_with_messages_behind_it(patch: Patch) -> None:
    remove = GatedSchema.remove

    def at_once(self: GatedSchema, x: Any, gates: list[int]) -> Any:
        parked, self.parked = self.parked, {}
        try:
            return remove(self, x, gates)
        finally:
            self.parked = parked

    patch.setattr(GatedSchema, "remove", at_once)


def an_older_row_of_the_journal_wins(patch: Patch) -> None:
    """Progress is loaded from whichever row the trimming has left."""

    def oldest(self: LeasedSchema) -> Any:
        found: dict[int, Any] = {}
        for seq, (parts, _, _) in self.journal.items():
            for shard, epoch, last_id in parts:
                found.setdefault(shard, (epoch, seq, last_id))
        return found

    patch.setattr(LeasedSchema, "_newest", oldest)


class Defect(NamedTuple):
    plant: Callable[[Patch], None]
    shows: tuple[str, ...]
    """What is wrong then, one of these."""


DEFECTS: Final = {
    plant.__name__.replace("_", " "): Defect(plant, shows)
    for plant, shows in {
        fencing_is_skipped: ("not the owner",),
        leases_end_by_the_wall_clock: ("not the owner",),
        shards_are_released_while_they_publish: ("not the owner",),
        shards_are_released_while_they_publish_beside: ("not the owner",),
        late_commits_are_not_looked_for: ("lost",),
        late_transactions_are_taken_for_finished: ("lost",),
        a_window_reaches_beyond_its_end: ("twice without a reason",),
        rows_are_ordered_by_time: ("out of order",),
        progress_moves_before_the_acknowledgement: ("lost",),
        the_journal_is_written_before_the_publish: ("lost",),
        a_gap_is_passed: ("lost",),
        memory_outlives_the_server: ("lost",),
        a_window_begun_is_taken_for_done: ("lost",),
        a_stale_batch_counts: ("lost", "out of order"),
        parked_messages_are_forgotten: ("lost",),
        gates_are_not_looked_for: ("out of order",),
        a_gate_is_removed_with_messages_behind_it: ("lost",),
        an_older_row_of_the_journal_wins: ("lost", "twice without a reason"),
    }.items()
}
