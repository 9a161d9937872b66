"""What a broker URL says, TLS contexts, and the rule that a password does not travel in the clear."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from towpath.errors import ConfigurationError
from towpath.transport import is_loopback, refuse_plaintext

TLS_OPTIONS: Final = frozenset(
    {"ssl_context", "ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_verify"}
)


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """The parts of a broker URL; several hosts for Kafka."""

    scheme: str
    hosts: tuple[tuple[str, int | None], ...]
    username: str | None
    password: str | None
    path: str

    def labels(self, system: str, default_port: int) -> Mapping[str, str | int]:
        """What telemetry says of the broker: its system, and the address of a single server."""
        if len(self.hosts) != 1:
            return {"system": system}
        ((host, port),) = self.hosts
        return {"system": system, "server_address": host, "server_port": port or default_port}

    def __repr__(self) -> str:
        hosts = ",".join(host if port is None else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}://{hosts}{self.path}"


def parse_broker_url(url: str) -> BrokerUrl:
    """Split `scheme://user:password@host:port,host:port/path`.

    Raises ConfigurationError, without the URL's password in the text.
    """
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, addresses = authority.rpartition("@")
    if not separator or not addresses:
        raise ConfigurationError(
            "a broker URL looks like kafka://host:9092, amqp://user:password@host/ or memory://name"
        )
    username, colon, password = credentials.partition(":")
    hosts: list[tuple[str, int | None]] = []
    for address in addresses.split(","):
        try:
            parts = urlsplit(f"//{address.strip()}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host:
            raise ConfigurationError("cannot read an address in the broker URL as host:port")
        hosts.append((host, port))
    return BrokerUrl(
        scheme=scheme.lower(),
        hosts=tuple(hosts),
        username=unquote(username) if at else None,
        password=unquote(password) if at and colon else None,
        path=slash + path,
    )


def refuse_plaintext_password(hosts: tuple[tuple[str, int | None], ...], *, allow_plaintext: bool) -> None:
    """Raise SettingsError where a password would cross a network without TLS."""
    if not allow_plaintext:
        fix = "use kafka+ssl:// or amqps://, or set the broker option allow_plaintext: true"
        refuse_plaintext([host for host, _ in hosts], "a password", fix)


def is_plaintext(url: str) -> bool:
    """Whether anything would cross a network without TLS."""
    parsed = parse_broker_url(url)
    is_secure = parsed.scheme in ("kafka+ssl", "amqps", "memory")
    return not is_secure and not all(is_loopback(host) for host, _ in parsed.hosts)


def is_unverified(options: Mapping[str, object]) -> bool:
    """Whether the options end the verification of certificates."""
    return options.get("ssl_verify", True) in (False, "false", "0", 0)


def tls_context(options: Mapping[str, object]) -> ssl.SSLContext:
    """The context that the options describe: verifying unless `ssl_verify` is false.

    Raises ConfigurationError where a file cannot be read.
    """
    given = options.get("ssl_context")
    if isinstance(given, ssl.SSLContext):
        return given
    names = {
        name: options.get(name) for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password")
    }
    texts = {name: None if value is None else str(value) for name, value in names.items()}
    try:
        context = ssl.create_default_context(cafile=texts["ssl_cafile"])
        if texts["ssl_certfile"] is not None:
            context.load_cert_chain(texts["ssl_certfile"], texts["ssl_keyfile"], texts["ssl_password"])
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"cannot load the broker's TLS files: {error}") from error
    if is_unverified(options):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
