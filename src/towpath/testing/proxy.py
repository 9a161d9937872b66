"""A TCP proxy that breaks links on command.

async with TcpProxy("127.0.0.1", server.port) as proxy:
    connect("127.0.0.1", proxy.port)
    await proxy.hang()       # connections stay open and nothing arrives
    await proxy.restore()    # what was held back arrives
"""

import asyncio
import contextlib
import enum
import socket
import ssl
from typing import Self

from towpath.testing.services.ports import ReservedPort

_CHUNK_BYTES = 65536


class Direction(enum.Enum):
    """Which way bytes flow: REQUESTS from the client to the server, REPLIES back."""

    REQUESTS = "requests"
    REPLIES = "replies"


class TcpProxy:
    """Forwards a loopback port to a server, until told otherwise.

    The port stays the same over `cut` and `restore`. All methods belong to the event loop that started it.
    With `tls` clients speak TLS to the proxy, which speaks plainly to the server.
    """

    def __init__(
        self,
        upstream_host: str,
        upstream_port: int,
        *,
        port: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._upstream = (upstream_host, upstream_port)
        self._reserved = ReservedPort() if port is None else None
        self.port = port if port is not None else self._reserved_number()
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._delay_seconds = 0.0
        self._gates = _open_gates()

    def _reserved_number(self) -> int:
        assert self._reserved is not None
        return self._reserved.number

    @property
    def connection_count(self) -> int:
        """How many clients are connected."""
        return len(self._links)

    async def start(self) -> Self:
        """Begins to listen. Does nothing when it listens."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self._tls)
        return self

    async def stop(self) -> None:
        """Closes everything and gives up the port. Idempotent."""
        await self.cut()
        if self._reserved is not None:
            self._reserved.release()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def cut(self) -> None:
        """Resets every connection and refuses new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.drop_connections()

    async def drop_connections(self) -> None:
        """Resets every connection; new ones are accepted."""
        links = dict(self._links)
        for writers in links.values():
            for writer in writers:
                _reset(writer)
        for task in links:
            task.cancel()
        if links:
            await asyncio.wait(links)

    async def hang(self, direction: Direction | None = None) -> None:
        """Accepts and keeps connections but forwards nothing, or nothing in one direction.

        Holding back only the replies makes the server do what the client never hears of.
        """
        for each in Direction:
            if direction is None or direction is each:
                self._gates[each].clear()

    async def strand(self) -> None:
        """Connections there are stay open and carry nothing any more, for good; new ones work.

        Like a failover of an address, or a firewall that forgot them.
        """
        await self.hang()
        self._gates = _open_gates()

    async def delay(self, seconds: float) -> None:
        """Delivers each piece of data that much later, in both directions; the bandwidth stays."""
        self._delay_seconds = seconds

    def redirect(self, upstream_port: int) -> None:
        """New connections go to another server on the same host, such as one that takes over."""
        self._upstream = (self._upstream[0], upstream_port)

    async def restore(self) -> None:
        """Forwards normally again, including what was held back."""
        self._delay_seconds = 0.0
        for gate in self._gates.values():
            gate.set()
        await self.start()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer, writers))
        self._links[task] = writers
        task.add_done_callback(self._links.pop)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        """One client's connection until both directions have ended."""
        gates = self._gates
        try:
            # Like a frozen server: the kernel accepts, and nobody reads.
            await gates[Direction.REQUESTS].wait()
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
            writers.append(upstream_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, upstream_writer, gates[Direction.REQUESTS]))
                pumps.create_task(self._pump(upstream_reader, writer, gates[Direction.REPLIES]))
        except* OSError:
            for each in writers:
                _reset(each)
        finally:
            for each in writers:
                each.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        """Carries one direction until its end; a queue keeps a delay from adding up over pieces."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due_at, data = await queue.get()
                await asyncio.sleep(max(0.0, due_at - loop.time()))
                await gate.wait()
                if not data:
                    if writer.can_write_eof():
                        with contextlib.suppress(OSError):
                            writer.write_eof()
                    else:
                        writer.close()  # TLS ends both directions at once
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                await gate.wait()  # what nobody reads stays in the kernel's small buffers
                data = await reader.read(_CHUNK_BYTES)
                await queue.put((loop.time() + self._delay_seconds, data))
                if not data:
                    break


def _open_gates() -> dict[Direction, asyncio.Event]:
    gates = {direction: asyncio.Event() for direction in Direction}
    for gate in gates.values():
        gate.set()
    return gates


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset instead of an orderly end, so that the peer notices at once."""
    if not writer.is_closing():
        sock = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.transport.abort()
