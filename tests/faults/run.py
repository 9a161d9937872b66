"""One run: start, strike, let it settle, end, judge."""

import asyncio
import shutil
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Final
from uuid import UUID

from tests.acceptance.world import TOWPATH, world_of
from tests.faults.case import Case
from tests.faults.checker import check
from tests.faults.evidence import Evidence, gather
from tests.faults.fault import LIVE_WORKERS, Fault
from tests.faults.faults import FAULTS
from tests.faults.ledger import Intended, Record, Struck, calm, cure, now, read
from tests.faults.plan import Plan, Strike
from tests.faults.report import Outcome
from tests.faults.servers import Servers
from tests.faults.world import MEMBERS, PRODUCERS, RELAYS, SCHEMA, UNREACHABLE, FaultWorld
from towpath.states import FINAL
from towpath.testing.services import create_database, drop_database

PATIENCE_SECONDS: Final = 150.0
"""For everything to end after the last fault did."""
_REST_SECONDS: Final = 60.0
_DESCRIPTORS_MORE: Final = 64
"""All pools full, where they were empty."""
_OPEN: Final = (
    "select message_id from towpath.dead_letter"
    " where consumer_group = $1 and state = 'open' and stage = 'handle'"
)
_TASKS: Final = """
select id, state = any($2::text[]) as is_ended from towpath.task where consumer_group = $1
union all
select id, true from kept_task
"""
_UNSENT: Final = "select count(*) from towpath.outbox_message where status = 'PENDING'"
_LEFT: Final = """
select (select count(*) from towpath.key_gate where consumer_group = $1) as "key gates",
       (select count(*) from towpath.outbox_message where status = 'PENDING') as "unsent messages",
       (select count(*) from towpath.shard_lease
         where relay is not null and lease_until > clock_timestamp()) as "leases",
       (select count(*) from towpath.worker where lease_until > clock_timestamp()) as "living workers",
       (select count(*) from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()
           and backend_type = 'client backend') as "sessions"
"""


async def perform(
    plan: Plan,
    servers: Servers,
    template: str,
    directory: Path,
    *,
    defect: str = "",
    patience_seconds: float = PATIENCE_SECONDS,
    keep: bool = False,
) -> Outcome:
    """One run on a fresh database. `directory`, with the evidence, stays if it failed, else on demand.

    `patience_seconds` after the last fault the verdict is about whatever there is.
    """
    outcome = Outcome(plan, servers.broker_name)
    started = time.monotonic()
    name = f"faults_{plan.seed}_{time.time_ns()}"
    faults = [FAULTS[strike.fault]() for strike in plan.strikes]
    directory.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        shared = servers
        for fault in faults:
            servers = await stack.enter_async_context(fault.servers(servers, template))
        await asyncio.to_thread(create_database, servers.postgres.url(), name, template=template)
        make = partial(
            FaultWorld,
            servers=servers,
            seed=plan.seed,
            faults=faults,
            defect=defect,
        )
        try:
            url = servers.postgres.url(name)
            async with world_of(url, servers.wire, directory, make=make) as world:
                try:
                    await Run(world, plan, faults, outcome, patience_seconds).to_its_end()
                except Exception:  # noqa: BLE001 - a run that fails is a verdict, and not the end of the others
                    outcome.trouble = traceback.format_exc()
                finally:
                    world.close(directory)
        finally:
            if servers is shared:  # one of its own goes as a whole
                await asyncio.to_thread(drop_database, servers.postgres.url(), name)
    outcome.seconds = time.monotonic() - started
    if outcome.is_kept and not keep:
        shutil.rmtree(directory)
    return outcome


class Run:
    """The steps of a run."""

    replay_seconds = 5.0
    """Between replays."""

    def __init__(
        self,
        world: FaultWorld,
        plan: Plan,
        faults: Sequence[Fault],
        outcome: Outcome,
        patience_seconds: float,
    ) -> None:
        self._world = world
        self._plan = plan
        self._faults = faults
        self._outcome = outcome
        self._patience_seconds = patience_seconds
        self._exits: dict[str, int] = {}

    async def to_its_end(self) -> None:
        """The verdict goes into the outcome."""
        world = self._world
        await world.db.execute(SCHEMA.read_text())
        await world.broker.listen(world.steps)
        # RabbitMQ gives a queue to the member that comes first: that is the one to strike.
        for name in (*RELAYS, MEMBERS[0], *PRODUCERS):
            world.start(name)
        await world.until_counted(1, "select count(*) from done")
        world.start(MEMBERS[1])
        before = _descriptors(world.pids[name] for name in (*RELAYS, *MEMBERS))
        strikes = [
            self._strike(strike, fault)
            for strike, fault in zip(self._plan.strikes, self._faults, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            replays = tasks.create_task(self._replay_for_ever())
            await asyncio.gather(*strikes)
            replays.cancel()
        await world.reopen()
        for name in PRODUCERS:
            await world.finished(name, seconds=PATIENCE_SECONDS)
        await self._settle()
        grown = {
            f"descriptors more in process {pid}": count - before[pid]
            for pid, count in _descriptors(before).items()
            if count > before[pid] + _DESCRIPTORS_MORE
        }
        for name in (*MEMBERS, *RELAYS):
            self._exits[name] = await world.patiently(name)
        evidence = await gather(world, await self._left(grown))
        evidence.save(world.directory / "evidence.json")
        self._outcome.message_count = len(Case(evidence).committed)
        self._outcome.breaches = check(evidence)

    async def _strike(self, strike: Strike, fault: Fault) -> None:
        world = self._world
        await asyncio.sleep(min(strike.at_seconds, fault.latest_seconds))
        since = now()
        await fault.begin(world)
        await asyncio.sleep(max(strike.lasts_seconds, fault.least_seconds))
        await fault.end(world)
        if fault.is_missed:
            self._outcome.missed.append(strike.fault)
        world.notes.write(Struck(strike.fault, fault.touches, since, now()))

    async def _replay_for_ever(self) -> None:
        """Also while faults strike, if the database answers."""
        while True:
            await asyncio.sleep(self.replay_seconds)
            try:
                await self._replay()
            except UNREACHABLE:
                with suppress(*UNREACHABLE):
                    await self._world.reopen()

    async def _replay(self) -> None:
        """What died because it was told to is cured and sent back."""
        world = self._world
        ids = [row["message_id"] for row in await world.db.fetch(_OPEN, world.group)]
        if ids:
            cure(world.ledger, ids)
            chosen = [part for id_ in ids for part in ("--id", str(id_))]
            await world.attempt(
                "replay", TOWPATH, "dlq", "replay", "-g", world.group, *chosen, "-y", "--reason", "cured"
            )

    async def _settle(self) -> None:
        """Until every message has ended and is out, or patience has; the checker says what has not."""
        world = self._world
        with suppress(AssertionError):
            await world.until_counted(len(MEMBERS), LIVE_WORKERS, seconds=PATIENCE_SECONDS)
        calm(world.ledger)
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            await self._replay()
            if not await self._unended() and not await world.db.fetchval(_UNSENT):
                return
            await asyncio.sleep(0.5)

    @cached_property
    def _intended(self) -> list[Record]:
        """Asked for when the producers have ended."""
        return [record for record in read(self._world.ledger) if isinstance(record, Intended)]

    async def _unended(self) -> set[UUID]:
        world = self._world
        deeds = frozenset(row["transaction"] for row in await world.db.fetch("select transaction from deed"))
        committed = Case(Evidence(records=self._intended, deeds=deeds)).committed
        cured = {row["message_id"] for row in await world.db.fetch(_OPEN, world.group)}
        tasks = await world.db.fetch(_TASKS, world.group, sorted(FINAL))
        ended = {row["id"] for row in tasks if row["is_ended"]}
        return (committed.keys() | {row["id"] for row in tasks}) - (ended - cured)

    async def _left(self, grown: dict[str, int]) -> dict[str, int]:
        """What did not come to rest within a while after the processes ended."""
        world = self._world
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            row = dict(await world.db.fetchrow(_LEFT, world.group) or {})
            if not any(row.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        exits = {f"as the exit code of {name}": code for name, code in self._exits.items()}
        unread = await world.broker.unread(world.group, world.steps)
        return {**row, **exits, **grown, "messages not acknowledged": unread}


def _descriptors(pids: Iterable[int]) -> dict[int, int]:
    """Open file descriptors of those that still run."""
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(FileNotFoundError):
            found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found
