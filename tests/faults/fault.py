"""What every fault is."""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, get_args

from tests.faults.servers import BrokerName, Servers
from tests.faults.world import MEMBERS, PRODUCERS, RELAYS, FaultWorld, Link, Role

BOTH: Final[frozenset[BrokerName]] = frozenset(get_args(BrokerName))
EVERYONE: Final = (*RELAYS, *MEMBERS, *PRODUCERS)
LEASE_SECONDS: Final = 8.0
"""Of relays and workers in these runs."""
LIVE_WORKERS: Final = "select count(*) from towpath.worker where lease_until > clock_timestamp()"
OF_ROLE: Final[Mapping[Role, tuple[str, ...]]] = {"relay": RELAYS, "member": MEMBERS, "producer": PRODUCERS}


class Fault:
    """One strike. Without an `end` of its own it is over when it has begun."""

    brokers: frozenset[BrokerName] = BOTH
    links: frozenset[Link] = frozenset()
    """These go through a proxy in this run."""
    clocks: Mapping[str, str] = {}
    """Processes with a wall clock of their own in this run, and what it is ahead at first, in seconds."""
    touches: tuple[str, ...] = EVERYONE
    """Processes that it may hold up or end."""
    acts_on: frozenset[str] = frozenset()
    """Processes, servers and proxies; two faults of a run share none."""
    needs_cluster: bool = False
    """Kafka of three brokers, instead of one."""
    needs_postgres: bool = False
    """One of its own for the run, which `servers` starts."""
    latest_seconds: float = math.inf
    """It begins no later after the first message was handled: messages have to be left for it."""
    least_seconds: float = 0.0
    is_missed: bool = False
    """It did not come about: the verdict says nothing about it."""

    @asynccontextmanager
    async def servers(self, shared: Servers, template: str) -> AsyncIterator[Servers]:
        """Those of the run: the shared ones, but for a strike that needs a server of its own."""
        yield shared

    async def begin(self, world: FaultWorld) -> None:
        """Strike."""
        raise NotImplementedError

    async def end(self, world: FaultWorld) -> None:
        """Make good again."""
