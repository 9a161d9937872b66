"""The relay: a reader ahead, a publisher behind it; a heartbeat and the mover of delayed events beside them.

```
outbox ──poll──▶ Reading ──Batch──▶ queue of 1 ──▶ Dispatch ──▶ broker
                    ▲                                 │
                    └──── Shards (done, held) ◀─settle┴──▶ journal
```

The reader reads and makes messages while the window before is on its way to the broker, and the
journal is written while the next window is, for small windows of a short time together. So at most two
full windows are published and not written down: as many messages come again after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from typing import Final

from uuid_utils.compat import uuid7

from towpath.brokers.ports import Broker
from towpath.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from towpath.failures import problem_of
from towpath.relay.aside import Aside
from towpath.relay.away import Away
from towpath.relay.canary import Canaries
from towpath.relay.census import CensusLoop
from towpath.relay.directory import Directory
from towpath.relay.dispatch import Dispatch
from towpath.relay.gates import Gates
from towpath.relay.heartbeat import Heartbeat
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter
from towpath.relay.link import LEASES, LISTENS, PROGRESS, READS, SCHEDULE, Link
from towpath.relay.mover import Mover
from towpath.relay.options import RelayOptions
from towpath.relay.pauses import Pauses
from towpath.relay.poison import Poison
from towpath.relay.progress import Shards, boot_time
from towpath.relay.provenance import Provenance, home_of
from towpath.relay.publish import Sender
from towpath.relay.reading import Reading
from towpath.relay.retention import RETENTION, Clearing
from towpath.relay.status import RelayStatus
from towpath.relay.stranded import Stranded
from towpath.relay.wakeup import Wakeup
from towpath.store.backlog import BacklogStore
from towpath.store.canary import CanaryStore
from towpath.store.journal import Journal
from towpath.store.leases import Leases
from towpath.store.parking import Parking
from towpath.store.provenance import ProvenanceStore
from towpath.store.retention import Retention
from towpath.store.scheduled import ScheduledStore
from towpath.store.statements import DEFAULT_SCHEMA
from towpath.store.unpublished import Unpublished
from towpath.store.wakeup import WakeupStore
from towpath.telemetry.metrics import NO_TELEMETRY, Telemetry

_STALLED_SECONDS: Final = 120.0
"""A loop is stuck that is overdue for this long."""
_PUBLISHES: Final = 2
"""Most publishes of a round: what was read, and what waited behind a gate."""
_READ_SECONDS: Final = 60.0
_WRITE_SECONDS: Final = 10.0
_LISTEN_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 5.0


class Relay:
    """Relays the shards of one broker that it can get a lease of, until it is stopped.

    ```python
    relay = Relay(database_url, broker_from_url("kafka://localhost:9092"))
    await relay.run(stop)  # an asyncio.Event
    ```
    """

    def __init__(
        self,
        database_url: str,
        broker: Broker,
        options: RelayOptions | None = None,
        *,
        schema: str = DEFAULT_SCHEMA,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        options = options or RelayOptions()
        self.id = uuid7()
        """New in every process: a restarted relay is another relay."""
        self._options = options
        hooks = self._hooks = RelayHooks(self.id, broker.labels, telemetry)
        journal, leases = Journal(schema), Leases(schema)
        self._shards = Shards(held_bytes=options.held_bytes)
        self._away = Away(options.backoff, hooks)
        self._pauses = Pauses(hooks)
        directory = Directory()
        self._reading_link = Link(database_url, "reader", READS, command_timeout_seconds=_READ_SECONDS)
        self._journal_link = Link(database_url, "journal", PROGRESS, command_timeout_seconds=_WRITE_SECONDS)
        beat_seconds = min(options.renew_every, _WRITE_SECONDS)
        self._heartbeat = Heartbeat(
            self.id,
            platform.node(),
            Link(database_url, "leases", LEASES, command_timeout_seconds=beat_seconds),
            leases,
            self._shards,
            self._pauses,
            directory,
            options,
            hooks,
        )
        parking = Parking(schema)
        self._wakeup = Wakeup(
            Link(database_url, "wakeup", LISTENS, command_timeout_seconds=_LISTEN_SECONDS),
            Link(database_url, "probe", LISTENS, command_timeout_seconds=_LISTEN_SECONDS),
            WakeupStore(schema),
            self._shards,
            options,
            hooks,
        )
        self._mover = Mover(
            Link(database_url, "mover", SCHEDULE, command_timeout_seconds=_READ_SECONDS),
            ScheduledStore(schema),
            options,
            hooks,
        )
        self._reading = Reading(
            self._reading_link,
            schema,
            journal,
            parking,
            self._shards,
            self._pauses,
            directory,
            self._away,
            self._wakeup,
            self._mover,
            options,
            hooks,
        )

        def sender() -> Sender:
            provenance = Provenance(
                Link(database_url, "provenance", LEASES, command_timeout_seconds=_WRITE_SECONDS),
                ProvenanceStore(schema),
                options.environment or home_of(database_url),
                options.broker_number,
            )
            return Sender(broker.publisher(), provenance, options, hooks)

        self._sender = sender()
        self._aside = Aside(sender, Away(options.backoff, hooks))
        writer = JournalWriter(self.id, self._journal_link, journal, leases, self._shards, hooks)
        self._poison = Poison(writer, Unpublished(schema), parking, self._shards, hooks)
        self._gates = Gates(writer, parking, self._poison, self._shards, self._pauses, options, hooks)
        self._canaries = Canaries(
            Link(database_url, "canaries", LEASES, command_timeout_seconds=_WRITE_SECONDS),
            CanaryStore(schema),
            self._shards,
            self._pauses,
            options,
            hooks,
        )
        self._census = CensusLoop(
            Link(database_url, "census", READS, command_timeout_seconds=_READ_SECONDS),
            BacklogStore(schema),
            self._shards,
            options,
            hooks,
        )
        self._dispatch = Dispatch(
            self._reading,
            self._sender,
            writer,
            self._poison,
            self._gates,
            self._canaries,
            self._shards,
            self._pauses,
            self._away,
            self._aside,
            options,
            hooks,
        )
        self._clearing = Clearing(
            Link(database_url, "retention", RETENTION, command_timeout_seconds=_READ_SECONDS),
            Retention(schema),
            self._shards,
            options,
            hooks,
        )
        self._stranded = Stranded(self._heartbeat, (self._reading, self._mover))
        self._is_draining = False

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop` is set, then finish what is in flight and release the leases.

        Raises SchemaMismatch when the schema is not one that this library works with, also where it was
        changed meanwhile. Other ConfigurationErrors, and whatever a loop dies of, come in an
        ExceptionGroup.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._heartbeat.run(stop), name="heartbeat"),
                    tasks.create_task(self._reading.run(), name="reading"),
                    tasks.create_task(self._clearing.run(), name="clearing"),
                    tasks.create_task(self._mover.run(), name="moving"),
                    tasks.create_task(self._canaries.run(), name="canaries"),
                    tasks.create_task(self._wakeup.run(), name="wakeup"),
                    tasks.create_task(self._census.run(), name="census"),
                    tasks.create_task(self._stranded.run(), name="stranded"),
                ]
                publishing = tasks.create_task(self._dispatch.run(stop), name="publishing")
                await self._drained(stop, publishing)
                for task in background:
                    task.cancel()
        finally:
            await self._close()
        if self._heartbeat.outdated is not None:
            raise self._heartbeat.outdated

    def drain(self) -> None:
        """Say "not ready" from now on; `run` is told by its event."""
        self._is_draining = True

    async def _drained(self, stop: asyncio.Event, publishing: asyncio.Task[None]) -> None:
        await stop.wait()
        self.drain()
        grace = self._options.publish_deadline + _WRITE_SECONDS
        done, _ = await asyncio.wait((publishing,), timeout=grace)
        if not done:
            publishing.cancel()

    async def _close(self) -> None:
        await self._dispatch.aclose()
        await self._sender.aclose()
        self._reading_link.drop()
        self._journal_link.drop()
        self._clearing.close()
        self._mover.close()
        self._canaries.close()
        self._census.close()
        self._wakeup.close()
        self._heartbeat.close()  # a beat may have been cut short
        with contextlib.suppress(StoreUnavailable, ConfigurationError, TimeoutError):  # then they expire
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._heartbeat.leave()
        self._heartbeat.close()

    def status(self) -> RelayStatus:
        """How it is right now."""
        now = boot_time()
        problems = [
            f"{'schema' if isinstance(error, SchemaMismatch) else name}: {problem_of(error)}"
            for name, error in (
                ("database", self._reading.error or self._heartbeat.error or self._mover.error),
                ("broker", self._away.problem or self._aside.away.problem),
                ("wakeup", self._wakeup.problem),
            )
            if error is not None
        ]
        blocked = sorted(shard.number for shard in self._shards if shard.gated.is_blocked)
        if blocked:
            problems.append(
                f"shards {blocked}: blocked by a refused message, until its dead letter (towpath dlq list "
                "--stage publish) is replayed or discarded"
            )
        if self._reading.server is None and not problems:
            problems.append("database: not connected yet")
        if not self._sender.is_started and not any(each.startswith("broker:") for each in problems):
            problems.append("broker: not connected yet")
        if now - self._heartbeat.beat_at > self._options.lease:
            problems.append(
                "leases: no heartbeat got through for longer than a lease, other relays take the shards: is "
                "the database slow, or its connections all taken?"
            )
        if self._is_draining:
            problems.append("draining: it takes nothing new and ends")
        options = self._options
        due = {
            "publishing": self._dispatch.ticked_at + _PUBLISHES * options.publish_deadline,
            "heartbeat": self._heartbeat.ticked_at + options.renew_every,
            "moving": self._mover.ticked_at,
        }
        if self._reading.batches.empty():
            due["reading"] = self._reading.ticked_at + options.poll_max
        return RelayStatus(
            relay=str(self.id),
            stuck_loops=sorted(name for name, at in due.items() if now - at >= _STALLED_SECONDS),
            is_ready=not problems,
            is_draining=self._is_draining,
            shards=sorted(shard.number for shard in self._shards),
            shard_count=len(self._options.shards),
            published_count=self._dispatch.published_count,
            put_aside_count=self._poison.count,
            held_count=self._shards.held_count,
            gate_count=self._gates.count,
            blocked_shards=blocked,
            paused=self._pauses.names,
            wakeup="notify" if self._wakeup.obstacle is None else f"poll: {self._wakeup.obstacle}",
            figures=self._hooks.figures.as_dict(now, self._shards.journal_lag(now)),
            problems=problems,
        )
