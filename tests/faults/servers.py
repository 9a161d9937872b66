"""The servers of a run, and the proxies before them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from tests.acceptance.brokers import KafkaWire, RabbitWire, WireBroker
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import KafkaCluster, KafkaServer, PostgresServer, RabbitServer

BrokerName: TypeAlias = Literal["kafka", "rabbitmq"]


@dataclass(frozen=True)
class Servers:
    """What all runs on one broker share."""

    broker_name: BrokerName
    postgres: PostgresServer
    broker: KafkaServer | RabbitServer
    postgres_proxy: TcpProxy
    broker_proxy: TcpProxy
    cluster: KafkaCluster | None = None
    """Where there is one, `broker` is its first."""

    @property
    def wire(self) -> WireBroker:
        """The broker, past the proxy."""
        if isinstance(self.broker, KafkaServer):
            return KafkaWire((self.cluster or self.broker).bootstrap)
        return RabbitWire(self.broker.url)

    def broker_url(self, *, is_proxied: bool) -> str:
        """For processes."""
        if not is_proxied:
            return self.wire.url
        if isinstance(self.broker, KafkaServer):
            return f"kafka://127.0.0.1:{self.broker_proxy.port}"
        return at_port(self.wire.url, self.broker_proxy.port)


@asynccontextmanager
async def servers_of(
    broker_name: BrokerName, postgres: PostgresServer, *, is_cluster: bool = False
) -> AsyncIterator[Servers]:
    """A broker of one's own, or three, and proxies before it and before Postgres."""
    async with AsyncExitStack() as stack:
        server: KafkaServer | RabbitServer
        cluster = stack.enter_context(KafkaCluster()) if is_cluster else None
        if cluster is not None:
            server = cluster.brokers[0]
        else:
            server = stack.enter_context(KafkaServer() if broker_name == "kafka" else RabbitServer())
        if isinstance(server, KafkaServer):
            broker_proxy = TcpProxy("127.0.0.1", server.proxied_port, port=server.advertised_port)
        else:
            broker_proxy = TcpProxy("127.0.0.1", server.port)
        postgres_proxy = await stack.enter_async_context(TcpProxy("127.0.0.1", postgres.port))
        await stack.enter_async_context(broker_proxy)
        yield Servers(broker_name, postgres, server, postgres_proxy, broker_proxy, cluster)


def at_port(url: str, port: int) -> str:
    """The same URL by another port of this machine."""
    parts = urlsplit(url)
    credentials, separator, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{credentials}{separator}127.0.0.1:{port}"))
