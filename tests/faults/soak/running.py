"""The run: measure what goes through, halve it, strike and sample, settle, judge."""

import asyncio
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.acceptance.world import world_of
from tests.faults import holding
from tests.faults.case import Case
from tests.faults.checker import check
from tests.faults.evidence import gather
from tests.faults.fault import EVERYONE
from tests.faults.messages import RETENTION_VARIABLE
from tests.faults.plan import Plan, steady_lane
from tests.faults.report import Outcome
from tests.faults.run import PATIENCE_SECONDS, Run
from tests.faults.servers import Servers
from tests.faults.soak.flatness import Flatness, judge
from tests.faults.soak.producer import LANES, Load
from tests.faults.soak.sampling import Sampler
from tests.faults.soak.strikes import in_random_order, strikes_at
from tests.faults.world import MEMBERS, PRODUCERS, RELAYS, SCHEMA, FaultWorld
from towpath.testing.services import create_database, drop_database

SOAK_SCHEMA: Final = Path(__file__).parent / "soak.sql"
_BURST_RATE: Final = 1000.0
_BURST_SECONDS: Final = 30.0
_SETTLED_SECONDS: Final = 20.0
"""Without strikes before the end."""
_REST_SECONDS: Final = (35.0, 55.0)
_ENDED: Final = """
select (select count(*) from kept_task)
     + (select count(*) from towpath.task where finished_at is not null and consumer_group = $1)
"""
_WAITING: Final = """
select -((select count(*) from towpath.outbox_message where status = 'PENDING')
       + (select count(*) from towpath.task where finished_at is null and consumer_group = $1))
"""


ALLOCATOR: Final = {"MALLOC_TRIM_THRESHOLD_": "131072"}
"""Of members, as in their image."""


class SoakWorld(FaultWorld):
    """Retentions that are over within minutes, and producers without an end."""

    def __init__(self, *arguments: Any, retention_seconds: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._retentions = {
            "TOWPATH_RELAY__RETENTION": "60s",
            RETENTION_VARIABLE: f"{retention_seconds}s",
            "TOWPATH_WORKER__LOST_AFTER": "5m",  # what a fault held up is late, and not lost
        }

    def spawn(self, name: str, *argv: str, **environment: str) -> None:
        """With short retentions."""
        telling = {holding.ENVIRONMENT_VARIABLE: str(holding.file_of(self.directory, name))}
        allocator = ALLOCATOR if name in MEMBERS else {}
        super().spawn(name, *argv, **{**allocator, **self._retentions, **telling, **environment})

    def start(self, name: str, **environment: str) -> None:
        """By the role in its name."""
        if name not in PRODUCERS:
            super().start(name, **environment)
            return
        each = LANES // len(PRODUCERS)
        arguments = (str(self.seed), str(PRODUCERS.index(name) * each), str(each))
        self.begin(name, sys.executable, "-m", "tests.faults.soak.producer", *arguments, **environment)


class Soak(Run):
    """The steps of a soak."""

    replay_seconds = 20.0

    def __init__(self, world: SoakWorld, outcome: Outcome, minutes: float, every_seconds: float) -> None:
        super().__init__(world, outcome.plan, (), outcome, PATIENCE_SECONDS)
        self._seconds = minutes * 60
        self._load = Load(world.ledger)
        self._random = random.Random(f"{outcome.plan.seed}/rests")
        self.sampler = Sampler(world, every_seconds)
        self.capacity = 0.0
        self.rate = 0.0
        """Messages in a second."""
        self.struck: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.judged_from = 0.0

    async def to_its_end(self) -> None:
        """The verdict on the promise goes into the outcome."""
        world = self._world
        await world.db.execute(SCHEMA.read_text())
        await world.db.execute(SOAK_SCHEMA.read_text())
        await world.broker.listen(world.steps)
        self._load.set(_BURST_RATE)
        for name in EVERYONE:
            world.start(name)
        await self._find_the_rate()
        self.sampler.began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(each) for each in (self.sampler.run(), self._replay_for_ever())]
            await self._strike_until(self.sampler.began + self._seconds - _SETTLED_SECONDS)
            await self._watch(_SETTLED_SECONDS)
            for task in background:
                task.cancel()
        self._load.set(None)
        await world.reopen()
        for name in PRODUCERS:
            await world.finished(name, seconds=PATIENCE_SECONDS)
        await self._settle()
        for name in (*MEMBERS, *RELAYS):
            self._exits[name] = await world.patiently(name)
        evidence = await gather(world, await self._left({}))
        evidence.save(world.directory / "evidence.json")
        self._outcome.message_count = len(Case(evidence).committed)
        self._outcome.breaches = check(evidence)

    async def _find_the_rate(self) -> None:
        """What ends in a second while producers do not wait; half of it from then on, when all is done."""
        world = self._world
        await world.until_counted(LANES * 10, _ENDED, world.group, seconds=120)
        before, began = await world.db.fetchval(_ENDED, world.group), time.monotonic()
        await asyncio.sleep(_BURST_SECONDS)
        ended = await world.db.fetchval(_ENDED, world.group) - before
        self.capacity = ended / (time.monotonic() - began)
        self.rate = self.capacity / 2
        self._load.set(0)
        await world.until_counted(0, _WAITING, world.group, seconds=300, every=1)
        self._load.set(self.rate / LANES / _messages_of_a_transaction(world.seed))
        print(f"capacity {self.capacity:.0f} messages/s, load {self.rate:.0f} messages/s", flush=True)

    async def _strike_until(self, deadline: float) -> None:
        faults = strikes_at(self._world.servers.broker_name)
        for strike in in_random_order(self._world.seed, list(faults)):
            await self._watch(self._random.uniform(*_REST_SECONDS))
            if time.monotonic() > deadline - _REST_SECONDS[0]:
                break
            at, fault = time.monotonic() - self.sampler.began, faults[strike.fault]()
            try:
                await self._strike(strike, fault)
            except Exception:  # noqa: BLE001 - the rest of the hours is worth looking at, too
                self._outcome.trouble += f"{strike}\n{traceback.format_exc()}"
                with suppress(Exception):
                    await fault.end(self._world)
            self.struck[strike.fault] += 1
            print(f"{at:6.0f} s  {strike.fault}", flush=True)
        await self._watch(max(0.0, deadline - time.monotonic()))

    async def _watch(self, seconds: float) -> None:
        """Start again what has ended, as a supervisor does."""
        deadline = time.monotonic() + seconds
        while True:
            for name in EVERYONE:
                if self._world.has_ended(name):
                    self.restarts[name] += 1
                    self._world.start(name)
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(1)

    def flatness(self) -> list[Flatness]:
        """Of every figure, from when retention had its effect twice."""
        until = self._seconds
        return [
            judge(figure, series, self.judged_from, until)
            for figure, series in sorted(self.sampler.series.items())
        ]


def _messages_of_a_transaction(seed: int) -> float:
    """On average, of those that are committed."""
    some = list(islice(steady_lane(seed, LANES), 5000))
    sizes = [
        sum(not message.is_abandoned for message in each.messages) for each in some if not each.is_rolled_back
    ]
    return sum(sizes) / len(some)


def retention_of(minutes: float) -> int:
    """Seconds that finished rows stay: a tenth of the time, and longer than anything is delivered again."""
    return round(min(3600.0, max(60.0, minutes * 6)))


async def perform(
    seed: int, minutes: float, every_seconds: float, servers: Servers, template: str, directory: Path
) -> tuple[Outcome, Soak, list[Flatness]]:
    """One soak on a fresh database; what it left behind is in `directory`."""
    outcome = Outcome(Plan(seed, (), ()), servers.broker_name)
    name, admin_url = f"soak_{time.time_ns()}", servers.postgres.url()
    await asyncio.to_thread(create_database, admin_url, name, template=template)
    retention = retention_of(minutes)
    make = partial(
        SoakWorld,
        servers=servers,
        seed=seed,
        faults=[make_fault() for make_fault in strikes_at(servers.broker_name).values()],
        retention_seconds=retention,
    )
    directory.mkdir(parents=True)
    try:
        async with world_of(servers.postgres.url(name), servers.wire, directory, make=make) as world:
            soak = Soak(world, outcome, minutes, every_seconds)
            soak.judged_from = 2.0 * retention
            try:
                await soak.to_its_end()
            except Exception:  # noqa: BLE001 - with what was sampled so far
                outcome.trouble += traceback.format_exc()
            finally:
                world.close(directory)
                (directory / "samples.json").write_bytes(msgspec.json.encode(soak.sampler.series))
    finally:
        await asyncio.to_thread(drop_database, admin_url, name)
    return outcome, soak, soak.flatness()
