"""The relay in every situation that costs something, each beside its reference, in alternating rounds.

Every cell compares the ids that came out with the ids committed and is void if they differ. Rates of a
backlog are taken between the first and the last record's timestamps, CPU between the moments in which the
first and the last record were seen.
"""

from collections.abc import Callable, Sequence

from benchmarks.cells import capture, draining, latency, producers, publishing, telemetry, wakeup
from benchmarks.measure import Sample, Target, cpu_ratio, first_message, p50_ratio, p99_ratio
from benchmarks.plans import Plan, run


def _per_second(mine: Sample, _: Sample) -> float:
    return mine.messages_per_s or 0.0


def _own_cpu(mine: Sample, _: Sample) -> float:
    return mine.cpu_s_per_million.get("relay", float("inf"))


def _cpu_of_moving(mine: Sample, other: Sample) -> float:
    """How many times what the other's program and Postgres use."""
    own, others = (
        sum(sample.cpu_s_per_million.get(role, 0.0) for role in ("relay", "postgres"))
        for sample in (mine, other)
    )
    return own / (others or float("inf"))


def _above_idle(mine: Sample, _: Sample) -> float:
    return (mine.rss_mb or float("inf")) - (mine.idle_rss_mb or 0.0)


def _p50(mine: Sample, _: Sample) -> float:
    return float("inf") if mine.p50_ms is None else mine.p50_ms


def _idle(name: str) -> Callable[[Sample, Sample], float]:
    return lambda mine, _: float("inf") if mine.idle is None else mine.idle[name]


_LATENCY = (
    Target("p50 ≤ 1.5 × the floor's", 1.5, p50_ratio, is_ceiling=True),
    Target("p99 ≤ 1.5 × the floor's", 1.5, p99_ratio, is_ceiling=True),
)
_NO_SLOWER = (Target("≥ 0.9 of the rate without", 0.9),)
_FLOORS = {"floor 2000": draining.floor_2000, "floor 500": draining.floor_500}
_BACKLOG = {"towpath": draining.relayed}

TABLE = (
    Plan(
        "backlog",
        {**_FLOORS, **_BACKLOG},
        tuple(_FLOORS),
        (
            Target("≥ 0.6 of the floor", 0.6),
            Target("relay ≤ 20 CPU-s per million", 20.0, _own_cpu, is_ceiling=True),
            Target("RSS ≤ idle + 50 MB", 50.0, _above_idle, is_ceiling=True),
        ),
        only_full=("floor 2000",),
    ),
    Plan(
        "peers",
        {**draining.PEERS, **_BACKLOG},
        tuple(draining.PEERS),
        (Target("≥ 6 × the best peer", 6.0),),
        only_full=("txoutbox", "faststream-outbox"),
    ),
    Plan(
        "rabbitmq",
        {"aio-pika": publishing.gathered, "towpath": publishing.relayed},
        ("aio-pika",),
        (Target("≥ 2.4 × aio-pika's gathered publish", 2.4),),
    ),
    Plan("rabbitmq-one-key", {"towpath": publishing.relayed_one_key}, (), is_variant=True),
    *(
        Plan(
            f"latency-{rate}",
            {"floor": latency.FLOOR_AT[rate], "towpath": latency.RELAY_AT[rate]},
            ("floor",),
            _LATENCY,
            is_variant=rate != 1000,
        )
        for rate in latency.RELAY_AT
    ),
    Plan(
        "held-horizon",
        {"free": draining.churned, "rows deleted": draining.held_and_deleted, "towpath": draining.held},
        ("free",),
        _NO_SLOWER,
        judged=("towpath",),
        only_full=("rows deleted",),
    ),
    Plan("retained", {"none": draining.relayed, "towpath": draining.retained}, ("none",), _NO_SLOWER),
    Plan(
        "uncommitted",
        {
            "without": latency.RELAY_AT[1000],
            "without again": latency.AGAIN,
            "towpath": latency.beside_uncommitted,
        },
        ("without",),
        (
            Target("p50 ≤ 1.2 × of without", 1.2, p50_ratio, is_ceiling=True),
            Target("p99 ≤ 1.5 × of without", 1.5, p99_ratio, is_ceiling=True),
        ),
        judged=("without again", "towpath"),
        only_full=("without again",),
    ),
    *(
        Plan(
            f"producers-{connections}",
            trials,
            ("bare",),
            (Target("≥ 0.85 of the bare INSERT", 0.85),),
            judged=("relay asleep", "towpath"),
            only_full=("no relay", "always notifying", "relay asleep"),
            is_variant=connections != 16,
        )
        for connections, trials in producers.TRIALS.items()
    ),
    Plan(
        "large-backlog",
        {"steady": draining.relayed, "towpath": draining.large},
        ("steady",),
        (
            Target("first message < 2 s", 2.0, first_message, is_ceiling=True),
            Target("≥ 0.8 of the steady rate", 0.8),
            Target("RSS ≤ idle + 100 MB", 100.0, _above_idle, is_ceiling=True),
        ),
        is_variant=True,
    ),
    *(
        Plan(
            f"relays-{count}",
            {"one relay": draining.RELAYS[1], "towpath": draining.RELAYS[count]},
            ("one relay",),
            (Target("no loss against one", 1.0),),
            is_variant=count != 2,
        )
        for count in (2, 4)
    ),
)
OTHERS = (
    Plan(
        "one-transaction",
        {"steady": draining.relayed, "towpath": draining.one_transaction},
        ("steady",),
        (Target("RSS ≤ idle + 100 MB", 100.0, _above_idle, is_ceiling=True),),
    ),
    Plan(
        "telemetry",
        {"off": draining.relayed, "towpath": telemetry.watched_relay},
        ("off",),
        _NO_SLOWER,
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
    Plan(
        "wakeup",
        {"polling": wakeup.first_after_idle("poll"), "towpath": wakeup.first_after_idle("auto")},
        ("polling",),
        (Target("p50 ≤ 5 ms", 5.0, _p50, is_ceiling=True),),
    ),
    Plan(
        "idle",
        {"polling": wakeup.idle("poll"), "towpath": wakeup.idle("auto")},
        ("polling",),
        (
            Target("relay ≤ 0.5 % of a core", 0.5, _idle("relay"), is_ceiling=True),
            Target("Postgres ≤ 1 % of a core", 1.0, _idle("postgres"), is_ceiling=True),
            Target("≤ 5 statements/s", 5.0, _idle("statements"), is_ceiling=True),
        ),
        judged=("polling", "towpath"),
    ),
)
"""Run when they are named."""
CAPTURE = (
    Plan(
        "debezium-backlog",
        {**capture.BACKLOGS, **_BACKLOG},
        ("debezium tuned, warm",),
        (
            Target("≥ 1.4 × Debezium tuned and warm", 1.4),
            Target("total CPU ≤ half: ≥ 2 × by CPU", 2.0, cpu_ratio),
        ),
    ),
    *(
        Plan(
            f"debezium-latency-{rate}",
            {"debezium low latency": capture.LOW_LATENCY_AT[rate], "towpath": latency.RELAY_AT[rate]},
            ("debezium low latency",),
            (
                Target("p50 below Debezium's", 1.0, p50_ratio, is_ceiling=True),
                Target("p99 below Debezium's", 1.0, p99_ratio, is_ceiling=True),
                *(
                    [Target("CPU of relay and Postgres below its", 1.0, _cpu_of_moving, is_ceiling=True)]
                    if rate == 1000
                    else []
                ),
            ),
        )
        for rate in latency.RATES
    ),
)
"""Run with --debezium."""
_AT_ONCE = 4
"""In a sanity pass."""
DEFAULT_CELLS = tuple(plan.name for plan in TABLE)
QUICK_CELLS = tuple(plan.name for plan in TABLE if not plan.is_variant)
CELLS = tuple(plan.name for plan in (*TABLE, *OTHERS))
DEBEZIUM_CELLS = tuple(plan.name for plan in CAPTURE)


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str]) -> bool:
    """Run and print; False when a cell is void."""
    chosen = [plan for plan in (*TABLE, *OTHERS, *CAPTURE) if plan.name in cells]
    warm_up = None if quick else draining.floor_500
    return await run(
        chosen,
        quick=quick,
        as_json=as_json,
        rounds=rounds,
        warm_up=warm_up,
        at_once=_AT_ONCE if quick else 1,
        has_capture=any(plan in CAPTURE for plan in chosen),
    )
