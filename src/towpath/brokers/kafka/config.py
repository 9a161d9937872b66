"""The settings of one Kafka connection: URL and options, checked before anything is connected."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.security import (
    TLS_OPTIONS,
    BrokerUrl,
    parse_broker_url,
    refuse_plaintext_password,
    tls_context,
)
from towpath.errors import ConfigurationError

DEFAULT_PORT: Final = 9092

_CLIENT_OPTIONS: Final = frozenset(
    {
        "client_id",
        "connections_max_idle_ms",
        "metadata_max_age_ms",
        "request_timeout_ms",
        "retry_backoff_ms",
        "sasl_kerberos_domain_name",
        "sasl_kerberos_service_name",
        "sasl_mechanism",
        "sasl_oauth_token_provider",
        "sasl_plain_password",
        "sasl_plain_username",
        "security_protocol",
    }
)
_PRODUCER_OPTIONS: Final = frozenset(
    {"compression_type", "enable_idempotence", "linger_ms", "max_batch_size"}
)
_CONSUMER_OPTIONS: Final = frozenset(
    {
        "auto_offset_reset",
        "check_crcs",
        "client_rack",
        "fetch_max_bytes",
        "fetch_max_wait_ms",
        "fetch_min_bytes",
        "group_instance_id",
        "heartbeat_interval_ms",
        "isolation_level",
        "max_partition_fetch_bytes",
        "max_poll_interval_ms",
        "partition_assignment_strategy",
        "rebalance_timeout_ms",
        "session_timeout_ms",
    }
)
_OWN_OPTIONS: Final = frozenset(
    {
        "allow_plaintext",
        "commit_interval_ms",
        "create_topics",
        "max_message_bytes",
        "partitions",
        "replication_factor",
    }
)
_KNOWN: Final = _CLIENT_OPTIONS | _PRODUCER_OPTIONS | _CONSUMER_OPTIONS | _OWN_OPTIONS | TLS_OPTIONS

# Kafka counts the whole record batch against message.max.bytes, by default 1 MiB and 12 bytes.
_DEFAULT_BATCH_LIMIT: Final = 1_048_588
RECORD_OVERHEAD_BYTES: Final = 4096
_TRUE: Final = (True, 1, "true", "1", "yes")
_FALSE: Final = (False, 0, "false", "0", "no")


def _flag(options: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigurationError(f"Kafka option {name} must be true or false, got {value!r}")


def _number(options: Mapping[str, object], name: str, default: int) -> int:
    try:
        return int(str(options.get(name, default)))
    except ValueError:
        value = options[name]
        raise ConfigurationError(f"Kafka option {name} must be a whole number, got {value!r}") from None


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Everything the adapter needs, with the client library's arguments ready."""

    url: BrokerUrl
    client: Mapping[str, object] = field(repr=False)
    producer: Mapping[str, object]
    consumer: Mapping[str, object]
    max_message_bytes: int
    request_timeout_seconds: float
    commit_interval_seconds: float
    rebalance_timeout_seconds: float
    is_starting_at_the_end: bool
    """`auto_offset_reset: latest`: where a group that never read a partition begins."""
    is_creating_topics: bool
    partitions: int
    replication_factor: int

    @classmethod
    def read(cls, url: str, options: Mapping[str, object]) -> "KafkaConfig":
        """Check and combine. Raises ConfigurationError naming the option."""
        for name in options:
            if name not in _KNOWN:
                close = difflib.get_close_matches(name, _KNOWN, n=1)
                hint = f", did you mean {close[0]}?" if close else ""
                raise ConfigurationError(f"unknown Kafka option {name!r}{hint}")
        parsed = parse_broker_url(url)
        session = _number(options, "session_timeout_ms", 30_000)
        rebalance = _number(options, "rebalance_timeout_ms", max(60_000, session))
        if rebalance < session:
            raise ConfigurationError("Kafka option rebalance_timeout_ms must not be below session_timeout_ms")
        max_message = _number(options, "max_message_bytes", _DEFAULT_BATCH_LIMIT - RECORD_OVERHEAD_BYTES)
        request = _number(options, "request_timeout_ms", 10_000)
        client = _client(parsed, options)
        client["request_timeout_ms"] = request
        return cls(
            url=parsed,
            client=client,
            producer={
                **_chosen(options, _PRODUCER_OPTIONS),
                "acks": "all",
                "enable_idempotence": _flag(options, "enable_idempotence", default=True),
                "max_batch_size": _number(options, "max_batch_size", min(524_288, max_message)),
            },
            consumer={
                # Progress is judged by the engine's handler timeouts and by the watchdog, not here.
                "max_poll_interval_ms": 86_400_000,
                "heartbeat_interval_ms": 3_000,
                **_chosen(options, _CONSUMER_OPTIONS),
                "session_timeout_ms": session,
                "rebalance_timeout_ms": rebalance,
                "enable_auto_commit": False,
                # Where to begin is decided by `Placing`, never silently by the client.
                "auto_offset_reset": "none",
                # A join is answered when every member has rejoined. `ConsumerSession` resets the
                # connections of a broker that does not answer at all much earlier.
                "request_timeout_ms": max(request, rebalance + 5_000),
            },
            max_message_bytes=max_message,
            request_timeout_seconds=request / 1000,
            commit_interval_seconds=_number(options, "commit_interval_ms", 500) / 1000,
            rebalance_timeout_seconds=rebalance / 1000,
            is_starting_at_the_end=_starts_at_the_end(options),
            is_creating_topics=_flag(options, "create_topics", default=False),
            partitions=_number(options, "partitions", 6),
            replication_factor=_number(options, "replication_factor", -1),
        )


def _starts_at_the_end(options: Mapping[str, object]) -> bool:
    value = options.get("auto_offset_reset", "earliest")
    if value not in ("earliest", "latest"):
        raise ConfigurationError(f"Kafka option auto_offset_reset is earliest or latest, not {value!r}")
    return value == "latest"


def _chosen(options: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: _typed(options, name) for name in names if name in options}


def _typed(options: Mapping[str, object], name: str) -> object:
    """As the client wants it: what comes from a variable of its own is text."""
    if name.endswith(("_ms", "_bytes", "_size")):
        return _number(options, name, 0)
    return _flag(options, name, default=True) if name == "check_crcs" else options[name]


def _client(url: BrokerUrl, options: Mapping[str, object]) -> dict[str, object]:
    arguments = _chosen(options, _CLIENT_OPTIONS)
    arguments["bootstrap_servers"] = ",".join(
        f"[{host}]:{port or DEFAULT_PORT}" if ":" in host else f"{host}:{port or DEFAULT_PORT}"
        for host, port in url.hosts
    )
    arguments.setdefault("client_id", "towpath")
    if url.username is not None:
        arguments.setdefault("sasl_plain_username", url.username)
        arguments.setdefault("sasl_plain_password", url.password or "")
    has_password = "sasl_plain_password" in arguments
    uses_sasl = has_password or "sasl_mechanism" in arguments
    uses_tls = url.scheme == "kafka+ssl" or "SSL" in str(options.get("security_protocol", "")).split("_")
    if not uses_tls and any(name in options for name in TLS_OPTIONS):
        raise ConfigurationError("TLS options are given for a kafka:// URL: use kafka+ssl://")
    arguments["security_protocol"] = ("SASL_" if uses_sasl else "") + ("SSL" if uses_tls else "PLAINTEXT")
    if uses_sasl:
        arguments.setdefault("sasl_mechanism", "PLAIN")
    if uses_tls:
        arguments["ssl_context"] = tls_context(options)
    elif has_password or arguments.get("sasl_oauth_token_provider") is not None:
        refuse_plaintext_password(url.hosts, allow_plaintext=_flag(options, "allow_plaintext", default=False))
    return arguments
