"""Every error of aiokafka becomes one of ours."""

import inspect
import ssl

import pytest
from aiokafka import errors as kafka

from towpath.brokers.kafka.errors import translate
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError, TowpathError

ALL = sorted(
    {
        value
        for value in vars(kafka).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == kafka.__name__
    }
    - {kafka.BrokerResponseError},  # abstract
    key=lambda each: each.__name__,
)

EXPECTED: dict[type[Exception], type[TowpathError]] = {
    kafka.MessageSizeTooLargeError: MessageRefused,
    kafka.RecordListTooLargeError: MessageRefused,
    kafka.RecordTooLargeError: MessageRefused,
    kafka.CorruptRecordException: MessageRefused,
    kafka.UnknownTopicOrPartitionError: TopologyError,
    kafka.InvalidTopicError: TopologyError,
    kafka.InvalidReplicationFactorError: TopologyError,
    kafka.TopicAuthorizationFailedError: ConfigurationError,
    kafka.GroupAuthorizationFailedError: ConfigurationError,
    kafka.ClusterAuthorizationFailedError: ConfigurationError,
    kafka.SaslAuthenticationFailed: ConfigurationError,
    kafka.AuthenticationFailedError: ConfigurationError,
    kafka.UnsupportedSaslMechanismError: ConfigurationError,
    kafka.InvalidTimestampError: ConfigurationError,
    kafka.IncompatibleBrokerVersion: ConfigurationError,
    kafka.KafkaConnectionError: BrokerUnavailable,
    kafka.NoBrokersAvailable: BrokerUnavailable,
    kafka.KafkaTimeoutError: BrokerUnavailable,
    kafka.RequestTimedOutError: BrokerUnavailable,
    kafka.NotLeaderForPartitionError: BrokerUnavailable,
    kafka.NotEnoughReplicasError: BrokerUnavailable,
    kafka.OutOfOrderSequenceNumber: BrokerUnavailable,
    kafka.InvalidProducerEpoch: BrokerUnavailable,
    kafka.ProducerFenced: BrokerUnavailable,
    kafka.ProducerClosed: BrokerUnavailable,
    kafka.UnknownError: BrokerUnavailable,
    kafka.CommitFailedError: BrokerUnavailable,
    kafka.ConsumerStoppedError: BrokerUnavailable,
}


@pytest.mark.parametrize("error_class", ALL, ids=lambda each: each.__name__)
def test_every_error_class_maps_to_one_of_ours(error_class: type[Exception]) -> None:
    """None is left over, and what the library itself retries is never held against a message."""
    ours = translate(error_class())
    assert type(ours) in {BrokerUnavailable, ConfigurationError, TopologyError, MessageRefused}
    if getattr(error_class, "retriable", False) and error_class is not kafka.UnknownTopicOrPartitionError:
        assert isinstance(ours, BrokerUnavailable)


@pytest.mark.parametrize("error_class", EXPECTED, ids=lambda each: each.__name__)
def test_the_likely_errors_map_as_decided(error_class: type[Exception]) -> None:
    """R7, R8, R26."""
    assert type(translate(error_class())) is EXPECTED[error_class]


def test_sockets_timeouts_and_certificates_map_too() -> None:
    """O2: a certificate that does not verify needs a person, a refused connection does not."""
    assert type(translate(OSError("refused"))) is BrokerUnavailable
    assert type(translate(TimeoutError())) is BrokerUnavailable
    assert type(translate(ssl.SSLCertVerificationError("self-signed"))) is ConfigurationError


def test_our_own_errors_pass_as_they_are() -> None:
    """Nothing is wrapped twice."""
    error = MessageRefused("too_large")
    assert translate(error) is error


def test_a_refused_timestamp_names_the_clock() -> None:
    """R26: one clear line."""
    assert "clock" in str(translate(kafka.InvalidTimestampError()))
