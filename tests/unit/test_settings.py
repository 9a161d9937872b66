"""Settings from the environment: everything wrong is named in one line, nothing secret is shown."""

import json
from datetime import timedelta

import pytest

from towpath import settings
from towpath.errors import SettingsError

URL = "postgresql://app:s3cr3t-canary@db.internal:5432/orders"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import os

    for name in list(os.environ):
        if name.upper().startswith("TOWPATH_"):
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

    assert "s3cr3t" not in repr(loaded) + str(loaded) + repr(loaded.model_dump(exclude={"broker_options"}))
    assert loaded.broker_options == {"sasl_plain_password": "s3cr3t-canary"}


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
