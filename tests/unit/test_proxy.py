"""The TCP proxy breaks links the way networks do."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from towpath.testing.proxy import Direction, TcpProxy


@dataclass
class Echo:
    port: int
    received: list[bytes] = field(default_factory=list)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                state.received.append(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state = Echo(server.sockets[0].getsockname()[1])
    yield state
    server.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[TcpProxy]:
    async with TcpProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, proxy: TcpProxy) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, length: int, timeout: float = 60) -> bytes:
        async with asyncio.timeout(timeout):
            return await self._reader.readexactly(length)

    async def ask(self, data: bytes) -> bytes:
        self.send(data)
        return await self.receive(len(data))

    def end(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


async def test_bytes_pass_both_ways(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    payload = bytes(range(256)) * 4096
    assert await client.ask(payload) == payload
    client.close()


async def test_an_end_of_input_is_passed_on_after_the_data(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    client.send(b"last words")
    client.end()
    assert await client.receive(10) == b"last words"
    with pytest.raises(asyncio.IncompleteReadError):
        await client.receive(1)
    client.close()


async def test_new_connections_go_where_they_are_redirected(proxy: TcpProxy) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"successor")
        writer.close()

    before = await Client.connect(proxy)
    await before.ask(b"x")
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as successor:
        proxy.redirect(successor.sockets[0].getsockname()[1])
        after = await Client.connect(proxy)
        assert await after.receive(9) == b"successor"
        after.close()
    assert await before.ask(b"still there") == b"still there"
    before.close()


async def test_a_cut_resets_connections_and_refuses_new_ones(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    await client.ask(b"x")
    await proxy.cut()
    with pytest.raises(ConnectionResetError):
        await client.receive(1)
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(proxy)
    assert proxy.connection_count == 0
    client.close()


async def test_a_restored_proxy_listens_on_the_same_port(proxy: TcpProxy) -> None:
    port = proxy.port
    await proxy.cut()
    await proxy.restore()
    client = await Client.connect(proxy)
    assert (proxy.port, await client.ask(b"back")) == (port, b"back")
    client.close()


async def test_a_hanging_proxy_keeps_connections_and_delivers_after_restore(proxy: TcpProxy) -> None:
    old = await Client.connect(proxy)
    await old.ask(b"x")
    await proxy.hang()
    new = await Client.connect(proxy)
    old.send(b"old")
    new.send(b"new")
    with pytest.raises(TimeoutError):
        await old.receive(3, timeout=0.1)
    with pytest.raises(TimeoutError):
        await new.receive(3, timeout=0.1)
    await proxy.restore()
    assert (await old.receive(3), await new.receive(3)) == (b"old", b"new")
    old.close()
    new.close()


async def test_held_back_replies_leave_the_request_done(proxy: TcpProxy, echo: Echo) -> None:
    client = await Client.connect(proxy)
    await proxy.hang(Direction.REPLIES)
    client.send(b"charge")
    with pytest.raises(TimeoutError):
        await client.receive(6, timeout=0.1)
    async with asyncio.timeout(60):
        while not echo.received:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.01)
    assert echo.received == [b"charge"]
    client.close()


async def test_a_hanging_proxy_can_be_cut(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    await client.ask(b"x")
    await proxy.hang()
    client.send(b"lost")
    await proxy.cut()
    with pytest.raises(ConnectionResetError):
        await client.receive(1)
    client.close()


async def test_dropped_connections_can_be_opened_again(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    await client.ask(b"x")
    await proxy.drop_connections()
    with pytest.raises(ConnectionResetError):
        await client.receive(1)
    again = await Client.connect(proxy)
    assert await again.ask(b"y") == b"y"
    client.close()
    again.close()


async def test_a_delay_adds_latency_once_per_direction(proxy: TcpProxy) -> None:
    client = await Client.connect(proxy)
    await client.ask(b"x")
    await proxy.delay(0.2)
    started = time.monotonic()
    for _ in range(100):
        client.send(b"piece")
        await asyncio.sleep(0.01)
    await client.receive(500)
    took = time.monotonic() - started
    assert 0.4 <= took < 15  # one by one it would take twenty seconds or more
    client.close()


async def test_an_absent_server_resets_the_client() -> None:
    async with TcpProxy("127.0.0.1", 1) as proxy:
        client = await Client.connect(proxy)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.receive(1)
        client.close()
