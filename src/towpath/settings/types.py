"""The kinds of values that settings have: durations, sizes, URLs, names, and what is secret."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    Secret,
    SecretStr,
    WithJsonSchema,
)

from towpath.backoff import duration_text, parse_duration
from towpath.errors import ConfigurationError
from towpath.transport import postgres_url_with_tls

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
DATABASE_EXAMPLE: Final = "postgresql://user:password@host:5432/database"
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Bytes from an integer or text such as "65536", "8MB", "64MiB". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"cannot read {value!r} as a size: write for example '65536', '8MB', '64MiB'")
    return int(match[1]) * _UNITS[match[2].lower()]


def _positive(value: timedelta) -> timedelta:
    if not value:
        raise ValueError("must be longer than zero")
    return value


Duration: TypeAlias = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    AfterValidator(_positive),
    PlainSerializer(duration_text, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h|d))+$"}),
]
Size: TypeAlias = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\d+ *([kKmMgG][iI]?[bB]|[bB])?$"},
            ]
        }
    ),
]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]


def _url(schemes: tuple[str, ...], example: str) -> AfterValidator:
    def check(secret: SecretStr) -> SecretStr:
        # Never show the value: it holds a password, and a malformed one could show it anywhere.
        try:
            parts = urlsplit(secret.get_secret_value())
        except ValueError:
            parts = urlsplit("")
        hosts = parts.netloc.rpartition("@")[2].split(",")
        # Where more follows than there can be, a name or password has a character that ends the host's part.
        is_broken = parts.fragment or "@" in parts.path or "@" in parts.query.partition("=")[0]
        if parts.scheme not in schemes or is_broken or not all(map(_is_host, hosts)):
            raise ValueError(
                f"is not a URL such as {example} (in a password, percent-encode special characters)"
            )
        return secret

    return AfterValidator(check)


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match[1] or 0) <= 65535


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name) or name.startswith("pg_"):
        raise ValueError("is not a plain lower-case identifier such as 'towpath'")
    return name


WakeupMode: TypeAlias = Literal["auto", "poll", "notify"]
SchemaName: TypeAlias = Annotated[str, AfterValidator(_identifier)]


def _never_in_the_clear(secret: SecretStr) -> SecretStr:
    try:
        postgres_url_with_tls(secret.get_secret_value())
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    return secret


DatabaseUrl: TypeAlias = Annotated[
    SecretStr,
    _url(("postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg"), DATABASE_EXAMPLE),
    AfterValidator(_never_in_the_clear),
]
BrokerUrl: TypeAlias = Annotated[
    SecretStr,
    _url(
        ("kafka", "kafka+ssl", "amqp", "amqps", "memory"),
        "kafka://host:9092 or amqp://user:password@host:5672/",
    ),
]


HARMLESS_OPTIONS: Final = frozenset(
    {"security_protocol", "sasl_mechanism", "compression_type", "acks", "client_id"}
)
"""Broker options whose text may be shown; whatever else has text may be a secret."""


def _hidden(options: dict[str, Any]) -> dict[str, Any]:
    """The options with everything that may be a secret wrapped."""
    return {
        name: value
        if isinstance(value, bool | int | float | None)
        or (isinstance(value, str) and name in HARMLESS_OPTIONS)
        else Secret[Any](value)
        for name, value in options.items()
    }


def revealed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a client library takes them."""
    return {
        name: value.get_secret_value() if isinstance(value, Secret) else value
        for name, value in options.items()
    }


BrokerOptions: TypeAlias = Annotated[dict[str, Any], AfterValidator(_hidden)]
