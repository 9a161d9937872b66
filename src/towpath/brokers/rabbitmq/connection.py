"""Opening and ending connections. A plain one, not aio-pika's robust one: who reconnects, and what
that does to messages in flight, is decided by the publisher and the subscriber."""

import asyncio
import contextlib
import socket
import struct
from typing import Any, Final

import aio_pika
import aiormq
from aio_pika.connection import make_url
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory

from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.confirms import ConfirmChannel
from towpath.brokers.rabbitmq.errors import CLIENT_ERRORS, is_cancelled_from_outside, translate
from towpath.errors import BrokerUnavailable

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_CLOSE_SECONDS: Final = 3.0


class _Transport(TransportFactory):
    """Keeps the stream's writer, so that the link can be cut without flushing."""

    writer: asyncio.StreamWriter | None = None

    async def create(self, url: Any, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self.writer = await factory.create(url, **kwargs)
        return reader, self.writer


class Link:
    """One open connection."""

    def __init__(self, connection: aio_pika.Connection, transport: _Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: RabbitConfig) -> "Link":
        """Connect. Raises BrokerUnavailable or ConfigurationError."""
        transport = _Transport()
        url = make_url(config.url, heartbeat=config.heartbeat_seconds, name=config.connection_name)
        connection = aio_pika.Connection(url, ssl_context=config.ssl_context)
        connection.kwargs["transport_factory"] = transport
        link = cls(connection, transport)
        try:
            async with asyncio.timeout(config.connect_timeout_seconds):
                await connection.connect()
        except asyncio.CancelledError as error:
            link.abort()
            if is_cancelled_from_outside():
                raise
            raise BrokerUnavailable("RabbitMQ: the connection broke while it was opened") from error
        except CLIENT_ERRORS as error:
            link.abort()
            raise translate(error) from error
        return link

    async def confirm_channel(self) -> ConfirmChannel:
        """A new channel to publish on."""
        channel = await self.channel(confirms=True)
        transport, writer = self._connection.transport, self._transport.writer
        if transport is None or writer is None:
            raise BrokerUnavailable("RabbitMQ: the connection broke while a channel was opened")
        return ConfirmChannel(channel, writer, transport.ready)

    async def channel(self, *, confirms: bool) -> aiormq.Channel:
        """A new channel."""
        channel = self._connection.channel(publisher_confirms=confirms)
        await channel.initialize()
        underlay = await channel.get_underlay_channel()
        if not isinstance(underlay, aiormq.Channel):
            raise TypeError(f"expected a channel of aiormq, got {type(underlay).__name__}")
        return underlay

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as the client knows."""
        transport = self._connection.transport
        return self._ending is None and transport is not None and not transport.connection.is_closed

    @property
    def cluster_name(self) -> str | None:
        """What the broker calls its cluster; by default after its first node."""
        return self._property("cluster_name")

    @property
    def version(self) -> str | None:
        """The broker's version, as it says."""
        return self._property("version")

    def _property(self, key: str) -> str | None:
        transport = self._connection.transport
        if transport is None:
            return None
        value = transport.connection.server_properties.get(key)
        return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None

    @property
    def frame_max_bytes(self) -> int:
        """The largest frame that was agreed on; all headers of a message must fit into one."""
        transport = self._connection.transport
        if transport is None:
            return 131_072
        return int(transport.connection.connection_tune.frame_max) or 131_072

    def abort(self) -> None:
        """Cut at once: nothing that is buffered is written any more. `finish` waits for the rest."""
        writer = self._transport.writer
        if writer is not None and not writer.transport.is_closing():
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):  # closed by the other side meanwhile
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())

    @property
    def is_finished(self) -> bool:
        """Whether it has ended and nothing of it runs any more."""
        return self._ending is not None and self._ending.done()

    async def finish(self) -> None:
        """Wait until the end of a link that was aborted, bounded."""
        if self._ending is not None:
            await asyncio.wait({self._ending})

    async def aclose(self) -> None:
        """Close in order; bounded, never raises for a dead broker."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())
        await self.finish()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._connection.close()
        except asyncio.CancelledError:
            if is_cancelled_from_outside():
                raise
        except CLIENT_ERRORS:
            return  # it is closed either way
        finally:
            writer = self._transport.writer
            if writer is not None:
                writer.transport.abort()
