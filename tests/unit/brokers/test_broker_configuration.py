"""URLs and options are checked before anything is connected."""

import ssl

import pytest

from towpath.brokers.factory import broker_from_url
from towpath.brokers.kafka.config import KafkaConfig
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.security import parse_broker_url
from towpath.errors import ConfigurationError

SECRET = "s3cret-canary"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "kafka",
        "kafka://",
        "redis://localhost",
        "kafka://host:port",
        "amqp://",
        f"amqp://user:{SECRET}@host:x/",
        "amqp://one,two/",
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_their_password(url: str) -> None:
    """O2, X3."""
    with pytest.raises(ConfigurationError) as caught:
        broker_from_url(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", ["kafka", "amqp"])
def test_a_password_in_plain_text_to_another_host_is_refused(scheme: str) -> None:
    """X4: unless opted in; over loopback it is fine."""
    with pytest.raises(ConfigurationError, match="without TLS") as caught:
        broker_from_url(f"{scheme}://user:{SECRET}@broker.example.com/")
    assert SECRET not in str(caught.value)
    broker_from_url(f"{scheme}://user:{SECRET}@broker.example.com/", {"allow_plaintext": True})
    broker_from_url(f"{scheme}://user:{SECRET}@127.0.0.1/")
    broker_from_url(f"{scheme}://user:{SECRET}@localhost/")
    broker_from_url(f"{scheme}://broker.example.com/")


def test_a_password_given_as_an_option_counts_too() -> None:
    """X4."""
    options = {"sasl_plain_username": "u", "sasl_plain_password": SECRET}
    with pytest.raises(ConfigurationError, match="without TLS"):
        KafkaConfig.read("kafka://broker.example.com", options)
    config = KafkaConfig.read("kafka+ssl://broker.example.com", options)
    assert config.client["security_protocol"] == "SASL_SSL"
    assert SECRET not in repr(config)


def test_tls_verifies_unless_told_otherwise() -> None:
    """X4: on both brokers."""
    kafka = KafkaConfig.read("kafka+ssl://broker.example.com", {}).client
    assert kafka["security_protocol"] == "SSL"
    rabbit = RabbitConfig.read("amqps://user:x@broker.example.com/", {})
    for context in (kafka["ssl_context"], rabbit.ssl_context):
        assert isinstance(context, ssl.SSLContext)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
    lax = RabbitConfig.read("amqps://user:x@broker.example.com/", {"ssl_verify": False}).ssl_context
    assert lax is not None
    assert lax.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("kafka://h", {"enable_idempotense": False}, "did you mean enable_idempotence"),
        ("kafka://h", {"enable_idempotence": "perhaps"}, "true or false"),
        ("kafka://h", {"session_timeout_ms": "soon"}, "whole number"),
        ("kafka://h", {"linger_ms": "soon"}, "linger_ms must be a whole number"),
        ("kafka://h", {"check_crcs": "perhaps"}, "true or false"),
        ("kafka://h", {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 30_000}, "rebalance_timeout_ms"),
        ("kafka://h", {"ssl_cafile": "ca.pem"}, "kafka\\+ssl"),
        ("kafka+ssl://h", {"ssl_cafile": "/nowhere/ca.pem"}, "TLS files"),
        ("amqp://h", {"prefetchh": 1}, "unknown RabbitMQ option"),
        ("amqp://h", {"queues_per_group": 0}, "from 1 on"),
        ("amqp://h", {"ssl_cafile": "ca.pem"}, "amqps"),
        ("memory://m", {"linger": 1}, "unknown option"),
    ],
)
def test_wrong_options_are_named(url: str, options: dict[str, object], text: str) -> None:
    """O2: one line that names the fix."""
    with pytest.raises(ConfigurationError, match=text):
        broker_from_url(url, options)


def test_kafka_defaults_are_ours_where_the_clients_are_wrong() -> None:
    """Nothing is skipped by default, nothing committed by itself, and joins may take their time."""
    config = KafkaConfig.read("kafka://a:1,b", {"compression_type": "gzip"})
    assert config.client["bootstrap_servers"] == "a:1,b:9092"
    assert config.consumer["auto_offset_reset"] == "none", "the client decides nothing"
    assert not config.is_starting_at_the_end
    assert config.consumer["enable_auto_commit"] is False
    assert config.consumer["session_timeout_ms"] == 30_000
    assert config.consumer["rebalance_timeout_ms"] == 60_000
    assert config.consumer["request_timeout_ms"] == 65_000
    assert config.client["request_timeout_ms"] == 10_000
    assert config.producer["acks"] == "all"
    assert config.producer["enable_idempotence"] is True
    assert config.producer["compression_type"] == "gzip"
    assert 1_000_000 < config.max_message_bytes < 1_048_588


def test_options_that_are_text_become_what_the_client_takes() -> None:
    """O2: `TOWPATH_BROKER_OPTIONS__LINGER_MS=5` is text."""
    options = {"linger_ms": "5", "fetch_max_bytes": "100", "check_crcs": "false", "retry_backoff_ms": "7"}
    config = KafkaConfig.read("kafka://h", options)
    assert config.producer["linger_ms"] == 5
    assert (config.consumer["fetch_max_bytes"], config.consumer["check_crcs"]) == (100, False)
    assert config.client["retry_backoff_ms"] == 7


def test_urls_are_split_with_escapes_and_ipv6() -> None:
    """Passwords may hold any character."""
    url = parse_broker_url("amqp://us%40er:p%2Fw@[::1]:5671/vhost")
    assert (url.username, url.password, url.hosts, url.path) == ("us@er", "p/w", (("::1", 5671),), "/vhost")
    assert "p/w" not in repr(url)
