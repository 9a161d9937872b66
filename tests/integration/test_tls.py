"""TLS to Postgres, Kafka and RabbitMQ: verified by default, and a failure that names the fix."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.fixtures.fix_cli import Run
from towpath import transport
from towpath.brokers.factory import broker_from_url
from towpath.errors import ConfigurationError, TowpathError
from towpath.store import migrate
from towpath.store.database import Database
from towpath.testing.proxy import TcpProxy
from towpath.testing.services import KafkaServer, PostgresServer
from towpath.testing.services.postgres import distribution_programs

FILES = Path(__file__).parents[1] / "fixtures" / "tls"
AUTHORITY = FILES / "authority.pem"
CLIENT, CLIENT_KEY = FILES / "client.pem", FILES / "client.key"


@pytest.fixture(scope="module")
def tls_postgres() -> Iterator[str]:
    """The URL of a server with a certificate for localhost and 127.0.0.1; the embedded one knows no TLS."""

    def with_files(server: PostgresServer) -> None:
        server.run("initdb", "-D", server.data_directory, "-U", "postgres", "-E", "UTF8", "--no-sync")
        for name in ("server.pem", "server.key", "client.pem"):
            shutil.copy(FILES / name, server.data_directory / name)
            (server.data_directory / name).chmod(0o600)

    settings = {
        "ssl": "on",
        "ssl_cert_file": "server.pem",
        "ssl_key_file": "server.key",
        "ssl_ca_file": "client.pem",
    }
    with PostgresServer(settings=settings, programs=distribution_programs(), fill=with_files) as server:
        yield server.url()


@pytest.fixture
def is_far(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The server of the tests counts as being on another machine."""
    monkeypatch.setattr(transport, "is_loopback", lambda _: False)
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


async def test_every_way_to_postgres_verifies_by_the_systems_authorities(
    tls_postgres: str, is_far: pytest.MonkeyPatch
) -> None:
    """X4: asyncpg's pool, SQLAlchemy over asyncpg and over psycopg, and migrations."""
    is_far.setenv("SSL_CERT_FILE", str(AUTHORITY))
    await every_way_answers(tls_postgres, "select ssl from pg_stat_ssl where pid = pg_backend_pid()")


async def test_every_way_to_postgres_presents_the_certificate_of_the_url(
    tls_postgres: str, is_far: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X4"""
    shutil.copy(CLIENT_KEY, tmp_path)
    (tmp_path / CLIENT_KEY.name).chmod(0o600)
    files = f"sslcert={CLIENT}&sslkey={tmp_path / CLIENT_KEY.name}&sslrootcert={AUTHORITY}"
    presented = "select client_dn = '/CN=towpath client' from pg_stat_ssl where pid = pg_backend_pid()"
    await every_way_answers(f"{tls_postgres}?{files}", presented)


async def every_way_answers(url: str, question: str) -> None:
    """With yes."""
    database = Database(url, session_count=1)
    await database.start()
    try:
        assert await database.pool.fetchval(question)
        async with database.engine.connect() as connection:
            assert await connection.scalar(sa.text(question))

        def through_psycopg() -> object:
            with database.sync_engine.connect() as plain:
                return plain.scalar(sa.text(question))

        assert await asyncio.to_thread(through_psycopg)
        assert await asyncio.to_thread(migrate.current, url) is None
    finally:
        await database.aclose()


def test_a_certificate_of_an_unknown_authority_is_refused_and_the_fix_is_named(
    tls_postgres: str, towpath: Run, is_far: pytest.MonkeyPatch
) -> None:
    """X4, O2."""
    is_far.setenv("TOWPATH_DATABASE_URL", tls_postgres)
    for command in (("tasks", "list"), ("db", "current")):
        ran = towpath(*command)
        assert ran.code == 4
        assert "certificate is not trusted: append &sslrootcert=FILE" in ran.err

    is_far.setenv("TOWPATH_DATABASE_URL", f"{tls_postgres}?sslrootcert={AUTHORITY}")
    assert towpath("db", "current").out == "not installed, newest is 0001\n"


def test_a_server_without_tls_is_refused_unless_the_url_allows_it(
    migrated_url: str, towpath: Run, is_far: pytest.MonkeyPatch
) -> None:
    """X4, O2."""
    ran = towpath("tasks", "list")
    assert ran.code == 4
    assert "append ?sslmode=disable to TOWPATH_DATABASE_URL where the network between is trusted" in ran.err

    is_far.setenv("TOWPATH_DATABASE_URL", f"{migrated_url}?sslmode=disable")
    assert towpath("tasks", "list").code == 0


@pytest.fixture
def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    return context


@pytest.fixture
async def amqps_url(rabbit_url: str, server_context: ssl.SSLContext) -> AsyncIterator[str]:
    host, _, port = rabbit_url.rpartition("@")[2].rstrip("/").partition(":")
    async with TcpProxy(host, int(port), tls=server_context) as proxy:
        yield f"amqps://guest:guest@localhost:{proxy.port}/"


@pytest.fixture
async def kafka_ssl_url(kafka_server: KafkaServer, server_context: ssl.SSLContext) -> AsyncIterator[str]:
    ports = kafka_server.proxied_port, kafka_server.advertised_port
    async with TcpProxy("127.0.0.1", ports[0], port=ports[1], tls=server_context) as proxy:
        yield f"kafka+ssl://localhost:{proxy.port}"


async def test_rabbitmq_is_verified(amqps_url: str) -> None:
    """X4"""
    await broker_is_verified(amqps_url)


async def test_kafka_is_verified(kafka_ssl_url: str) -> None:
    """X4"""
    await broker_is_verified(kafka_ssl_url)


async def broker_is_verified(url: str) -> None:
    admin = broker_from_url(url, {"ssl_cafile": str(AUTHORITY)}).admin()
    try:
        assert len(await admin.check(["never-made"], [])) == 1
    finally:
        await admin.aclose()
    admin = broker_from_url(url).admin()
    try:
        with pytest.raises(ConfigurationError, match="certificate verify failed"):
            await admin.check(["never-made"], [])
    finally:
        await admin.aclose()


async def test_a_certificate_is_presented_to_brokers_that_ask_for_one(
    amqps_url: str, kafka_ssl_url: str, server_context: ssl.SSLContext
) -> None:
    """X4"""
    server_context.load_verify_locations(CLIENT)
    server_context.verify_mode = ssl.CERT_REQUIRED
    options = {"ssl_cafile": str(AUTHORITY), "ssl_certfile": str(CLIENT), "ssl_keyfile": str(CLIENT_KEY)}
    for url in (amqps_url, kafka_ssl_url):
        admin = broker_from_url(url, options).admin()
        try:
            assert len(await admin.check(["never-made"], [])) == 1
        finally:
            await admin.aclose()
        admin = broker_from_url(url, {"ssl_cafile": str(AUTHORITY)}).admin()
        try:
            with pytest.raises(TowpathError):
                await admin.check(["never-made"], [])
        finally:
            await admin.aclose()
