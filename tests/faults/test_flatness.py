"""A soak's verdict: what grows is caught, what is only restless is not."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.faults import holding
from tests.faults.plan import steady_lane
from tests.faults.servers import BrokerName
from tests.faults.soak.flatness import TOLERANCES, Series, judge
from tests.faults.soak.running import ALLOCATOR
from tests.faults.soak.strikes import WITNESSES, in_random_order, strikes_at

MEGABYTE = 2.0**20
HOLDS = """
import ctypes, time
from tests.faults import holding
buffer, objects = ctypes.create_string_buffer(30 << 20), [object() for _ in range(500_000)]
holding.tell()
time.sleep(120)
"""
SINCE, UNTIL = 360.0, 1800.0


def series(value: Callable[[float], float], *, noise: float = 0.0, since: float = 0.0) -> Series:
    """A sample every ten seconds."""
    rng = random.Random(1)
    times = [float(at) for at in range(int(since), int(UNTIL), 10)]
    return [(at, value(at) + rng.gauss(0, noise)) for at in times]


def stepping(last: float) -> Series:
    return series(lambda at: last if at > 1000 else 1000)


def word(figure: str, sampled: Series) -> str:
    return judge(figure, sampled, SINCE, UNTIL).word


def test_what_grows_with_time_is_caught_also_under_noise() -> None:
    """60 MiB in half an hour, of a process of 100 MiB; 100 bytes or four objects for each of 24 messages a
    second; a descriptor a minute; a table by its rows.
    """
    leak = series(lambda at: (100 + at / 30) * MEGABYTE, noise=3 * MEGABYTE)
    assert word("memory of relay-1", leak) == "GROWS"
    assert word("malloc of relay-1", series(lambda at: 22 * MEGABYTE + 2400 * at)) == "GROWS"
    assert word("Python blocks of relay-1", series(lambda at: 560_000 + 96 * at, noise=20_000)) == "GROWS"
    assert word("descriptors of member-1", series(lambda at: 30 + at / 60, noise=2)) == "GROWS"
    assert word("table task", series(lambda at: at * 4096, noise=50_000)) == "GROWS"


def test_what_is_restless_and_flat_is_not() -> None:
    """Noise, a sawtooth as of a ring, single peaks, and growth that ends while everything warms up."""
    noisy = series(lambda _: 100 * MEGABYTE, noise=10 * MEGABYTE)
    assert word("memory of relay-1", noisy) == "flat"
    assert word("Python blocks of relay-1", series(lambda _: 580_000, noise=30_000)) == "flat"
    assert word("table outbox_N", series(lambda at: at % 240 * 50_000)) == "flat"
    assert word("broker depth", series(lambda at: 20_000 if at % 300 == 0 else 3)) == "flat"
    assert word("table task", series(lambda at: min(at, SINCE) * 40_000, noise=200_000)) == "flat"
    assert word("database connections", series(lambda at: 40 - at / 100)) == "flat"


def test_a_process_that_was_started_again_is_not_judged() -> None:
    """Nor what could never be sampled."""
    assert word("memory of relay-0", series(lambda at: at * MEGABYTE, since=1000)) == "not judged"
    assert word("broker depth", []) == "not judged"


def test_what_grows_by_design_says_why() -> None:
    """With its indexes; it is flat when it does not grow."""
    grown = series(lambda at: at * 4096)
    assert word("table dead_letter", grown) == word("index dead_letter_open", grown) == "by design"
    assert word("table dead_letter", series(lambda _: 8192)) == "flat"
    assert judge("table audit", grown, SINCE, UNTIL).is_kept
    assert not judge("table task", grown, SINCE, UNTIL).is_kept


def test_a_process_tells_what_its_allocators_hold(tmp_path: Path) -> None:
    """Large buffers of C code, and small objects of Python's."""
    path = holding.file_of(tmp_path, "member-1")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], env={**os.environ, holding.ENVIRONMENT_VARIABLE: str(path)}
    )
    try:
        deadline = time.monotonic() + 60
        while (held := holding.read(path)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert held is not None
    assert held[0] > 30 * MEGABYTE
    assert held[1] > 500_000


def test_the_allocator_of_members_is_set_as_in_their_image() -> None:
    """Otherwise glibc keeps what a large buffer needed, and more with each outage; a relay needs it again."""
    consumers, relay = (
        (Path(__file__).parents[2] / image / "Dockerfile").read_text().split()
        for image in ("consumers", "outbox_relay")
    )
    assert {f"{name}={value}" for name, value in ALLOCATOR.items()} <= set(consumers)
    assert not [word for word in relay if word.startswith("MALLOC")]


def test_each_kind_of_figure_has_a_tolerance() -> None:
    """Just within it is flat, beyond is not."""
    for start, tolerance in TOLERANCES.items():
        allowed = 1000 * tolerance.share + tolerance.amount
        for more, expected in ((0.9, "flat"), (1.1, "GROWS")):
            assert word(f"{start} of something", stepping(1000 + more * allowed)) == expected


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq"])
def test_strikes_spare_the_witnesses_and_the_same_seed_gives_the_same(broker: BrokerName) -> None:
    """Each kind before any comes twice."""
    faults = strikes_at(broker)
    assert not any(make().acts_on.intersection(WITNESSES) for make in faults.values())
    assert {"relay_killed", "member_frozen", "postgres_killed", "broker_link_cut"} <= faults.keys()
    chosen = list(islice(in_random_order(3, list(faults)), 2 * len(faults)))
    assert chosen == list(islice(in_random_order(3, list(faults)), 2 * len(faults)))
    assert {strike.fault for strike in chosen[: len(faults)]} == faults.keys()


def test_a_steady_lane_goes_on_where_the_same_seed_left_off() -> None:
    """A producer that is started again finds its place by the names; equal requests come close together."""
    lane = list(islice(steady_lane(5, 2), 3000))
    assert lane == list(islice(steady_lane(5, 2), 3000)) != list(islice(steady_lane(5, 3), 3000))
    assert len({each.name for each in lane}) == len(lane)
    places: dict[str, list[int]] = {}
    for number, transaction in enumerate(lane):
        for message in transaction.messages:
            if message.request:
                places.setdefault(message.request, []).append(number)
    assert any(len(each) > 1 for each in places.values())
    assert all(each[-1] - each[0] < 20 for each in places.values())
