"""Puts the parts of one member together: what it is made of, and the loops that keep it going."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from towpath.app import App
from towpath.brokers.ports import Subscriber
from towpath.consumer.batches import Batches
from towpath.consumer.bookmarks import Bookmarks
from towpath.consumer.breakers import Breakers
from towpath.consumer.burials import Burials
from towpath.consumer.census import CensusLoop
from towpath.consumer.endings import Endings
from towpath.consumer.execution import Executor
from towpath.consumer.held import Held
from towpath.consumer.loopwatch import LoopWatch
from towpath.consumer.membership import Membership
from towpath.consumer.patience import Patience
from towpath.consumer.pauses import Pauses
from towpath.consumer.pump import Pump
from towpath.consumer.reaper import Reaper
from towpath.consumer.receiving import Receiver
from towpath.consumer.reconciling import Reconciler
from towpath.consumer.repeats import Repeats
from towpath.consumer.reporting import Report
from towpath.consumer.roster import Roster
from towpath.consumer.running import Runner
from towpath.consumer.settling import GroupCommit
from towpath.consumer.slots import Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.takeovers import Takeovers
from towpath.consumer.upkeep import DueLoop, StoreWatch, wake_after
from towpath.consumer.waves import Waves
from towpath.errors import SchemaMismatch
from towpath.outbox import Outbox
from towpath.settings import WorkerSettings
from towpath.store.broker_deaths import BrokerDeathStore
from towpath.store.census import CensusStore
from towpath.store.claims import ClaimStore
from towpath.store.database import Database
from towpath.store.doubts import DoubtStore
from towpath.store.groups import Terms
from towpath.store.offsets import OffsetStore
from towpath.store.reaping import ReapStore
from towpath.store.settles import SettleStore
from towpath.store.sync_settles import SyncSettleStore
from towpath.store.workers import WorkerStore
from towpath.telemetry.metrics import Telemetry


@dataclass(frozen=True, slots=True)
class Parts:
    """What a member itself has to do with."""

    workers: WorkerStore
    membership: Membership
    roster: Roster
    held: Held
    group_commit: GroupCommit
    bookmarks: Bookmarks
    wakes: Sequence[asyncio.Event]
    """For whoever starts work, from the broker and from the database."""
    loops: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    """They take work in; they end before it is drained."""


def wire(
    worker_id: UUID,
    app: App,
    database: Database,
    subscriber: Subscriber,
    settings: WorkerSettings,
    *,
    pauses: Pauses,
    terms: Terms,
    installation: str,
    destinations: Mapping[str, str],
    outbox: Outbox,
    resources: Mapping[type, object],
    telemetry: Telemetry,
    broker_labels: Mapping[str, str | int],
    on_progress: Callable[[str], None],
    on_outdated: Callable[[SchemaMismatch], None],
    on_blocked: Callable[[str, float], None],
) -> Parts:
    """The parts of one member, knowing each other."""
    claims = ClaimStore(
        database,
        app.name,
        worker_id,
        is_ordered_by_key=app.ordering == "key",
        max_parked=settings.max_parked_per_key,
        types=app.handlers,
    )
    settles = SettleStore(database, app.name, worker_id)
    doubts = DoubtStore(database, app.name)
    roster = Roster(app.name, settles, doubts)
    workers = WorkerStore(database, app.name, worker_id, settings.lease.total_seconds(), terms)
    membership = Membership(
        workers,
        lease_seconds=settings.lease.total_seconds(),
        beat_seconds=settings.beat_every.total_seconds(),
        running=roster.running_ids,
        on_cancel=roster.cancel,
        on_beat=pauses.look,
        on_progress=on_progress,
        on_outdated=on_outdated,
    )
    watch = StoreWatch(app.name)
    breakers = Breakers(app.handlers, time.monotonic)
    suspects = Suspects(
        settings.concurrency, settings.max_deliveries, settings.quiet.total_seconds(), time.monotonic
    )
    wake, wake_pump = asyncio.Event(), asyncio.Event()
    slots = Slots(app.handlers, settings, wake=wake_pump, wake_due=wake)
    group_commit = GroupCommit(settles, wake.set)
    executor = Executor(
        app,
        database,
        settles,
        SyncSettleStore(database.schema, app.name, worker_id),
        doubts,
        outbox,
        resources,
        membership.report,
    )
    report = Report(app.name, telemetry)
    endings = Endings(app, settles, doubts, group_commit, breakers, report, partial(wake_after, wake))
    runner = Runner(
        app,
        claims,
        executor,
        endings,
        group_commit,
        breakers,
        pauses,
        report,
        broker_labels,
        settings.max_deliveries,
    )
    waves = Waves(app.handlers, runner, Batches(runner, executor, roster), roster, slots)
    held = Held(subscriber, slots, wake_pump)
    repeats = Repeats(subscriber, claims, watch)
    receiver = Receiver(
        app,
        subscriber,
        held.lanes,
        destinations=destinations,
        pauses=pauses,
        repeats=repeats,
        wake=wake_pump,
        telemetry=telemetry,
        on_progress=on_progress,
    )
    patience = Patience(
        settings.ack_after, held=held, settles=settles, roster=roster, watch=watch, on_progress=on_progress
    )
    burials = Burials(
        app,
        settles,
        BrokerDeathStore(database, app.name, worker_id),
        installation=installation,
        held=held,
        runner=runner,
        endings=endings,
        report=report,
    )
    takeovers = Takeovers(
        held, claims=claims, roster=roster, watch=watch, suspects=suspects, slots=slots, pauses=pauses
    )
    pump = Pump(
        settings,
        group=app.name,
        held=held,
        claims=claims,
        takeovers=takeovers,
        runner=runner,
        burials=burials,
        roster=roster,
        waves=waves,
        watch=watch,
        suspects=suspects,
        breakers=breakers,
        pauses=pauses,
        repeats=repeats,
        wake=wake_pump,
        on_progress=on_progress,
    )
    due = DueLoop(
        settings,
        claims=claims,
        waves=waves,
        roster=roster,
        watch=watch,
        suspects=suspects,
        slots=slots,
        breakers=breakers,
        pauses=pauses,
        wake=wake,
        on_progress=on_progress,
    )
    reaper = Reaper(
        app,
        settings,
        reaps=ReapStore(database, app.name),
        claims=claims,
        roster=roster,
        watch=watch,
        wake=wake,
        telemetry=telemetry,
        is_listening=lambda: subscriber.is_connected and not pauses.is_all,
        on_progress=on_progress,
    )
    census = CensusLoop(
        app.name,
        store=CensusStore(database, app.name),
        watch=watch,
        telemetry=telemetry,
        on_progress=on_progress,
    )
    bookmarks = Bookmarks(
        app.name,
        subscriber,
        OffsetStore(database, app.name),
        watch=watch,
        telemetry=telemetry,
        every_seconds=settings.beat_every.total_seconds(),
        on_progress=on_progress,
    )
    reconciler = Reconciler(
        app,
        executor.caller,
        doubts,
        watch=watch,
        pauses=pauses,
        wake=wake,
        every_seconds=settings.reap_every.total_seconds(),
        on_progress=on_progress,
    )
    intake = (receiver.run, pump.run, patience.run, due.run)
    upkeep = (reaper.run, reconciler.run, census.run, bookmarks.run, LoopWatch(app.handlers, on_blocked).run)
    return Parts(
        workers, membership, roster, held, group_commit, bookmarks, (wake, wake_pump), (*intake, *upkeep)
    )
