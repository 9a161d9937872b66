"""Lanes hand out one message of a lane at a time, in order, and lose none."""

from collections import Counter, defaultdict
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from towpath.brokers.ports import Delivery
from towpath.consumer.lanes import Lanes, Received
from towpath.store.work import Work


def received(
    lane: str | None,
    source: str = "parcels",
    offset: int = 0,
    type_: str = "parcel.posted",
    partition: str = "p",
) -> Received:
    work = Work(uuid4(), type_, "event", source, lane, lane, offset, b"", "", (), None)
    return Received(work, Delivery(source, partition, offset, lane, (), b"", None, False, 1))


def test_one_message_of_a_lane_starts_at_a_time_and_the_next_when_it_is_done() -> None:
    lanes, first, second, other = Lanes(), received("a"), received("a"), received("b")
    for each in (first, second, other):
        lanes.add(each)
    assert lanes.take(10) == [first, other]
    assert lanes.take(10) == []
    assert (len(lanes), lanes.ready_count) == (1, 0)
    lanes.finish(first)
    assert lanes.take(10) == [second]


def test_messages_without_a_lane_start_together() -> None:
    lanes, messages = Lanes(), [received(None) for _ in range(5)]
    for each in messages:
        lanes.add(each)
    assert lanes.take(3) == messages[:3]
    assert lanes.take(3) == messages[3:]


def test_lanes_that_wait_for_the_same_start_in_the_order_of_their_arrival_and_hold_up_no_other() -> None:
    lanes, blocked = Lanes(), [received(None, type_="slow") for _ in range(3)]
    for each in blocked:
        lanes.add(each)
    free = received(None)
    lanes.add(free)
    assert lanes.take(10, lambda each: "full" if each.work.type == "slow" else None) == [free]
    later = received(None, type_="slow")
    lanes.add(later)
    room = 2

    def admit(_: Received) -> str | None:
        nonlocal room
        room -= 1
        return None if room >= 0 else "full"

    assert lanes.take(10, admit) == blocked[:2]
    assert lanes.take(1) == blocked[2:]
    assert lanes.take(10) == [later]


def test_the_same_key_of_two_sources_is_two_lanes() -> None:
    lanes, one, two = Lanes(), received("a", "parcels"), received("a", "letters")
    lanes.add(one)
    lanes.add(two)
    assert lanes.take(10) == [one, two]


def test_a_held_message_stays_the_head_of_its_lane_until_it_is_due() -> None:
    lanes, first, second = Lanes(), received("a"), received("a")
    lanes.add(first)
    lanes.add(second)
    lanes.take(1)
    lanes.hold(first, until=5.0)
    assert lanes.release_due(4.9) == 5.0
    assert lanes.take(10) == []
    assert lanes.release_due(5.0) is None
    assert lanes.take(10) == [first]


def test_a_head_that_waits_for_one_of_its_lane_gives_way_to_the_other_partitions_only() -> None:
    """C10: of a key that comes by two partitions, what a dead worker began may stand behind what it stops."""
    lanes, first, second = Lanes(), received("a"), received("a")
    other, last = received("a", partition="q"), received("a", partition="q")
    for each in (first, second, other, last):
        lanes.add(each)
    assert lanes.take(10) == [first]
    lanes.give_way(first, 5.0)
    assert lanes.release_due(5.0) is None
    started = []
    for _ in range(4):
        (head,) = lanes.take(10)
        started.append(head)
        lanes.finish(head)
    assert started == [other, first, second, last]


def test_a_message_that_was_handed_back_makes_way_for_its_next_coming() -> None:
    """S1: else its lane would stand still when the partition returns."""
    lanes, first, again = Lanes(), received("a"), received("a")
    lanes.add(first)
    lanes.take(1)
    lanes.make_way(first)
    lanes.add(again)
    assert lanes.take(1) == [again]


@pytest.mark.parametrize("end", ["finish", "hold"])
def test_making_way_afterwards_changes_nothing(end: str) -> None:
    lanes, first, second = Lanes(), received("a"), received("a")
    lanes.add(first)
    lanes.add(second)
    lanes.take(1)
    if end == "finish":
        lanes.finish(first)
        assert lanes.take(1) == [second]
    else:
        lanes.hold(first, until=1.0)
    lanes.make_way(first)
    lanes.add(received("a"))
    assert lanes.take(10) == []


def test_waiting_messages_can_be_taken_out_in_order() -> None:
    lanes, messages = Lanes(), [received("a", offset=n) for n in range(4)]
    for each in messages:
        lanes.add(each)
    lanes.take(1)
    assert list(lanes) == messages[1:]
    assert lanes.remove(lambda each: each.delivery.offset != 2) == [messages[1], messages[3]]
    lanes.finish(messages[0])
    assert lanes.take(10) == [messages[2]]


def test_a_message_that_was_never_added_has_no_lane() -> None:
    with pytest.raises(ValueError, match="never added"):
        Lanes().finish(received("a"))


class LanesMachine(RuleBasedStateMachine):
    """Random use against a model: a queue per lane, and what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = Lanes()
        self.now = 0.0
        self.added = 0
        self.queues: dict[Any, list[Received]] = defaultdict(list)
        self.running: list[Received] = []
        self.most = {"red": 1, "blue": 2, "free": 1000}
        self.gone: list[Received] = []

    @staticmethod
    def lane_of(each: Received) -> Any:
        return each if each.work.lane is None else (each.work.source, each.work.lane)

    @rule(
        lane=st.sampled_from(["a", "b", None]),
        source=st.sampled_from(["x", "y"]),
        type_=st.sampled_from(["red", "blue", "free"]),
    )
    def add(self, lane: str | None, source: str, type_: str) -> None:
        each = received(lane, source, self.added, type_)
        self.added += 1
        self.lanes.add(each)
        self.queues[self.lane_of(each)].append(each)

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        running = Counter(each.work.type for each in self.running)

        def admit(each: Received) -> str | None:
            type_ = each.work.type
            if running[type_] >= self.most[type_]:
                return type_
            running[type_] += 1
            return None

        taken = self.lanes.take(limit, admit)
        assert len(taken) <= limit
        busy = [self.lane_of(each) for each in self.running]
        for each in taken:
            assert self.lane_of(each) not in busy, "two of one lane at once"
            busy.append(self.lane_of(each))
            assert self.queues[self.lane_of(each)].pop(0) is each, "not the head"
        self.running += taken

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "make_way", "both"]))
    def finish(self, data: st.DataObject, how: str) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how != "make_way":
            self.lanes.finish(each)
        if how != "finish":
            self.lanes.make_way(each)
        self.gone.append(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.floats(0, 3))
    def hold(self, data: st.DataObject, seconds: float) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.lanes.hold(each, self.now + seconds)
        self.queues[self.lane_of(each)].insert(0, each)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.lanes.release_due(self.now)
        assert due is None or due > self.now

    @rule(source=st.sampled_from(["x", "y"]))
    def remove(self, source: str) -> None:
        removed = self.lanes.remove(lambda each: each.work.source == source)
        expected = {
            id(each) for queue in self.queues.values() for each in queue if each.work.source == source
        }
        assert {id(each) for each in removed} == expected
        for lane, queue in self.queues.items():
            self.queues[lane] = [each for each in queue if id(each) not in expected]
        self.gone += removed

    @invariant()
    def count_is_right(self) -> None:
        assert len(self.lanes) == sum(map(len, self.queues.values()))

    def teardown(self) -> None:
        """Whatever happened: all that waits can be run to the end, in order, and nothing is kept."""
        for _ in range(self.added + 1):
            for each in self.running:
                self.lanes.finish(each)
            self.running = []
            self.now += 10
            self.lanes.release_due(self.now)
            self.take(100)
        assert not any(self.queues.values()), "lost"
        assert self.lanes._lanes == {}
        assert not self.lanes._ready
        assert not self.lanes._blocked
        assert not self.lanes._held


LanesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLanes = LanesMachine.TestCase
