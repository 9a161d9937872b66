"""What the benchmark does with Debezium besides running it."""

import asyncio
import sys
from uuid import UUID

import pytest

from benchmarks import __main__ as command
from benchmarks import relay
from benchmarks.cells import capture
from benchmarks.cells.round import Round
from benchmarks.connect import ConnectFailed, has_reached
from benchmarks.debezium import LOW_LATENCY, TUNED, connector
from benchmarks.measure import Sample
from benchmarks.stage import id_of

ID = UUID("7b1c9d46-0a73-4a3e-9c53-3f8e0e5f8a01")


def status(connector: str, *tasks: str) -> dict[str, object]:
    return {
        "connector": {"state": connector},
        "tasks": [{"state": task, "trace": "the slot is gone"} for task in tasks],
    }


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (status("RUNNING", "RUNNING"), "RUNNING", True),
        (status("RUNNING"), "RUNNING", False),
        (status("RUNNING", "UNASSIGNED"), "RUNNING", False),
        (status("STOPPED"), "STOPPED", True),
        (status("STOPPED", "RUNNING"), "STOPPED", False),
    ],
)
def test_a_connector_is_judged_by_its_tasks(found: dict[str, object], wanted: str, expected: bool) -> None:
    assert has_reached(found, wanted) is expected


def test_a_failed_task_is_found_beneath_a_running_connector_and_says_why() -> None:
    with pytest.raises(ConnectFailed, match="the slot is gone"):
        has_reached(status("RUNNING", "FAILED"), "RUNNING")


def test_a_connector_reads_the_database_of_the_url_through_a_slot_of_its_name() -> None:
    found = connector("postgresql://postgres@127.0.0.1:15432/bench_7", LOW_LATENCY)
    assert ["127.0.0.1", "15432", "postgres", "bench_7", "bench_7"] == [
        found[name]
        for name in (
            *("database.hostname", "database.port", "database.user", "database.dbname"),
            "slot.name",
        )
    ]
    assert found.items() >= LOW_LATENCY.items()


def test_settings_change_none_of_those_that_say_what_is_moved() -> None:
    url = "postgresql://postgres@127.0.0.1:15432/bench_7"
    usual = connector(url, {})
    assert not usual.keys() & {*TUNED, *LOW_LATENCY}


@pytest.mark.parametrize("name", ["ce_id", "id"])
def test_a_record_has_its_id_in_the_header_of_either_name(name: str) -> None:
    assert id_of([("traceparent", b"00"), (name, str(ID).encode())]) == ID


def test_both_backlogs_of_a_jvm_come_from_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0

    async def run(_: Round) -> capture.Backlogs:
        nonlocal runs
        runs += 1
        return capture.Backlogs(*(Sample(rate, {}, None, None, is_void=False) for rate in (10, 20)))

    monkeypatch.setattr(capture, "_in_one_jvm", lambda _: run)
    trials = capture._temperatures("debezium", {})

    async def both(round_: Round) -> list[float | None]:
        return [(await round_.sample(trial)).messages_per_s for trial in trials.values()]

    assert list(trials) == ["debezium, cold", "debezium, warm"]
    assert asyncio.run(both(Round(None))) == [10, 20]  # type: ignore[arg-type]
    assert runs == 1


def test_debezium_runs_only_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "relay", "--cells", "debezium-backlog"])
    with pytest.raises(SystemExit):
        command.main()
    assert "relay has no cell debezium-backlog" in capsys.readouterr().err
    assert not {*relay.CELLS} & {*relay.DEBEZIUM_CELLS}


def test_a_benchmark_without_cells_beside_debezium_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "consumer", "--debezium"])
    with pytest.raises(SystemExit):
        command.main()
    assert "consumer has no cell beside Debezium" in capsys.readouterr().err
