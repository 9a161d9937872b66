"""What each error of aio-pika and aiormq means to a caller."""

import asyncio
import ssl
from typing import Final

from aio_pika import exceptions as pika
from aiormq import exceptions as amqp

from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError, TowpathError

CLIENT_ERRORS: Final = (
    *pika.CONNECTION_EXCEPTIONS,
    amqp.AMQPError,
    amqp.ChannelInvalidStateError,
    TimeoutError,
    OSError,
    EOFError,
)
"""Everything the libraries raise for the broker's or the link's state. (They use RuntimeError for a
connection that is closed already.)"""

BLAMES_A_MESSAGE: Final = (
    amqp.ConnectionSyntaxError,
    amqp.ConnectionFrameError,
    amqp.ConnectionUnexpectedFrame,
    amqp.ConnectionNotImplemented,
    amqp.ChannelPreconditionFailed,
    amqp.ChannelLockedResource,
)
"""Closes that follow from what was sent: some message of those in flight is at fault."""

BLAMES_AN_ADDRESS: Final = (amqp.ChannelAccessRefused, amqp.ChannelNotFoundEntity)
"""Closes that a message's exchange or routing key brought about, and only a person can prevent."""

_CONFIGURATION: Final = (
    amqp.AuthenticationError,
    amqp.ProbableAuthenticationError,
    amqp.ChannelAccessRefused,
    amqp.ConnectionNotAllowed,
    amqp.IncompatibleProtocolError,
    ssl.SSLCertVerificationError,
)
_TOPOLOGY: Final = (
    amqp.ChannelNotFoundEntity,
    amqp.ChannelPreconditionFailed,
    amqp.ConnectionCommandInvalid,
    amqp.DuplicateConsumerTag,
)


def translate(error: BaseException) -> TowpathError:
    """Our error for one that the libraries raised; its cause is left to the caller.

    What is not known to be the message's or the deployment's fault counts as an outage.
    """
    if isinstance(error, TowpathError):
        return error
    detail = describe(error)
    if isinstance(error, pika.PublishError):
        return MessageRefused("unroutable", detail)
    if isinstance(error, pika.DeliveryError):
        return MessageRefused("nacked", detail)
    if isinstance(error, _TOPOLOGY):
        return TopologyError(f"RabbitMQ: {detail}")
    causes = (error, error.__cause__, error.__context__)
    if any(isinstance(each, _CONFIGURATION) for each in causes):
        return ConfigurationError(f"RabbitMQ: {detail}")
    return BrokerUnavailable(f"RabbitMQ: {detail}")


def describe(error: BaseException) -> str:
    """One short line: the class and what it says."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_cancelled_from_outside() -> bool:
    """Whether a CancelledError is meant for the current task; the libraries raise their own, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
