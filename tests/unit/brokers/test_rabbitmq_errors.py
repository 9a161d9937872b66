"""Every error of aio-pika and aiormq becomes one of ours."""

import inspect
import ssl

import pytest
from aio_pika import exceptions as pika
from aiormq import exceptions as amqp
from aiormq import spec

from towpath.brokers.rabbitmq.errors import CLIENT_ERRORS, translate
from towpath.errors import BrokerUnavailable, ConfigurationError, TopologyError, TowpathError

ALL = sorted(
    {
        value
        for module in (amqp, pika)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    },
    key=lambda each: each.__name__,
)
NOT_ERRORS_OF_THE_BROKER = {"MessageProcessError", "QueueEmpty"}

EXPECTED: dict[type[Exception], type[TowpathError]] = {
    amqp.ChannelNotFoundEntity: TopologyError,
    amqp.ChannelPreconditionFailed: TopologyError,
    amqp.ChannelAccessRefused: ConfigurationError,
    amqp.AuthenticationError: ConfigurationError,
    amqp.ProbableAuthenticationError: ConfigurationError,
    amqp.ConnectionNotAllowed: ConfigurationError,
    amqp.AMQPConnectionError: BrokerUnavailable,
    amqp.ConnectionClosed: BrokerUnavailable,
    amqp.ConnectionInternalError: BrokerUnavailable,
    amqp.ConnectionResourceError: BrokerUnavailable,
    amqp.ChannelInvalidStateError: BrokerUnavailable,
    amqp.ChannelClosed: BrokerUnavailable,
}


def _made(error_class: type[Exception]) -> Exception:
    if issubclass(error_class, amqp.DeliveryError):
        error = error_class.__new__(error_class)
        error.message, error.frame = None, spec.Basic.Nack(1)  # type: ignore[attr-defined]
        return error
    return error_class(404, "gone")


@pytest.mark.parametrize("error_class", ALL, ids=lambda each: each.__name__)
def test_every_error_class_is_caught_and_maps_to_one_of_ours(error_class: type[Exception]) -> None:
    """None is left over."""
    if error_class.__name__ in NOT_ERRORS_OF_THE_BROKER:
        return
    error = _made(error_class)
    assert isinstance(error, CLIENT_ERRORS)
    assert isinstance(translate(error), TowpathError)


@pytest.mark.parametrize("error_class", EXPECTED, ids=lambda each: each.__name__)
def test_the_likely_errors_map_as_decided(error_class: type[Exception]) -> None:
    """O2, R7."""
    assert type(translate(error_class(1, "x"))) is EXPECTED[error_class]


def test_a_certificate_that_does_not_verify_is_a_configuration_failure() -> None:
    """X4: also when the library wraps it."""
    wrapped = amqp.AMQPConnectionError("tls")
    wrapped.__cause__ = ssl.SSLCertVerificationError("self-signed")
    assert type(translate(wrapped)) is ConfigurationError
    assert type(translate(OSError("refused"))) is BrokerUnavailable
