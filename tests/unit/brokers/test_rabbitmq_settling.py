"""Every acknowledged tag is told to the broker once, and `multiple` never reaches past an open one."""

import asyncio
from typing import cast

import aiormq
from hypothesis import given
from hypothesis import strategies as st

from towpath.brokers.rabbitmq.settling import Settling


class _Broker:
    """Delivery tags as the broker keeps them."""

    def __init__(self) -> None:
        self.unsettled: set[int] = set()
        self.acknowledged: set[int] = set()
        self.frames = 0
        self.can_write = asyncio.Event()
        self.can_write.set()

    async def basic_ack(self, tag: int, multiple: bool = False, wait: bool = True) -> None:
        await self.can_write.wait()
        self.frames += 1
        tags = {each for each in self.unsettled if each <= tag} if multiple else {tag}
        assert tag in self.unsettled, "the broker closes the channel for an unknown tag"
        self.unsettled -= tags
        self.acknowledged |= tags


def _settling() -> tuple[Settling, _Broker]:
    broker = _Broker()
    return Settling(cast("aiormq.Channel", broker)), broker


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "acknowledge", "release", "send"]), st.integers(1, 30)), max_size=80
)


@given(STEPS)
async def test_the_broker_knows_exactly_what_was_settled(steps: list[tuple[str, int]]) -> None:
    """C3: nothing is acknowledged that was not."""
    settling, broker = _settling()
    next_tag = 1
    acknowledged: set[int] = set()
    released: set[int] = set()
    for step, tag in steps:
        if step == "arrive":
            settling.receive(next_tag)
            broker.unsettled.add(next_tag)
            next_tag += 1
        elif step == "acknowledge":
            if settling.acknowledge(tag):
                acknowledged.add(tag)
        elif step == "release":
            if settling.release(tag):
                released.add(tag)
        else:
            await settling.send()
    await settling.send()
    assert not acknowledged & released
    assert broker.acknowledged == acknowledged
    assert broker.unsettled == set(range(1, next_tag)) - acknowledged


async def test_a_run_of_tags_takes_one_frame() -> None:
    """A frame per message would cost more than the messages."""
    settling, broker = _settling()
    for tag in range(1, 101):
        settling.receive(tag)
        broker.unsettled.add(tag)
    for tag in range(1, 101):
        assert settling.acknowledge(tag)
    await settling.send()
    assert broker.frames == 1
    assert not settling.acknowledge(50)


async def test_what_was_given_back_is_not_acknowledged_with_what_follows() -> None:
    """C3: at a shutdown the last round begins while the one before waits for the socket."""
    settling, broker = _settling()
    for tag in range(1, 6):
        settling.receive(tag)
        broker.unsettled.add(tag)
    broker.can_write.clear()
    settling.acknowledge(1)
    first = asyncio.create_task(settling.send())
    await asyncio.sleep(0)
    settling.release(3)
    settling.acknowledge(2)
    settling.acknowledge(4)
    last = asyncio.create_task(settling.send(is_waiting=True))
    await asyncio.sleep(0)

    broker.can_write.set()
    await asyncio.gather(first, last)

    assert ({1, 2, 4}, {3, 5}) == (broker.acknowledged, broker.unsettled)
