"""Settings from the environment: everything wrong is named in one line, nothing secret is shown."""

import json
import re
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tests.docs.pages import blocks
from towpath import settings
from towpath.brokers.kafka import config as kafka
from towpath.brokers.rabbitmq import config as rabbitmq
from towpath.cli.settings_reference import TABLES
from towpath.errors import SettingsError
from towpath.settings.types import revealed
from towpath.telemetry.reference import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

URL = "postgresql://app:s3cr3t-canary@db.internal:5432/orders"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import os

    for name in list(os.environ):
        if name.upper().startswith(("TOWPATH_", "PGSSL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOWPATH_DATABASE_URL", URL)
    return monkeypatch


def refusal() -> str:
    with pytest.raises(SettingsError) as caught:
        settings.load()
    message = str(caught.value)
    assert "\n" not in message
    assert "s3cr3t" not in message
    return message


def test_a_database_url_is_enough() -> None:
    loaded = settings.load()

    assert loaded.database_url.get_secret_value() == URL
    assert loaded.schema_name == "towpath"
    assert loaded.relay.publish_deadline == timedelta(seconds=15)


def test_durations_and_sizes_are_written_for_people(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TOWPATH_RELAY__POLL_MAX", "1m30s")
    environment.setenv("TOWPATH_RELAY__WINDOW_BYTES", "8MB")
    environment.setenv("TOWPATH_WORKER__MAX_IN_FLIGHT_BYTES", "64MiB")

    loaded = settings.load()

    assert loaded.relay.poll_max == timedelta(seconds=90)
    assert loaded.relay.window_bytes == 8_000_000
    assert loaded.worker.max_in_flight_bytes == 67_108_864


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("TOWPATH_DATABSE_URL", "did you mean TOWPATH_DATABASE_URL?"),
        ("TOWPATH_RELAY__POL_MAX", "did you mean TOWPATH_RELAY__POLL_MAX?"),
        ("TOWPATH_RELAY_POLL_MAX", "did you mean TOWPATH_RELAY__POLL_MAX?"),
        ("towpath_worker__concurency", "did you mean TOWPATH_WORKER__CONCURRENCY?"),
        ("TOWPATH_ZZZZZZZZZZZZZZZZ", "see towpath config show"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(
    environment: pytest.MonkeyPatch, name: str, suggestion: str
) -> None:
    """O2"""
    environment.setenv(name, "s3cr3t")

    message = refusal()

    assert name in message
    assert suggestion in message


@pytest.mark.parametrize("name", ["TOWPATH_TEST_POSTGRES", "TOWPATH_TEST_SCALE", "TOWPATH_CRASH_AT"])
def test_the_variables_of_the_test_tooling_are_left_alone(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(name, "x")

    settings.load()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TOWPATH_RELAY__LEASE", "30", "cannot read '30' as a duration"),
        ("TOWPATH_RELAY__LEASE", "0s", "must be longer than zero"),
        ("TOWPATH_RELAY__LEASE", "9" * 400 + "d", "TOWPATH_RELAY__LEASE"),
        ("TOWPATH_RELAY__WINDOW_BYTES", "8 potatoes", "cannot read '8 potatoes' as a size"),
        ("TOWPATH_WORKER__CONCURRENCY", "0", "TOWPATH_WORKER__CONCURRENCY"),
        ("TOWPATH_WORKER__CONCURRENCY", "many", "TOWPATH_WORKER__CONCURRENCY"),
        ("TOWPATH_WORKER__HEALTH_PORT", "65536", "TOWPATH_WORKER__HEALTH_PORT"),
        ("TOWPATH_SCHEMA_NAME", 'a"; drop schema towpath', "TOWPATH_SCHEMA_NAME is not a plain"),
        ("TOWPATH_SCHEMA_NAME", "pg_catalog", "TOWPATH_SCHEMA_NAME is not a plain"),
        ("TOWPATH_BROKER_OPTIONS", "{s3cr3t", "TOWPATH_BROKER_OPTIONS is not valid JSON"),
        ("TOWPATH_BROKER_OPTIONS", '["s3cr3t"]', "TOWPATH_BROKER_OPTIONS"),
        ("TOWPATH_WORKER", '{"concurency": "s3cr3t"}', "TOWPATH_WORKER__CONCURENCY"),
        ("TOWPATH_RELAY__POLL_MAX", "1ms", "poll_min is longer than poll_max"),
        ("TOWPATH_RELAY__PUBLISH_DEADLINE", "29s", "must fit into lease"),
        ("TOWPATH_WORKER__BEAT_EVERY", "29s", "twice beat_every"),
    ],
)
def test_a_bad_value_is_named_in_one_line(
    environment: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    """O2"""
    environment.setenv(name, value)

    assert expected in refusal()


def test_a_missing_database_url_says_how_to_set_it(environment: pytest.MonkeyPatch) -> None:
    """O2"""
    environment.delenv("TOWPATH_DATABASE_URL")

    assert refusal().startswith("TOWPATH_DATABASE_URL is not set, export for example")


@pytest.mark.parametrize("variable", ["TOWPATH_DATABASE_URL", "TOWPATH_BROKER_URL"])
@pytest.mark.parametrize(
    "value",
    [
        "",
        "s3cr3t",
        "mysql://app:s3cr3t@db/orders",
        "postgresql://app:s3c/r3t@db/orders-s3cr3t",
        "postgresql://app:s3cr3t@db:port/orders",
        "postgresql://[s3cr3t/orders",
        "postgresql://app:12/s3cr3t@db/orders",
        "postgresql://app:12#s3cr3t@db/orders",
        "postgresql://app:12?s3cr3t@db/orders",
        "postgresql://app:s3cr3t@db/orders#s3cr3t@x",
        "postgresql://app:s3cr3t@db/orders#s3cr3t",
        "postgresql://app:s3cr3t@db:65536/orders",
        "kafka://a:9092,b:s3cr3t",
        "amqp://",
    ],
)
def test_a_malformed_url_is_refused_without_showing_it(
    environment: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """X3"""
    environment.setenv(variable, value)

    assert refusal().startswith(f"{variable} is not a URL such as ")


@pytest.mark.parametrize(
    "value", ["kafka://a:9092,b:9092", "kafka+ssl://broker", "amqps://u:p%2Fq@[::1]:5671/", "memory://tests"]
)
def test_every_kind_of_broker_url_is_accepted(environment: pytest.MonkeyPatch, value: str) -> None:
    environment.setenv("TOWPATH_BROKER_URL", value)

    assert settings.load().broker_url.get_secret_value() == value


def test_secrets_stay_out_of_the_text_of_settings(environment: pytest.MonkeyPatch) -> None:
    """X3"""
    environment.setenv("TOWPATH_BROKER_OPTIONS", json.dumps({"sasl_plain_password": "s3cr3t-canary"}))
    loaded = settings.load()

    assert "s3cr3t" not in repr(loaded) + str(loaded) + repr(loaded.model_dump()) + loaded.model_dump_json()
    assert revealed(loaded.broker_options) == {"sasl_plain_password": "s3cr3t-canary"}


def test_every_setting_has_a_description() -> None:
    for section in (
        settings.Settings,
        settings.RelaySettings,
        settings.WorkerSettings,
        settings.TelemetrySettings,
    ):
        for name, field in section.model_fields.items():
            assert field.description or name in {"relay", "worker", "telemetry"}, name


def test_settings_cannot_be_changed() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        settings.load().relay.lease = timedelta(1)  # type: ignore[misc]


URL_TO = "postgresql://app:s3cr3t-canary@db.internal/orders"


@pytest.mark.parametrize("mode", ["prefer", "allow"])
def test_a_database_url_that_may_fall_back_to_plaintext_is_refused(
    environment: pytest.MonkeyPatch, mode: str
) -> None:
    """X4, O2"""
    environment.setenv("TOWPATH_DATABASE_URL", f"{URL_TO}?sslmode={mode}")

    assert refusal().startswith("TOWPATH_DATABASE_URL may send a password to db.internal without TLS")

    environment.setenv("TOWPATH_DATABASE_URL", URL_TO)
    environment.setenv("PGSSLMODE", mode)
    assert "sslmode=disable where the network between is trusted" in refusal()

    environment.setenv("TOWPATH_DATABASE_URL", f"postgresql://app:x@127.0.0.1/orders?sslmode={mode}")
    settings.load()


@pytest.fixture
def file(environment: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "towpath.toml"
    environment.setenv("TOWPATH_CONFIG_FILE", str(path))
    return path


def test_the_environment_wins_over_the_file_key_by_key(environment: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text('schema_name = "other"\n[relay]\nlease = "1m"\npoll_max = "2s"\n[broker_options]\nx = 1')
    environment.setenv("TOWPATH_RELAY__LEASE", "90s")

    loaded = settings.load()

    assert loaded.schema_name == "other"
    assert (loaded.relay.lease, loaded.relay.poll_max) == (timedelta(seconds=90), timedelta(seconds=2))
    assert loaded.broker_options == {"x": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('databse_url = "s3cr3t"', "databse_url is not a setting, did you mean database_url? (in "),
        ('[relay]\npol_max = "s3cr3t"', "relay.pol_max is not a setting, did you mean relay.poll_max?"),
        ('[rellay]\npoll_max = "s3cr3t"', "did you mean relay.poll_max?"),
        ('TOWPATH_SCHEMA_NAME = "s3cr3t"', "TOWPATH_SCHEMA_NAME is not a setting"),
        ('[relay]\nlease = "30"', "relay.lease in "),
        ("relay = 3", "relay in "),
        ("[worker]\nconcurrency = 0", "worker.concurrency in "),
        ("x = s3cr3t", "it is not TOML: at line 1, column 5"),
        ("\x00", "it is not TOML"),
    ],
)
def test_what_is_wrong_with_the_file_is_named_in_one_line(file: Path, text: str, expected: str) -> None:
    """O2"""
    file.write_text(text)

    message = refusal()

    assert expected in message
    assert str(file) in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(file: Path, content: bytes | None) -> None:
    """O2"""
    if content is not None:
        file.write_bytes(content)

    assert refusal().startswith("cannot read the settings file that TOWPATH_CONFIG_FILE names")


def test_the_schema_accepts_what_is_accepted_and_refuses_what_is_refused() -> None:
    schema = settings.json_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    defaults = settings.load().model_dump(mode="json", exclude={"database_url", "broker_url"})

    assert list(validator.iter_errors(defaults)) == []
    for wrong in (
        {"databse_url": "x"},
        {"relay": {"pol_max": "1s"}},
        {"relay": {"lease": "30"}},
        {"relay": {"window_bytes": "8 potatoes"}},
        {"worker": {"concurrency": 0}},
    ):
        assert not validator.is_valid(wrong), wrong


def test_the_settings_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
    assert text == with_tables(text, TABLES), "run: python -m towpath.cli.settings_reference docs/settings.md"
    assert all(f"`{name}`" in text for name in settings.variables())


def test_the_broker_options_on_the_settings_page_are_those_there_are() -> None:
    """O2: with their defaults."""
    section = PAGE.read_text(encoding="utf-8").partition("## Broker options")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+_[a-z_]+|partitions)`", section)) - {"too_large"}
    assert named == kafka._KNOWN | rabbitmq._KNOWN
    for line in section.splitlines():
        if match := re.match(r"\| `(\w+)` \| RabbitMQ \|", line):
            assert match[1] in rabbitmq._KNOWN
        if match := re.match(r"\| `(\w+)` \| Kafka \|", line):
            assert match[1] in kafka._KNOWN
    ours, theirs = kafka.KafkaConfig.read("kafka://h", {}), rabbitmq.RabbitConfig.read("amqp://h", {})
    limits = f"{ours.max_message_bytes} (Kafka), {theirs.max_message_bytes} (RabbitMQ)"
    assert f"| `max_message_bytes` | both | {limits} |" in section
    assert f"with `partitions` ({ours.partitions})" in section
    defaults = {
        "commit_interval_ms": round(ours.commit_interval_seconds * 1000),
        "connect_timeout_ms": round(theirs.connect_timeout_seconds * 1000),
        "connection_name": theirs.connection_name,
        "heartbeat_seconds": theirs.heartbeat_seconds,
        "publish_concurrency": theirs.publish_concurrency,
        "queues_per_group": theirs.queues_per_group,
    }
    for name, default in defaults.items():
        assert re.search(rf"^\| `{name}` \| \w+ \| `{default}` \|", section, re.MULTILINE), name


def test_the_example_of_the_relays_settings_shows_the_defaults(environment: pytest.MonkeyPatch) -> None:
    """O2: but for addresses and the health port."""
    lines = (PAGE.parents[1] / "outbox_relay" / "example.env").read_text(encoding="utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    defaults = settings.load().model_dump(exclude={"database_url", "broker_url"})
    for name, value in given.items():
        environment.setenv(name, value)

    loaded = settings.load().model_dump(exclude={"database_url", "broker_url"})

    assert loaded["relay"].pop("health_port") > defaults["relay"].pop("health_port") == 0
    assert loaded == defaults


def test_the_file_on_the_settings_page_is_accepted(file: Path) -> None:
    (example,) = (block.text for block in blocks("docs/settings.md") if block.language == "toml")
    file.write_text(example)

    loaded = settings.load()

    assert loaded.relay.lease == timedelta(minutes=1)
    assert Draft202012Validator(settings.json_schema()).is_valid(tomllib.loads(example))
