"""Settings of the deployables and the CLI, from environment variables `TOWPATH_…`.

Nested ones are joined by two underscores: `TOWPATH_RELAY__POLL_MAX=100ms`. Durations are text such
as "250ms", "30s", "5m"; sizes are bytes or text such as "8MB", "64MiB". A key that no setting has
is refused, because a typo would otherwise be a silent default.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic import model_validator as validates_model
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as SourceError

from towpath.backoff import parse_duration
from towpath.errors import SettingsError

PREFIX: Final = "TOWPATH_"
_FOREIGN: Final = ("TOWPATH_TEST_", "TOWPATH_CRASH_")
"""Read by the test tooling, not by the deployables."""
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
_DATABASE_EXAMPLE: Final = "postgresql://user:password@host:5432/database"
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_SIZE: Final = re.compile(r"(\d{1,15})\s*([a-z]*)", re.IGNORECASE)


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


Duration: TypeAlias = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_positive)]
Size: TypeAlias = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
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
        if parts.scheme not in schemes or not all(_HOST.fullmatch(host) for host in hosts):
            raise ValueError(
                f"is not a URL such as {example} (in a password, percent-encode special characters)"
            )
        return secret

    return AfterValidator(check)


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name) or name.startswith("pg_"):
        raise ValueError("is not a plain lower-case identifier such as 'towpath'")
    return name


WakeupMode: TypeAlias = Literal["auto", "poll", "notify"]
SchemaName: TypeAlias = Annotated[str, AfterValidator(_identifier)]
DatabaseUrl: TypeAlias = Annotated[
    SecretStr,
    _url(
        ("postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg"),
        _DATABASE_EXAMPLE,
    ),
]
BrokerUrl: TypeAlias = Annotated[
    SecretStr,
    _url(
        ("kafka", "kafka+ssl", "amqp", "amqps", "memory"),
        "kafka://host:9092 or amqp://user:password@host:5672/",
    ),
]


def _ordered(low: tuple[str, timedelta], high: tuple[str, timedelta]) -> None:
    if low[1] > high[1]:
        raise ValueError(f"{low[0]} is longer than {high[0]}")


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )


class RelaySettings(_Section):
    """How the relay polls, publishes and holds its shards."""

    poll_min: Duration = timedelta(milliseconds=5)
    """Poll interval while rows come."""
    poll_max: Duration = timedelta(milliseconds=250)
    """Poll interval when idle, unless the relay is notified."""
    wakeup: WakeupMode = "auto"
    """How an idle relay hears of rows: `poll`, `notify` (by LISTEN, else it is not ready), or what works."""
    window_rows: Count = 2000
    """Most rows read and published at once."""
    window_bytes: Size = 8_000_000
    """Most payload bytes read and published at once."""
    lease: Duration = timedelta(seconds=30)
    """Time after which another relay may own a shard."""
    renew_every: Duration = timedelta(seconds=5)
    """Interval of lease renewals."""
    publish_deadline: Duration = timedelta(seconds=15)
    """Time after which a publish is given up."""
    margin: Duration = timedelta(seconds=1)
    """Safety between a publish deadline and a lease end."""
    publish_attempts: Count = 3
    """Tries of a message that the broker refuses."""
    broker_number: Annotated[int, Field(ge=0, le=63)] = 0
    """Which broker `TOWPATH_BROKER_URL` is, by its number in `towpath broker list`."""
    environment: str = ""
    """Name of where this database is published from, instead of its address; a copy has another."""
    canaries: bool = True
    """Whether a small message per shard and minute proves delivery, to `towpath.canary`."""
    retention: Duration = timedelta(hours=6)
    """Time that sent rows stay in the outbox at least."""
    health_host: str = "127.0.0.1"
    """Address of the health endpoint."""
    health_port: Port = 0
    """Port of the health endpoint; 0 is none."""

    @validates_model(mode="after")
    def _fits(self) -> "RelaySettings":
        _ordered(("poll_min", self.poll_min), ("poll_max", self.poll_max))
        if self.publish_deadline + self.margin + self.renew_every > self.lease:
            raise ValueError("publish_deadline + margin + renew_every must fit into lease")
        return self


class WorkerSettings(_Section):
    """How a consumer process takes in, runs and gives back work."""

    concurrency: Count = 64
    """Handlers running at once; a quarter more for what starts from the database."""
    sessions: Count = 20
    """Transactional handlers running at once: each keeps a database session."""
    max_in_flight: Count = 1000
    """Messages received and not yet acknowledged."""
    max_in_flight_bytes: Size = 64 * 2**20
    """Their bytes."""
    lease: Duration = timedelta(seconds=30)
    """Time after which a silent worker counts as dead."""
    beat_every: Duration = timedelta(seconds=5)
    """Interval of heartbeats."""
    claim_batch: Count = 500
    """Most messages claimed by one statement."""
    due_poll_min: Duration = timedelta(milliseconds=50)
    """Due poll interval while rows come."""
    due_poll_max: Duration = timedelta(seconds=1)
    """Due poll interval when idle."""
    reap_every: Duration = timedelta(seconds=5)
    """Interval of looking for dead workers' tasks."""
    ack_after: Duration = timedelta(minutes=5)
    """Age at which running work is acknowledged and kept by the database; a third of RabbitMQ's timeout."""
    lost_after: Duration = timedelta(hours=1)
    """Age at which a submitted task whose message was published but never came starts from its row."""
    max_parked_per_key: Count = 10_000
    """Followers of a waiting message kept in the database for one key; later ones hold up their partition."""
    max_deliveries: Count = 5
    """Claims without an outcome before a message is dead."""
    quiet: Duration = timedelta(seconds=30)
    """Longest time that the last of these claims waits for running work, and keeps other work waiting."""
    drain_timeout: Duration = timedelta(seconds=25)
    """Time for running work at shutdown."""
    health_host: str = "127.0.0.1"
    """Address of the health endpoint."""
    health_port: Port = 0
    """Port of the health endpoint; 0 is none."""

    @validates_model(mode="after")
    def _fits(self) -> "WorkerSettings":
        _ordered(("due_poll_min", self.due_poll_min), ("due_poll_max", self.due_poll_max))
        if self.beat_every * 2 > self.lease:
            raise ValueError("lease must be at least twice beat_every")
        return self

    @property
    def due_concurrency(self) -> int:
        """Handlers running at once from the database, beside those of the broker's messages."""
        return max(1, self.concurrency // 4)


class TelemetrySettings(_Section):
    """What OpenTelemetry's own `OTEL_*` variables do not cover."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level logged."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or text for people."""
    traces_file: Path | None = None
    """Where OTEL_TRACES_EXPORTER=file writes spans."""


class Settings(BaseSettings):
    """Everything the deployables and the CLI read. Make it with `load`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    database_url: DatabaseUrl
    """The Postgres that holds outbox and tasks."""
    schema_name: SchemaName = "towpath"
    """Schema of its tables."""
    broker_url: BrokerUrl = SecretStr("kafka://127.0.0.1:9092")
    """The broker; the scheme picks the adapter."""
    broker_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """JSON object of options passed on to the broker's client library."""
    max_payload_bytes: Size = 2**20
    """Largest payload that may be emitted."""
    relay: RelaySettings = RelaySettings()
    worker: WorkerSettings = WorkerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()


def load(**values: Any) -> Settings:
    """The settings from the environment; `values` win over it.

    Raises SettingsError in one line that names every wrong variable; it never shows a secret.
    """
    unknown = list(_unknown(os.environ))
    if unknown:
        raise SettingsError("; ".join(unknown))
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explained(error))) from None
    except SourceError as error:
        name = re.search(r'field "(\w+)"', str(error))
        variable = PREFIX + name[1].upper() if name else "a variable"
        raise SettingsError(f"{variable} is not valid JSON") from None


def load_schema_name() -> str:
    """The schema's name alone, for what needs no database. Raises SettingsError."""
    return load(database_url="postgresql://unused").schema_name


def load_worker() -> WorkerSettings:
    """The worker's settings alone, for what needs no database. Raises SettingsError."""
    return load(database_url="postgresql://unused").worker


def variables(model: type[BaseModel] = Settings, prefix: str = PREFIX) -> Iterator[str]:
    """The environment variables that are read, in the order of their declaration."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from variables(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def _unknown(environment: Iterable[str]) -> Iterator[str]:
    known = list(variables())
    sections = {name.partition("__")[0] for name in known if "__" in name}
    for given in sorted(environment):
        name = given.upper()
        if not name.startswith(PREFIX) or name.startswith(_FOREIGN) or name in known or name in sections:
            continue
        if name.startswith(f"{PREFIX}BROKER_OPTIONS__"):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f", did you mean {close[0]}?" if close else ", see towpath config show for those that are"
        yield f"{given} is not a setting{hint}"


def _explained(error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        name = PREFIX + "__".join(str(part).upper() for part in detail["loc"])
        if detail["type"] == "missing":
            yield f"{name} is not set, export for example {name}={_DATABASE_EXAMPLE}"
        else:
            yield f"{name} {detail['msg'].removeprefix('Value error, ')}"
