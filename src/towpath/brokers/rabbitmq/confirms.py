"""A channel that publishes by whole writes: our frames over the library's own connection.

This is the one place that knows the inside of aiormq. It relies on
- the stream's writer, which our own transport factory made: what is written there between two frames
  of the library reaches the broker between them;
- `Channel.frames`, the queue through which the connection's reader hands each frame to its channel:
  `Inbox` stands in for it, keeps confirms and returns for itself and passes on everything else;
- `Channel.number`, `Channel.closing` and `AbstractConnection.ready`.
So opening, closing, heartbeats and errors stay the library's. Another version than the one known here
is refused, never worked around. tests/unit/brokers/test_rabbitmq_confirms.py tells what has changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Final, Protocol, cast

import aiormq
from aiormq import spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from towpath.errors import BrokerUnavailable, ConfigurationError

KNOWN_AIORMQ: Final = "7.2."


class Ledger(Protocol):
    """Who is told what became of the messages written, each by the number it was written under."""

    def confirm(self, numbers: Iterable[int]) -> None:
        """The broker has them."""
        ...

    def refuse(self, numbers: Iterable[int]) -> None:
        """The broker could not take them (`basic.nack`)."""
        ...

    def give_back(self, message_id: str, detail: str) -> None:
        """One that no queue wanted; its confirm follows."""
        ...


class Inbox:
    """Stands in for `Channel.frames`; hands confirms to the ledger the moment they are read."""

    def __init__(self, frames: "asyncio.Queue[Any]") -> None:
        self._frames = frames
        self.changed = asyncio.Event()
        self.ledger: Ledger | None = None
        self.outstanding: dict[int, int] = {}
        """Delivery tag → number, for what has no confirm yet; tags ascend."""
        self.is_ending = False
        """The broker closes the channel: once that is answered, another frame on it ends the connection."""
        self._returned: spec.Basic.Return | None = None
        self._returned_id = ""
        self._body_left = 0

    async def put(self, item: tuple[int, Any]) -> None:
        """Called by the connection's reader for every frame of the channel; what it raised would end it."""
        frame = item[1]
        if isinstance(frame, spec.Basic.Ack | spec.Basic.Nack):
            self._settle(frame)
        elif isinstance(frame, spec.Basic.Return):
            self._returned = frame
        elif self._returned is not None and isinstance(frame, ContentHeader | ContentBody):
            self._read_returned(self._returned, frame)
        else:
            self.is_ending = self.is_ending or isinstance(frame, spec.Channel.Close)
            await self._frames.put(item)

    async def get(self) -> Any:
        """The channel's own reader."""
        return await self._frames.get()

    def task_done(self) -> None:
        """The channel's own reader."""
        self._frames.task_done()

    def _settle(self, frame: spec.Basic.Ack | spec.Basic.Nack) -> None:
        last = frame.delivery_tag or 0
        outstanding = self.outstanding
        if frame.multiple:
            tags = []
            for tag in outstanding:
                if 0 < last < tag:
                    break
                tags.append(tag)
        else:
            tags = [last] if last in outstanding else []
        numbers = [outstanding.pop(tag) for tag in tags]
        if self.ledger is not None:
            (self.ledger.confirm if isinstance(frame, spec.Basic.Ack) else self.ledger.refuse)(numbers)
        self.changed.set()

    def _read_returned(self, returned: spec.Basic.Return, frame: ContentHeader | ContentBody) -> None:
        """What is returned comes with its properties and its whole body."""
        if isinstance(frame, ContentHeader):
            self._returned_id = str(frame.properties.message_id)
            self._body_left = frame.body_size
        else:
            self._body_left -= len(frame.value)
        if self._body_left <= 0:
            self._returned = None
            if self.ledger is not None:
                detail = (
                    f"{returned.reply_code} {returned.reply_text}, "
                    f"exchange {returned.exchange!r}, routing key {returned.routing_key!r}"
                )
                self.ledger.give_back(self._returned_id, detail)
                self.changed.set()


class ConfirmChannel:
    """Writes messages and hears of their confirms."""

    def __init__(
        self, channel: aiormq.Channel, writer: asyncio.StreamWriter, ready: Callable[[], Awaitable[Any]]
    ) -> None:
        """Take over a fresh channel in confirm mode. Raises ConfigurationError for an unknown aiormq."""
        _check_version()
        self._channel = channel
        self._writer = writer
        self._ready = ready
        self._next_tag = 1
        self.is_blocked = False
        """Whether `ready` waits, or gave up waiting."""
        self._inbox = Inbox(channel.frames)
        channel.frames = cast("asyncio.Queue[Any]", self._inbox)
        self._closing = channel.closing
        self._closing.add_done_callback(lambda _: self._inbox.changed.set())

    @property
    def number(self) -> int:
        """The channel's number on its connection."""
        return self._channel.number

    @property
    def is_closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._channel.is_closed

    @property
    def outstanding(self) -> Sequence[int]:
        """The numbers of what was written and has no confirm yet, in the order written."""
        return list(self._inbox.outstanding.values())

    def report_to(self, ledger: Ledger | None) -> None:
        """Tell this ledger from now on; None when its window is over."""
        self._inbox.ledger = ledger

    def raise_if_closed(self) -> None:
        """Raise what closed the channel or its connection, in the library's words."""
        if self._closing.done():
            error = None if self._closing.cancelled() else self._closing.exception()
            if error is None or isinstance(error, asyncio.CancelledError):
                raise BrokerUnavailable("RabbitMQ: the connection broke under a publish")
            raise error

    async def ready(self) -> None:
        """Wait while the broker blocks publishers (an alarm for memory or disk), or until it is closed.

        Nothing may be awaited between this and a write.
        """
        waiting = asyncio.ensure_future(self._ready())
        self.is_blocked = True
        try:
            await asyncio.wait({waiting, self._closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._inbox.is_ending:
            await asyncio.wait({self._closing})
        self.raise_if_closed()
        self.is_blocked = False

    def write(self, numbers: Iterable[int], pieces: Iterable[bytes]) -> None:
        """Write the frames of these messages at once; each is outstanding from now on."""
        for number in numbers:
            self._inbox.outstanding[self._next_tag] = number
            self._next_tag += 1
        self._writer.write(b"".join(pieces))

    async def drain(self) -> None:
        """Wait until the operating system has taken most of what was written."""
        try:
            await self._writer.drain()
        except OSError:
            await asyncio.wait({self._closing})  # the library learns of it too, and knows why

    async def change(self) -> None:
        """Wait until something was settled, or the channel closed."""
        await self._inbox.changed.wait()
        self._inbox.changed.clear()
        self.raise_if_closed()


@cache
def _check_version() -> None:
    found = version("aiormq")
    if not found.startswith(KNOWN_AIORMQ):
        raise ConfigurationError(
            f"aiormq {found} is installed and {KNOWN_AIORMQ}x is needed: pip install 'towpath[rabbitmq]'"
        )
