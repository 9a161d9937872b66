"""The cells of the relay's benchmark in their smallest form: that they run, and verify what they counted."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.cells import draining, latency, producers, publishing, telemetry
from benchmarks.cells.round import Round, Trial
from benchmarks.stage import Stage, prepare
from towpath.testing.services import KafkaServer, PostgresServer, RabbitServer

TRIALS: dict[str, tuple[Trial, ...]] = {
    "backlogs": (draining.floor_500, draining.idle, draining.held, telemetry.watched_relay),
    "relays": (draining.retained, draining.several(2)),
    "steady": (latency.FLOOR_AT[200], latency.beside_uncommitted),
    "others": (publishing.gathered, publishing.relayed, producers.TRIALS[1]["towpath"]),
}


@pytest.fixture(scope="module")
def stage(
    postgres_server: PostgresServer, kafka_server: KafkaServer, rabbit_server: RabbitServer
) -> Iterator[Stage]:
    with ExitStack() as stack:
        prepare(postgres_server)
        yield Stage(postgres_server, kafka_server, stack, is_quick=True, rabbit=rabbit_server)


@pytest.mark.parametrize("name", TRIALS)
def test_a_cell_runs_and_finds_every_id_that_was_committed(stage: Stage, name: str) -> None:
    async def run() -> list[str]:
        round_ = Round(stage)
        samples = await asyncio.gather(*(round_.sample(trial) for trial in TRIALS[name]))
        return [sample.note for sample in samples if sample.is_void]

    assert asyncio.run(run()) == []
