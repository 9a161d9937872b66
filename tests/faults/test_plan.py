"""The same seed gives the same plan, and a plan holds everything that a workload has to."""

from tests.faults.__main__ import jobs
from tests.faults.faults import FAULTS
from tests.faults.messages import FATES
from tests.faults.plan import make_plan

STRUCK = ("relay_killed", "member_frozen")


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    """To the last pause, so that a failure can be repeated."""
    assert str(make_plan(7, STRUCK)) == str(make_plan(7, STRUCK))
    assert make_plan(7, STRUCK) == make_plan(7, STRUCK) != make_plan(8, STRUCK)
    assert make_plan(7, ()).lanes == make_plan(7, STRUCK).lanes


def test_a_few_seeds_hold_every_kind_with_every_fate_and_every_way_to_end() -> None:
    """Hot keys, rollbacks, savepoints, delays, repeated requests, poison."""
    transactions = [each for seed in range(8) for lane in make_plan(seed, ()).lanes for each in lane]
    messages = [message for each in transactions for message in each.messages]
    expected = {(kind, fate) for kind, fates in FATES.items() for fate in (*fates, "succeeds")}
    assert expected == {(message.kind, message.fate) for message in messages}
    assert {True, False} == {each.is_rolled_back for each in transactions}
    assert {True, False} == {each.by_session for each in transactions}
    assert any(message.is_abandoned for message in messages)
    assert any(message.delay_seconds for message in messages)
    requests = [message.request for message in messages if message.request]
    assert len(set(requests)) < len(requests)


def test_faults_of_a_pair_overlap() -> None:
    """The second begins before the first has ended."""
    for seed in range(50):
        first, second = make_plan(seed, STRUCK).strikes
        assert first.at_seconds <= second.at_seconds <= first.at_seconds + first.lasts_seconds


def test_runs_strike_with_every_fault_on_every_broker_that_it_applies_to() -> None:
    """In an order of chance that the seed decides; two at once among them."""
    count = sum(len(make().brokers) for make in FAULTS.values())
    chosen = jobs(count, 3, ("kafka", "rabbitmq"), sorted(FAULTS))
    assert chosen == jobs(count, 3, ("kafka", "rabbitmq"), sorted(FAULTS))
    assert {(broker, faults[0]) for _, broker, faults in chosen} == {
        (broker, name) for name, make in FAULTS.items() for broker in make().brokers
    }
    pairs = [[FAULTS[name]().acts_on for name in faults] for _, _, faults in chosen if len(faults) == 2]
    assert pairs
    assert all(first.isdisjoint(second) for first, second in pairs)


def test_every_fault_says_what_it_acts_on() -> None:
    """Else it could meet itself in a pair."""
    assert all(make().acts_on for make in FAULTS.values())
