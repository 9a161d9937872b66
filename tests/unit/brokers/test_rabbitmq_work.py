"""What may be in flight together, and what is never confirmed behind what."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.brokers.rabbitmq.work import Work
from towpath.errors import MessageRefused

KEYS = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=25)


def _window(keys: list[str | None]) -> list[OutboundMessage]:
    return [
        OutboundMessage(uuid.uuid4(), number, "orders", "t", key, 0, (), b"")
        for number, key in enumerate(keys)
    ]


@given(KEYS, st.data())
def test_nothing_of_a_key_is_confirmed_behind_what_is_not(
    keys: list[str | None], data: st.DataObject
) -> None:
    """R23: whatever order the broker answers in, over closed channels, returns, nacks and refusals."""
    window, result = _window(keys), PublishResult()
    work = Work(window, result)
    work.begin()
    for _ in range(4 * len(window)):
        if work.is_startable and data.draw(st.booleans()):
            work.wrote(work.next(), 10)
            keyed = [window[index].key for index in work.in_flight if window[index].key]
            assert len(keyed) == len(set(keyed)), "two messages of a key were in flight"
        elif work.in_flight:
            index = data.draw(st.sampled_from(sorted(work.in_flight)))
            match data.draw(st.sampled_from(["ack", "ack", "ack", "nack", "return", "refuse", "close"])):
                case "ack":
                    work.confirm([index])
                case "nack":
                    work.refuse([index])
                case "return":
                    work.give_back(str(window[index].message_id), "nowhere")
                    work.confirm([index])
                case "refuse":
                    work.refuse_one(index, MessageRefused("x"))
                case "close":
                    work.begin()
    assert work.in_flight_bytes == 10 * len(work.in_flight)
    assert not result.acknowledged & set(result.refused)
    for key in ("a", "b", "c"):
        settled = [index in result.acknowledged for index, each in enumerate(keys) if each == key]
        assert settled == sorted(settled, reverse=True)


@given(KEYS)
def test_everything_is_published_in_rounds(keys: list[str | None]) -> None:
    """R16, R23: the n-th message of every key together, so as many rounds as the longest key has."""
    work = Work(_window(keys), PublishResult())
    work.begin()
    rounds = 0
    while work.is_startable:
        rounds += 1
        written = []
        while work.is_startable:
            written.append(work.next())
            work.wrote(written[-1], 1)
        work.confirm(written)
    assert work.result.acknowledged == set(range(len(keys)))
    assert rounds == max(1, *(keys.count(key) for key in "abc"))
