"""The table of everything that a run may be struck by."""

import resource
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, get_args

from tests.faults import freezing, kafka_faults
from tests.faults.disk_faults import CommitsSlow, DiskFull, WalDiskFull
from tests.faults.failover import Failover
from tests.faults.fault import OF_ROLE, Fault
from tests.faults.process_faults import (
    ClockJumps,
    ClockWrong,
    Crashed,
    Frozen,
    FrozenAt,
    Killed,
    Limited,
    Terminated,
    size_of,
)
from tests.faults.server_faults import (
    BackendsTerminated,
    Broken,
    BrokerKilled,
    BrokerRestarted,
    ConnectionsExhausted,
    Controlled,
    HorizonHeld,
    How,
    PostgresKilled,
    PostgresRestarted,
    QueueDeleted,
    ServerFrozen,
)
from tests.faults.world import Role
from towpath.crashpoints import CrashPoint


def _table() -> dict[str, Callable[[], Fault]]:
    table: dict[str, Callable[[], Fault]] = {}
    for role in ("relay", "member", "producer"):
        table[f"{role}_killed"] = partial(Killed, f"{role}-0")
        table[f"{role}_frozen"] = partial(Frozen, f"{role}-0")
        table[f"{role}_terminated"] = partial(Terminated, f"{role}-0")
        table[f"{role}_clock_jumps"] = partial(ClockJumps, *OF_ROLE[role])
        table[f"{role}_clock_wrong"] = partial(ClockWrong, f"{role}-0", offset="+3600")
    for role in ("relay", "member"):
        table[f"{role}s_killed"] = partial(Killed, *OF_ROLE[role])
        table[f"{role}_without_descriptors"] = partial(Limited, role, resource.RLIMIT_NOFILE, lambda _: 8)
        table[f"{role}_without_memory"] = partial(Limited, role, resource.RLIMIT_AS, size_of)
    for role, point in _CRASH_POINTS:
        table[f"{role}_dies_{point}"] = partial(Crashed, role, point)
    for point in (
        CrashPoint.RECEIVED_BEFORE_CLAIM,
        CrashPoint.CLAIMED_BEFORE_HANDLE,
        CrashPoint.MARKED_BEFORE_EFFECT,
        CrashPoint.HANDLED_BEFORE_SETTLE,
    ):
        table[f"member_freezes_{point}"] = partial(FrozenAt, point)
    table["member_freezes_failed_before_settle"] = partial(
        FrozenAt, CrashPoint.HANDLED_BEFORE_SETTLE, freezing.FAILURE
    )
    table |= {
        "postgres_restarted": PostgresRestarted,
        "postgres_killed": PostgresKilled,
        "postgres_frozen": partial(ServerFrozen, "postgres"),
        "backends_terminated": BackendsTerminated,
        "connections_exhausted": ConnectionsExhausted,
        "horizon_held": HorizonHeld,
        "disk_full": DiskFull,
        "wal_disk_full": WalDiskFull,
        "commits_slow": CommitsSlow,
        "failover": Failover,
        "broker_restarted": BrokerRestarted,
        "broker_killed": BrokerKilled,
        "broker_frozen": partial(ServerFrozen, "broker"),
        "connections_closed": partial(Controlled, ("close_all_connections", "fault")),
        "memory_alarm": partial(
            Controlled,
            ("set_vm_memory_high_watermark", "absolute", "1MB"),
            ("set_vm_memory_high_watermark", "0.4"),
        ),
        "disk_alarm": partial(
            Controlled, ("set_disk_free_limit", "900000GB"), ("set_disk_free_limit", "50MB")
        ),
        "queue_deleted": QueueDeleted,
        "partitions_added": kafka_faults.PartitionsAdded,
        "topic_deleted": kafka_faults.TopicDeleted,
        "one_of_three_lost": partial(kafka_faults.OneLost, kafka_faults.leader),
        "coordinator_lost": partial(kafka_faults.OneLost, kafka_faults.coordinator),
        "leader_moved": partial(kafka_faults.LeadersMoved, lambda world: world.steps),
        "coordinator_moved": partial(kafka_faults.LeadersMoved, lambda _: kafka_faults.OFFSETS),
    }
    for how in get_args(How):
        for role in ("relay", "member", "producer"):
            table[f"{role}_postgres_{how}"] = partial(Broken, role, "postgres", how)
        for role in ("relay", "member"):
            table[f"{role}_broker_{how}"] = partial(Broken, role, "broker", how)
    return table


_CRASH_POINTS: Final[tuple[tuple[Role, CrashPoint], ...]] = (
    ("relay", CrashPoint.READ_BEFORE_PUBLISH),
    ("relay", CrashPoint.PUBLISHED_BEFORE_JOURNAL),
    ("relay", CrashPoint.JOURNALED),
    ("relay", CrashPoint.MOVED_DUE),
    ("member", CrashPoint.RECEIVED_BEFORE_CLAIM),
    ("member", CrashPoint.CLAIMED_BEFORE_HANDLE),
    ("member", CrashPoint.MARKED_BEFORE_EFFECT),
    ("member", CrashPoint.HANDLED_BEFORE_SETTLE),
    ("member", CrashPoint.SETTLED_BEFORE_COMMIT),
    ("member", CrashPoint.COMMITTED_BEFORE_ACK),
    ("member", CrashPoint.WAITING_BEFORE_ACK),
    ("member", CrashPoint.BURIED_BEFORE_ACK),
    ("member", CrashPoint.KEPT_BEFORE_ACK),
    ("member", CrashPoint.DUE_STARTED),
)
FAULTS: Final[Mapping[str, Callable[[], Fault]]] = _table()
