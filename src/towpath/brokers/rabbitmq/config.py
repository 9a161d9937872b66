"""The settings of one RabbitMQ connection: URL and options, checked before anything is connected."""

import difflib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.security import TLS_OPTIONS, parse_broker_url, refuse_plaintext_password, tls_context
from towpath.errors import ConfigurationError

_OWN_OPTIONS: Final = frozenset(
    {
        "allow_plaintext",
        "connect_timeout_ms",
        "connection_name",
        "heartbeat_seconds",
        "max_message_bytes",
        "publish_concurrency",
        "queues_per_group",
    }
)
_KNOWN: Final = _OWN_OPTIONS | TLS_OPTIONS
_DEFAULT_MAX_MESSAGE_BYTES: Final = 16_777_216  # RabbitMQ 4's default max_message_size
_TRUE: Final = (True, 1, "true", "1", "yes")


def _number(options: Mapping[str, object], name: str, default: int, *, least: int = 1) -> int:
    try:
        number = int(str(options.get(name, default)))
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigurationError(
            f"RabbitMQ option {name} must be a whole number from {least} on, got {options[name]!r}"
        )
    return number


@dataclass(frozen=True, slots=True)
class RabbitConfig:
    """Everything the adapter needs."""

    url: str = field(repr=False)
    labels: Mapping[str, str | int]
    heartbeat_seconds: int
    connection_name: str
    ssl_context: ssl.SSLContext | None
    connect_timeout_seconds: float
    max_message_bytes: int
    publish_concurrency: int
    queues_per_group: int

    @classmethod
    def read(cls, url: str, options: Mapping[str, object]) -> "RabbitConfig":
        """Check and combine. Raises ConfigurationError naming the option."""
        for name in options:
            if name not in _KNOWN:
                close = difflib.get_close_matches(name, _KNOWN, n=1)
                hint = f", did you mean {close[0]}?" if close else ""
                raise ConfigurationError(f"unknown RabbitMQ option {name!r}{hint}")
        parsed = parse_broker_url(url)
        is_secure = parsed.scheme == "amqps"
        if len(parsed.hosts) > 1:
            raise ConfigurationError("a RabbitMQ URL names one host: put a load balancer before a cluster")
        if parsed.password is not None and not is_secure:
            is_allowed = options.get("allow_plaintext") in _TRUE
            refuse_plaintext_password(parsed.hosts, allow_plaintext=is_allowed)
        if not is_secure and any(name in options for name in TLS_OPTIONS):
            raise ConfigurationError("TLS options are given for an amqp:// URL: use amqps://")
        return cls(
            url=url,
            labels=parsed.labels("rabbitmq", 5671 if is_secure else 5672),
            heartbeat_seconds=_number(options, "heartbeat_seconds", 10),
            connection_name=str(options.get("connection_name", "towpath")),
            ssl_context=tls_context(options) if is_secure else None,
            connect_timeout_seconds=_number(options, "connect_timeout_ms", 10_000) / 1000,
            max_message_bytes=_number(options, "max_message_bytes", _DEFAULT_MAX_MESSAGE_BYTES),
            publish_concurrency=_number(options, "publish_concurrency", 2000),
            queues_per_group=_number(options, "queues_per_group", 1),
        )
