"""What can be set, with defaults. Made by `towpath.settings.load`, which see."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic import model_validator as validates_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from towpath.settings.file import values_of_file
from towpath.settings.types import (
    BrokerOptions,
    BrokerUrl,
    Count,
    DatabaseUrl,
    Duration,
    Port,
    SchemaName,
    Size,
    WakeupMode,
)

PREFIX: Final = "TOWPATH_"
FILE_VARIABLE: Final = "TOWPATH_CONFIG_FILE"


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
    """Age at which a message is lost, if no member listening so long got it: a task starts from its row."""
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
    broker_options: BrokerOptions = Field(default_factory=dict)
    """JSON object of options passed on to the broker's client library."""
    max_payload_bytes: Size = 2**20
    """Largest payload that may be emitted."""
    relay: RelaySettings = RelaySettings()
    worker: WorkerSettings = WorkerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What wins comes first."""
        file = values_of_file(os.environ.get(FILE_VARIABLE), FILE_VARIABLE)
        return init_settings, env_settings, InitSettingsSource(settings_cls, file)
