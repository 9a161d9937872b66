"""Draining a backlog of the outbox, and publishing, each beside its reference, in alternating rounds.

Every cell compares the ids at the broker with the ids committed, as sets, and is void if they
differ. Rates are taken between the first and the last record's timestamps, CPU between the moments
in which the first and the last record were seen.
"""

import asyncio
from collections.abc import Sequence

import asyncpg

from benchmarks.cells import publishing, telemetry
from benchmarks.floor import TABLE
from benchmarks.measure import Cell, Sample, Target
from benchmarks.plans import Plan, run
from benchmarks.relaying import drain, subjects
from benchmarks.report import show
from benchmarks.sleeping import taxes, wakeups
from towpath.store import migrate
from towpath.testing.services import KafkaServer, PostgresServer


async def backlog_to_kafka(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """Run and print; False when a cell is void."""
    count = 60_000 if quick else 300_000
    name = f"backlog {count // 1000}k to kafka"
    settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    cells: dict[str, Cell] = {}
    with (
        PostgresServer(fsync=True, settings=settings) as server,
        KafkaServer(is_for_benchmark=True, heap_megabytes=1024) as kafka,
    ):
        for round_ in range(rounds + 1):
            is_warm_up = round_ == 0
            for number in range(len(subjects("", "", "", quick=quick))):
                database = f"bench_{round_}_{number}"
                url = server.create_database(database)
                await asyncio.to_thread(migrate.upgrade, url)
                connection = await asyncpg.connect(url)
                await connection.execute(TABLE)
                await connection.close()
                topic = f"orders-{round_}-{number}"
                subject = subjects(url, kafka.bootstrap, topic, quick=quick)[number]
                amount = 20_000 if is_warm_up else count
                sample = await drain(subject, amount, server, kafka, topic, url)
                server.drop_database(database)
                if not is_warm_up:
                    cells.setdefault(subject.name, Cell(name, subject.name)).samples.append(sample)
    floor = max((cell for key, cell in cells.items() if key.startswith("floor")), key=lambda cell: cell.rate)
    show(cells.values(), floor, as_json=as_json)
    return not any(cell.is_void for cell in cells.values())


def _per_second(mine: Sample, _: Sample) -> float:
    return mine.messages_per_s or 0.0


PLANS = (
    Plan(
        "rabbitmq",
        {"aio-pika": publishing.gathered, "towpath": publishing.relayed},
        ("aio-pika",),
        (Target("≥ 2.4 × aio-pika's gathered publish", 2.4),),
    ),
    Plan(
        "rabbitmq-one-key",
        {"towpath": publishing.relayed_one_key},
        (),
    ),
    Plan(
        "telemetry",
        {"off": telemetry.unwatched_relay, "towpath": telemetry.watched_relay},
        ("off",),
        (Target("≥ 0.9 of the rate without", 0.9),),
    ),
    Plan(
        "ack-latency-kafka",
        {"no delay": publishing.quick_kafka, "towpath": publishing.slow_kafka},
        ("no delay",),
        (Target("≥ 10,000/s at 2 ms", 10_000, _per_second),),
    ),
    Plan(
        "ack-latency-rabbitmq",
        {"no delay": publishing.quick_rabbitmq, "towpath": publishing.slow_rabbitmq},
        ("no delay",),
        (Target("≥ 10,000/s at 2 ms", 10_000, _per_second),),
    ),
)
SLEEPING = {"wakeup": wakeups, "producers": taxes}
CELLS = ("backlog", *(plan.name for plan in PLANS), *SLEEPING)


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str] = CELLS) -> bool:
    """Run and print; False when a cell is void."""
    is_valid = True
    if "backlog" in cells:
        is_valid = await backlog_to_kafka(quick=quick, as_json=as_json, rounds=rounds)
    for name in SLEEPING.keys() & set(cells):
        is_valid &= await SLEEPING[name](quick=quick, as_json=as_json, rounds=rounds)
    if chosen := [plan for plan in PLANS if plan.name in cells]:
        is_valid &= await run(chosen, quick=quick, as_json=as_json, rounds=rounds)
    return is_valid
