"""From a topic to finished tasks: each cell beside its reference, in alternating rounds.

Topics are preloaded, so that no relay runs. Every subject runs once a round, in a database of its
own, and is void when the ids it finished are not exactly those that were produced. A cell's ratio is
to its reference of the same round. The ideal of `sleeping`, 200 handlers of 10 ms, would be 20,000/s;
where that is beyond the machine the bound is what it does without sleeping, the rate of `noop` in
the same round.
"""

from collections.abc import Sequence

from benchmarks.cells import backlog, duplicates, memory, peers, retries, slow_key, telemetry, transactional
from benchmarks.measure import Target, first_message, more_mb, p50_ratio, p99_ratio
from benchmarks.plans import Plan, run

PLANS = (
    Plan(
        "backlog",
        {"floor": backlog.floor, "towpath": backlog.noop},
        ("floor",),
        (Target("≥ 0.3 of the floor", 0.3),),
    ),
    Plan(
        "batch",
        {"floor": backlog.floor, "towpath": backlog.batch},
        ("floor",),
        (Target("≥ 0.35 of the floor", 0.35),),
    ),
    Plan(
        "transactional",
        {
            "asyncpg": transactional.by_asyncpg,
            "sqlalchemy": transactional.by_sqlalchemy,
            "towpath": transactional.transactional,
        },
        ("sqlalchemy",),
        (Target("≥ 0.8 of the loop over SQLAlchemy", 0.8),),
    ),
    Plan(
        "retries",
        {"towpath no-op": backlog.noop, "towpath": retries.retries},
        ("towpath no-op",),
        (
            Target("≥ 0.7 of the broker's path", 0.7),
            Target("first within 1 s", 1.0, first_message, is_ceiling=True),
        ),
    ),
    Plan(
        "duplicates",
        {"towpath no-op": backlog.noop, "towpath": duplicates.duplicates},
        ("towpath no-op",),
        (Target("≥ 3 × the normal rate", 3.0),),
    ),
    Plan(
        "sleeping",
        {"towpath no-op": backlog.noop, "ideal": backlog.ideal, "towpath": backlog.sleeping},
        ("ideal",),
        (Target("≥ 0.85 of the ideal", 0.85),),
    ),
    Plan(
        "slow-key",
        {"without": slow_key.without, "towpath": slow_key.beside},
        ("without",),
        (
            Target("others' p50 ≤ 1.2 ×", 1.2, p50_ratio, is_ceiling=True),
            Target("others' p99 ≤ 1.5 ×", 1.5, p99_ratio, is_ceiling=True),
        ),
    ),
    Plan(
        "memory",
        {"idle": memory.idle, "towpath": memory.waiting},
        ("idle",),
        (Target("≤ idle + 100 MB", 100.0, more_mb, is_ceiling=True),),
    ),
    Plan(
        "telemetry",
        {"towpath no-op": backlog.noop, "towpath": telemetry.watched_worker},
        ("towpath no-op",),
    ),
    Plan("hot-key", {"towpath": backlog.hot_key}, ()),
    Plan(
        "peers",
        {**peers.TRIALS, "towpath": backlog.noop},
        peers.WITH_A_BROKER,
        (Target("≥ 3 × the best peer with a broker", 3.0),),
    ),
)
CELLS = tuple(plan.name for plan in PLANS)


async def main(*, quick: bool, as_json: bool, rounds: int, cells: Sequence[str] = CELLS) -> bool:
    """Run and print; False when a cell is void."""
    chosen = [plan for plan in PLANS if plan.name in cells]
    return await run(chosen, quick=quick, as_json=as_json, rounds=rounds)
