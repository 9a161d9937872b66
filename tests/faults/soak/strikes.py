"""The faults of a soak: they heal by themselves, or by a supervisor, and spare one relay and one member.

What leaks shows in a process that lives long: `relay-1` and `member-1` see every fault, and none ends them.
All processes go through one proxy to each server, so a broken link is broken for all of them.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, Literal, get_args

from tests.faults.fault import EVERYONE, OF_ROLE, Fault
from tests.faults.faults import FAULTS
from tests.faults.plan import Strike
from tests.faults.server_faults import Broken, How
from tests.faults.servers import BrokerName

WITNESSES: Final = ("relay-1", "member-1")
_ONCE: Final = frozenset({"queue_deleted", "topic_deleted", "partitions_added"})
"""A person heals the first two, and the last cannot be done twice."""


class AllBroken(Broken):
    """The links of all processes to a server."""

    def __init__(self, server: Literal["postgres", "broker"], how: How) -> None:
        super().__init__("member", server, how)
        roles = OF_ROLE if server == "postgres" else {"relay", "member"}
        self.links = frozenset((role, server) for role in roles)
        self.touches = EVERYONE


def strikes_at(broker: BrokerName) -> Mapping[str, Callable[[], Fault]]:
    """By name."""
    chosen: dict[str, Callable[[], Fault]] = {
        name: make
        for name, make in FAULTS.items()
        if name not in _ONCE
        and not make().links
        and not make().clocks
        and not make().needs_cluster
        and not make().needs_postgres
        and broker in make().brokers
        and not make().acts_on.intersection(WITNESSES)
    }
    for how in get_args(How):
        chosen[f"postgres_link_{how}"] = partial(AllBroken, "postgres", how)
        chosen[f"broker_link_{how}"] = partial(AllBroken, "broker", how)
    return chosen


def in_random_order(seed: int, names: list[str]) -> Iterator[Strike]:
    """Each once, and then again in another order, for ever."""
    rng = random.Random(f"{seed}/soak")
    while True:
        for name in rng.sample(sorted(names), len(names)):
            yield Strike(name, 0.0, round(2.0 + rng.random() * 4.0, 2))
