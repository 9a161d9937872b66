"""Confirms reach us through the library's own reader.

The broker is a script, since a real one decides itself when it nacks, blocks or gathers confirms. These
tests fail when the library changes in a way that `confirms.py` does not expect.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable

import pytest
from aiormq import exceptions as amqp
from aiormq import spec
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader, ProtocolHeader

from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.brokers.rabbitmq import confirms
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.confirms import ConfirmChannel
from towpath.brokers.rabbitmq.connection import Link
from towpath.brokers.rabbitmq.publisher import RabbitPublisher
from towpath.errors import BrokerUnavailable, ConfigurationError

_TUNE = spec.Connection.Tune(channel_max=10, frame_max=8192, heartbeat=0)
_START = spec.Connection.Start(
    version_major=0,
    version_minor=9,
    server_properties={"capabilities": {"publisher_confirms": True, "basic.nack": True}},
    mechanisms="PLAIN",
    locales="en_US",
)
_ANSWERS = {
    spec.Connection.StartOk: _TUNE,
    spec.Connection.Open: spec.Connection.OpenOk(),
    spec.Connection.Close: spec.Connection.CloseOk(),
    spec.Channel.Open: spec.Channel.OpenOk(),
    spec.Channel.Close: spec.Channel.CloseOk(),
    spec.Confirm.Select: spec.Confirm.SelectOk(),
    spec.Exchange.Declare: spec.Exchange.DeclareOk(),
}


class ScriptedBroker:
    """Speaks enough AMQP to open channels; what it says about messages is up to the test."""

    def __init__(self) -> None:
        self.published: list[str] = []
        """Ids, in the order read."""
        self.arrived = asyncio.Condition()
        self.channel = 0
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """The URL it listens at."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"amqp://guest:guest@127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    async def stop(self) -> None:
        """End everything."""
        if self._writer is not None:
            self._writer.close()
        assert self._server is not None
        self._server.close()

    def say(self, *frames: object, channel: int | None = None) -> None:
        """Send frames in one piece, by default on the channel messages came by."""
        assert self._writer is not None
        number = self.channel if channel is None else channel
        self._writer.write(b"".join(frame.marshal(each, number) for each in frames))  # type: ignore[arg-type]

    async def wait_for(self, count: int) -> None:
        """Until that many messages were read."""
        async with self.arrived, asyncio.timeout(60):
            await self.arrived.wait_for(lambda: len(self.published) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        assert await reader.readexactly(8) == ProtocolHeader().marshal()
        self.say(_START, channel=0)
        while True:
            try:
                start = await reader.readexactly(7)
                rest = await reader.readexactly(int.from_bytes(start[3:7]) + 1)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            _, channel, decoded = frame.unmarshal(start + rest)
            if type(decoded) in _ANSWERS:
                self.say(_ANSWERS[type(decoded)], channel=channel)
            elif isinstance(decoded, ContentHeader):
                self.channel = channel
                async with self.arrived:
                    self.published.append(str(decoded.properties.message_id))
                    self.arrived.notify_all()


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    """A broker."""
    broker = ScriptedBroker()
    yield broker
    await broker.stop()


@pytest.fixture
async def publisher(broker: ScriptedBroker) -> AsyncIterator[RabbitPublisher]:
    """A publisher connected to it."""
    options = {"heartbeat_seconds": 60}
    publisher = RabbitPublisher(RabbitConfig.read(await broker.start(), options))
    await publisher.start()
    yield publisher
    await publisher.aclose()


def _window(count: int, keys: Iterable[str] | None = None, payload: bytes = b"x") -> list[OutboundMessage]:
    names = [f"k{number}" for number in range(count)] if keys is None else list(keys)
    return [
        OutboundMessage(uuid.uuid4(), number, "orders", "t", names[number], 0, (), payload)
        for number in range(count)
    ]


def _publishing(publisher: RabbitPublisher, window: list[OutboundMessage]) -> "asyncio.Task[PublishResult]":
    return asyncio.create_task(publisher.publish(window, timeout_seconds=60))


async def _rounds_of_the_loop() -> None:
    """As many as bring what the broker said to the publisher, also where the process stood still."""
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_one_confirm_settles_all_that_were_written_before_it(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """R16: `multiple`, single confirms out of order, and a tag confirmed twice."""
    publishing = _publishing(publisher, _window(10))
    await broker.wait_for(10)
    broker.say(spec.Basic.Ack(7), spec.Basic.Ack(4, multiple=True), spec.Basic.Ack(3))
    broker.say(spec.Basic.Ack(99), spec.Basic.Ack(0, multiple=True))
    assert await publishing == PublishResult(acknowledged=set(range(10)))


async def test_a_nack_refuses_all_that_were_written_before_it(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """R23: and their followers are not written."""
    publishing = _publishing(publisher, _window(6, ["a", "b", "c", "a", "b", "c"]))
    await broker.wait_for(3)
    broker.say(spec.Basic.Nack(2, multiple=True), spec.Basic.Ack(3))
    await broker.wait_for(4)
    broker.say(spec.Basic.Ack(4))
    result = await publishing
    assert result.acknowledged == {2, 5}
    assert {index: refusal.reason for index, refusal in result.refused.items()} == {0: "nacked", 1: "nacked"}
    assert len(broker.published) == 4


async def test_a_returned_message_is_known_by_its_id(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """R9: it comes back with its whole body, between other frames of the channel, then is confirmed."""
    window = _window(4, ["a", "b", "c", "b"], payload=b"y" * 20_000)
    publishing = _publishing(publisher, window)  # the longest key goes first
    await broker.wait_for(3)
    returned = spec.Basic.Return(312, "NO_ROUTE", "orders", "0.t")
    properties = spec.Basic.Properties(message_id=str(window[1].message_id))
    bodies = [ContentBody(b"y" * 8000), ContentBody(b"y" * 8000), ContentBody(b"y" * 4000)]
    broker.say(spec.Basic.Ack(2), returned, ContentHeader(body_size=20_000, properties=properties), *bodies)
    broker.say(spec.Basic.Ack(3, multiple=True))
    result = await publishing
    assert result.acknowledged == {0, 2}
    assert [*result.refused] == [1]
    assert "312 NO_ROUTE" in str(result.refused[1])


async def test_the_channel_stays_usable_for_the_library(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """What is not about messages reaches the library: the broker's words when it closes a channel."""
    publishing = _publishing(publisher, _window(2))
    await broker.wait_for(2)
    broker.say(spec.Channel.Close(541, "INTERNAL_ERROR", 60, 40))
    result = await publishing
    assert isinstance(result.unavailable, BrokerUnavailable)
    assert "INTERNAL_ERROR" in str(result.unavailable)


async def test_nothing_is_written_while_the_broker_blocks_publishers(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """R7: an alarm for memory or disk; the deadline applies, and the connection is kept."""
    first = _publishing(publisher, _window(1))
    await broker.wait_for(1)
    broker.say(spec.Basic.Ack(1))
    await first
    broker.say(spec.Connection.Blocked("low on memory"), channel=0)
    broker.say(spec.Basic.Ack(1))  # read in order: when this is in, so is the other
    await _rounds_of_the_loop()
    result = await publisher.publish(_window(2), timeout_seconds=0.3)
    assert "alarm" in str(result.unavailable)
    assert len(broker.published) == 1
    waiting = _publishing(publisher, _window(2))
    await asyncio.sleep(0.05)
    broker.say(spec.Connection.Unblocked(), channel=0)
    await broker.wait_for(3)
    broker.say(spec.Basic.Ack(3, multiple=True))
    assert (await waiting).acknowledged == {0, 1}


async def test_a_connection_that_ends_while_it_is_blocked_is_noticed_at_once(
    broker: ScriptedBroker, publisher: RabbitPublisher
) -> None:
    """R7: not only at the deadline."""
    broker.say(spec.Connection.Blocked("low on disk"), channel=0)
    await _rounds_of_the_loop()
    publishing = _publishing(publisher, _window(2))
    await asyncio.sleep(0.05)
    await broker.stop()
    async with asyncio.timeout(60):
        assert isinstance((await publishing).unavailable, BrokerUnavailable)


async def test_another_aiormq_is_refused(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2: its inside may have changed; the message says what to install."""
    confirms._check_version.cache_clear()
    monkeypatch.setattr(confirms, "version", lambda _: "8.0.0")
    publisher = RabbitPublisher(RabbitConfig.read(await broker.start(), {}))
    with pytest.raises(ConfigurationError, match=r"8\.0\.0.*pip install 'towpath\[rabbitmq\]'"):
        await publisher.start()
    await publisher.aclose()


async def test_the_library_hands_frames_to_a_channel_as_expected(broker: ScriptedBroker) -> None:
    """The seam itself: one channel's confirms arrive although the library knows of no message."""
    link = await Link.open(RabbitConfig.read(await broker.start(), {}))
    channel = await link.confirm_channel()
    assert isinstance(channel, ConfirmChannel)
    channel.write([5], [b""])
    broker.say(spec.Basic.Ack(1), channel=channel.number)
    async with asyncio.timeout(60):
        await channel.change()
    assert not channel.outstanding
    broker.say(spec.Channel.Close(404, "NOT_FOUND", 60, 40), channel=channel.number)
    with pytest.raises(amqp.ChannelNotFoundEntity):
        await channel.change()
    await link.aclose()
