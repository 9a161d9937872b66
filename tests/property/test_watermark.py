"""The watermark is right for any gaps, any order of completions, and offsets that come again."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from towpath.brokers.watermark import Watermark


@given(st.sets(st.integers(0, 500), min_size=1, max_size=60), st.data())
def test_the_position_is_the_first_offset_that_is_not_settled(offsets: set[int], data: st.DataObject) -> None:
    """S3."""
    order = sorted(offsets)
    watermark = Watermark()
    assert watermark.position is None
    assert all(watermark.receive(offset) for offset in order)
    pending = set(order)
    for offset in data.draw(st.permutations(order)):
        assert watermark.acknowledge(offset)
        assert not watermark.acknowledge(offset)
        pending.discard(offset)
        assert watermark.position == (min(pending) if pending else order[-1] + 1)


class WatermarkModel(RuleBasedStateMachine):
    """S3 with releases and seeks: a log with gaps, read by a reader that goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.watermark = Watermark()
        self.log = [0]
        self.next_index = 0
        self.settled: set[int] = set()
        self.handed_out: set[int] = set()
        self.received: set[int] = set()

    @rule(gap=st.integers(1, 4))
    def append(self, gap: int) -> None:
        """The log grows."""
        self.log.append(self.log[-1] + gap)

    @rule()
    def read(self) -> None:
        """Read one record; it is handed out unless somebody has it or it is settled."""
        if self.next_index < len(self.log):
            offset = self.log[self.next_index]
            self.next_index += 1
            is_new = self.watermark.receive(offset)
            self.received.add(offset)
            assert is_new == (offset not in self.settled and offset not in self.handed_out)
            if is_new:
                self.handed_out.add(offset)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Settle one that is handed out."""
        if self.handed_out:
            offset = data.draw(st.sampled_from(sorted(self.handed_out)))
            assert self.watermark.acknowledge(offset)
            self.handed_out.discard(offset)
            self.settled.add(offset)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Hand one back and seek to it."""
        if self.handed_out:
            offset = data.draw(st.sampled_from(sorted(self.handed_out)))
            assert self.watermark.release(offset)
            self.handed_out.discard(offset)
            self.next_index = min(self.next_index, self.log.index(offset))

    @rule(offset=st.integers(0, 100))
    def settle_something_that_is_not_out(self, offset: int) -> None:
        """A stranger's or a repeated acknowledgement changes nothing."""
        if offset not in self.handed_out:
            assert not self.watermark.acknowledge(offset)
            assert not self.watermark.release(offset)

    @invariant()
    def nothing_unsettled_is_committed(self) -> None:
        """All received offsets below the position are settled, and the first one at or above it is not."""
        position = self.watermark.position
        if position is None:
            assert not self.settled
            return
        assert all(offset in self.settled for offset in self.received if offset < position)
        rest = [offset for offset in self.received if offset >= position]
        assert not rest or min(rest) not in self.settled


TestWatermarkModel = WatermarkModel.TestCase


def test_what_was_released_and_then_deleted_by_the_broker_does_not_hold_it_back() -> None:
    """S3, C25: only what is still out is waited for."""
    watermark = Watermark()
    for offset in (5, 6, 7, 8):
        watermark.receive(offset)
    for offset in (5, 7, 8):
        watermark.release(offset)
    watermark.skip_to(8)
    assert watermark.position == 6
    assert watermark.acknowledge(6)
    assert watermark.position == 8
    watermark.skip_to(20)
    assert watermark.position == 20
    assert watermark.receive(20)
    assert watermark.acknowledge(20)
    assert watermark.position == 21
