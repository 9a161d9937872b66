"""What the benchmarks conclude from what they counted."""

import json

import pytest

from benchmarks import consumer, relay
from benchmarks.measure import Cell, Sample, Target, difference, percentile
from benchmarks.plans import Plan, reference_of
from benchmarks.report import markdown, show

KEYS = {
    *("cell", "subject", "messages_per_s", "cpu_s_per_million", "rss_mb", "p50_ms", "p99_ms"),
    *("wal_bytes_per_message", "ratio_to_floor"),
}


def sample(rate: float | None, note: str = "") -> Sample:
    return Sample(rate, {"worker": 10.0, "postgres": 5.0}, 50.0, 0.5, bool(note), note)


@pytest.mark.parametrize(
    ("processed", "expected"),
    [
        ([3, 1, 2], ""),
        ([1, 2], "1 missing"),
        ([1, 2, 3, 4], "1 never produced"),
        ([1, 2, 3, 3], "1 more than once"),
        ([1, 4, 4], "2 missing, 1 never produced, 1 more than once"),
    ],
)
def test_only_every_produced_id_exactly_once_is_no_difference(processed: list[int], expected: str) -> None:
    assert difference([1, 2, 3], processed) == expected


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [50.0, 99.0, 100.0] == [percentile(values, share) for share in (0.5, 0.99, 1.0)]
    assert percentile([7.0], 0.99) == 7.0


def test_ratios_are_taken_round_by_round_and_their_median_is_judged() -> None:
    floor = Cell("c", "floor", [sample(100), sample(1000), sample(200)])
    mine = Cell("c", "towpath", [sample(50), sample(100), sample(80)], [Target("≥ 0.4", 0.4)])
    facts = mine.facts(floor)
    assert facts["ratio_to_floor"] == 0.4
    assert facts["ratio_range"] == [0.1, 0.5]
    assert facts["messages_per_s"] == 80
    assert facts["messages_per_s_range"] == [50, 100]
    assert facts["targets"] == [{"target": "≥ 0.4", "value": 0.4, "range": [0.1, 0.5], "is_met": True}]


def test_the_ratio_by_cpu_points_the_way_the_ratio_of_rates_does() -> None:
    cheap, dear = sample(100), sample(100)
    dear.cpu_s_per_million = {"worker": 40.0, "postgres": 20.0}
    assert Cell("c", "towpath", [dear]).facts(Cell("c", "floor", [cheap]))["cpu_ratio_to_floor"] == 0.25


def test_a_ceiling_is_missed_from_above() -> None:
    target = Target("≤ 1.2 ×", 1.2, is_ceiling=True)
    met = [target.facts([(sample(rate), sample(100))])["is_met"] for rate in (119, 120, 121)]
    assert met == [True, True, False]


def test_of_several_references_the_quickest_of_each_round_counts() -> None:
    cells = {"a": Cell("c", "a", [sample(10), sample(40)]), "b": Cell("c", "b", [sample(20), sample(30)])}
    best = reference_of(cells, ["a", "b"])
    assert best is not None
    assert [20, 40] == [each.messages_per_s for each in best.samples]


def test_a_line_of_json_has_every_key_and_null_where_nothing_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = Cell("memory", "towpath", [Sample(None, {}, 80.0, None, is_void=False)])
    show([cell], Cell("memory", "idle", [Sample(None, {}, 70.0, None, is_void=False)]), as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() >= KEYS
    assert [name for name in sorted(KEYS) if facts[name] is not None] == ["cell", "rss_mb", "subject"]


def test_one_void_round_makes_a_cell_void_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell("backlog", "towpath", [sample(100), sample(100, "3 missing")])
    show([cell], None, as_json=False)
    printed = capsys.readouterr()
    assert cell.is_void
    assert "VOID: backlog, towpath: ['3 missing']" in printed.err
    assert "**VOID**" in markdown([cell.facts(None)])


def test_the_table_has_a_row_for_each_line_and_as_many_columns_as_its_head() -> None:
    floor, mine = Cell("c", "floor", [sample(100)]), Cell("c", "towpath", [sample(None)])
    lines = markdown([floor.facts(floor), mine.facts(None)]).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


ALL_PLANS = {"consumer": consumer.PLANS, "relay": (*relay.TABLE, *relay.OTHERS, *relay.CAPTURE)}


@pytest.mark.parametrize("benchmark", ALL_PLANS)
def test_every_cell_judges_towpath_by_subjects_it_has(benchmark: str) -> None:
    plans = ALL_PLANS[benchmark]
    assert len({plan.name for plan in plans}) == len(plans)
    for plan in plans:
        assert list(plan.subjects)[-1] == "towpath"
        assert {*plan.judged, *plan.only_full, *plan.references} <= plan.subjects.keys()
        assert bool(plan.references) >= bool(plan.targets)
        assert "towpath" in plan.trials(quick=True)
        assert not plan.references or set(plan.references) & plan.trials(quick=True).keys()


def test_a_sanity_pass_leaves_out_what_is_only_for_a_measurement() -> None:
    async def trial(_: object) -> Sample:
        return sample(1)

    plan = Plan("c", {"floor": trial, "dear": trial, "towpath": trial}, ("floor",), only_full=("dear",))
    assert list(plan.trials(quick=True)) == ["floor", "towpath"]
    assert list(plan.trials(quick=False)) == ["floor", "dear", "towpath"]
