"""What could grow, looked at every few seconds."""

import asyncio
import resource
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import asyncpg

from tests.faults import holding
from tests.faults.world import MEMBERS, PRODUCERS, RELAYS, UNREACHABLE, FaultWorld

_PATIENCE_SECONDS: Final = 20.0
_SIZES: Final = """
select case c.relkind when 'i' then 'index ' else 'table ' end
       || regexp_replace(c.relname, '^outbox_[0-9]+', 'outbox_N') as name,
       sum(case c.relkind when 'i' then pg_relation_size(c.oid) else pg_table_size(c.oid) end)::bigint
       as bytes
  from pg_class c where c.relnamespace = 'towpath'::regnamespace and c.relkind in ('r', 'i')
 group by 1
"""
_COUNTS: Final = """
select (select count(*) from pg_stat_activity
         where datname = current_database() and backend_type = 'client backend') as "database connections",
       (select count(*) from towpath.journal) as "journal rows",
       (select count(*) from generate_series(0, towpath.ring_slots() - 1) n
         where pg_relation_size(('towpath.outbox_' || n)::regclass) > 0) as "ring slots in use",
       (select sum(pg_total_relation_size(c.oid))::bigint from pg_class c
         where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind = 'r') as "catalogs"
"""


class Sampler:
    """Series by the name of the figure; of a process that was started again, what the last one took."""

    def __init__(self, world: FaultWorld, every_seconds: float) -> None:
        self.series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.began = time.monotonic()
        self._world = world
        self._every_seconds = every_seconds
        self._pids: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled. What does not answer is left out."""
        while True:
            at = time.monotonic() - self.began
            self._processes(at)
            with suppress(*UNREACHABLE):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._database(at)
            with suppress(Exception):  # of whatever client the broker has
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    depth = await self._world.broker.unread(self._world.group, self._world.steps)
                    self.series["broker depth"].append((at, depth))
            await asyncio.sleep(max(0.0, self.began + at + self._every_seconds - time.monotonic()))

    def _processes(self, at: float) -> None:
        for name in (*RELAYS, *MEMBERS, *PRODUCERS):
            pid = self._world.pids[name]
            figures = [f"{what} of {name}" for what in ("memory", "descriptors", "malloc", "Python blocks")]
            if self._pids.setdefault(name, pid) != pid:
                self._pids[name] = pid
                for figure in figures:
                    self.series.pop(figure, None)
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                resident = pages * resource.getpagesize()
                count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                held = holding.read(holding.file_of(self._world.directory, name)) or ()
                for figure, value in zip(figures, (resident, count, *held), strict=False):
                    self.series[figure].append((at, value))

    async def _database(self, at: float) -> None:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(
            self._world.database_url, timeout=10, command_timeout=_PATIENCE_SECONDS
        )
        try:
            for name, value in dict(await connection.fetchrow(_COUNTS) or {}).items():
                self.series[name].append((at, value))
            for row in await connection.fetch(_SIZES):
                self.series[row["name"]].append((at, row["bytes"]))
        finally:
            connection.terminate()
