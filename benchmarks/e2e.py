"""From a backlog of the outbox to finished tasks, through relay, Kafka and one worker, beside the floor.

Every cell compares the ids that are finished with the ids committed, and is void if they differ. Rates
are taken between the first and the last finished row, by the database's clock, CPU over the same time.
"""

from collections.abc import Mapping

import asyncpg

from benchmarks.drain import FLOOR_DONE, TASKS, Program, drain, worker
from benchmarks.filling import FLOOR, OUTBOX, fill
from benchmarks.measure import Cell, Sample
from benchmarks.report import show
from benchmarks.stage import Stage, open_stage

SUBJECTS = ("floor", "noop", "batch")


def programs_of(subject: str, url: str, stage: Stage, topic: str) -> Mapping[str, Program]:
    """One program moves rows to Kafka, one finishes what arrives."""
    kafka = stage.kafka.bootstrap
    if subject == "floor":
        return {
            "relay": Program(["-m", "benchmarks.floor", url, kafka, topic, "500"]),
            "worker": Program(["-m", "benchmarks.floor_consumer", url, kafka, topic]),
        }
    group = worker(subject, topic, url, stage)
    relay_environment = {name: value for name, value in group.environment.items() if "WORKER" not in name}
    return {"relay": Program(["-m", "outbox_relay"], relay_environment), "worker": group}


async def finish(subject: str, count: int, stage: Stage) -> Sample:
    """Fill, start the subject, wait until everything is finished, verify."""
    topic = stage.fresh_name(subject)
    await stage.topic(topic, topic)
    is_floor = subject == "floor"
    async with stage.database() as url:
        connection = await asyncpg.connect(url, command_timeout=600)
        committed = await fill(connection, FLOOR if is_floor else OUTBOX, topic, count)
        await connection.close()
        programs = programs_of(subject, url, stage, topic)
        return await drain(stage, url, programs, FLOOR_DONE if is_floor else TASKS, committed)


async def main(*, quick: bool, as_json: bool, rounds: int) -> bool:
    """Run and print; False when a cell is void."""
    count = 20_000 if quick else 100_000
    cells = {name: Cell("outbox-to-done", name) for name in SUBJECTS}
    async with open_stage(quick=quick) as stage:
        for _ in range(rounds):
            for name in SUBJECTS:
                cells[name].samples.append(await finish(name, count, stage))
    show(cells.values(), cells["floor"], as_json=as_json)
    return not any(cell.is_void for cell in cells.values())
