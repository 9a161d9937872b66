"""Whether a random history kept the promise: the ledger of deeds against the tasks, kind by kind."""

from collections import Counter, defaultdict
from typing import Any

import asyncpg

from tests.property.scripts import Account, Weather

_TASKS = """select t.id, t.state, t.held_by, t.lane, t.waiting_for, t.deliveries, t.attempt, t.effect_state,
       t.reason_code, t.due_at - clock_timestamp() as due_in, clock_timestamp() - t.updated_at as rests_for,
       exists (select 1 from towpath.worker w
                where w.id = t.worker and w.lease_until > clock_timestamp()) as worker_is_alive
  from towpath.task t where t.consumer_group = $1"""


async def verdict(pool: "asyncpg.Pool[Any]", account: Account) -> dict[str, object]:
    """What is wrong, by kind of fault; empty when the promise held."""
    group, scripts = account.group, account.scripts
    deeds = await pool.fetch("select * from public.deed where consumer_group = $1 order by n", group)
    tasks = await pool.fetch(_TASKS, group)
    letters = await pool.fetch(
        "select message_id, death_count from towpath.dead_letter where consumer_group = $1", group
    )
    gates = await pool.fetchval("select count(*) from towpath.key_gate where consumer_group = $1", group)
    states = {row["id"]: row["state"] for row in tasks}
    rows = {row["id"]: row for row in tasks}
    counts = Counter(row["id"] for row in deeds)
    dead = {id_ for id_, state in states.items() if state == "DEAD"}
    doomed = {id_ for id_, script in scripts.items() if script.end != "succeeds"} | account.condemned
    exhausted = {row["id"] for row in tasks if row["reason_code"] == "deliveries_exhausted"}
    first: dict[str, list[int]] = defaultdict(list)
    names: dict[object, set[str | None]] = defaultdict(set)
    seen = set[object]()
    for row in deeds:
        names[row["id"]].add(row["idempotency_key"])
        if row["id"] not in seen:
            seen.add(row["id"])
            first[row["key"]].append(row["sequence"])
    # With both killers and storms about, a storm may spend an innocent's last delivery.
    spared = doomed if account.weather is not Weather.BOTH else doomed | (exhausted & dead)
    wrong: dict[str, object] = {
        "not ended": [
            (script, dict(rows[id_]) if id_ in rows else None)
            for id_, script in scripts.items()
            if states.get(id_) not in ("SUCCEEDED", "DEAD")
        ],
        "doubled": [
            scripts[id_] for id_, count in counts.items() if count > 1 and scripts[id_].kind != "call"
        ],
        "dead and done": [scripts[id_] for id_ in dead & counts.keys() if scripts[id_].kind != "call"],
        "lost": [scripts[id_] for id_ in scripts.keys() - dead - counts.keys()],
        "invented": states.keys() - scripts.keys(),
        "several keys": {id_: found for id_, found in names.items() if len(found) > 1},
        "inverted": {key: order for key, order in first.items() if order != sorted(order)},
        "died wrongly": [
            (scripts[row["id"]], row["reason_code"]) for row in tasks if row["id"] in dead - spared
        ],
        "survived": [scripts[id_] for id_ in doomed - dead if states.get(id_) == "SUCCEEDED"],
        "acknowledged early": [scripts[id_] for id_ in account.early],
        "gates left": gates,
        "catalog differs": dead ^ {row["message_id"] for row in letters},
        "died twice": [row["message_id"] for row in letters if row["death_count"] != 1],
    }
    return {kind: found for kind, found in wrong.items() if found}
