"""What each error of aiokafka means to a caller: wait, fix the deployment, or set the message aside."""

import ssl
from typing import Final

from aiokafka import errors as kafka

from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError, TowpathError

TOO_LARGE: Final = (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError, kafka.RecordTooLargeError)
"""The broker says that a batch, or one record in it, is above its limit."""

_INVALID: Final = (kafka.CorruptRecordException,)

_TOPOLOGY: Final = (
    kafka.UnknownTopicOrPartitionError,
    kafka.InvalidTopicError,
    kafka.TopicAlreadyExistsError,
    kafka.InvalidPartitionsError,
    kafka.InvalidReplicationFactorError,
    kafka.InvalidReplicationAssignmentError,
    kafka.InvalidConfigurationError,
    kafka.PolicyViolationError,
    kafka.UnsupportedForMessageFormatError,
)

_CONFIGURATION: Final = (
    kafka.AuthenticationFailedError,
    kafka.AuthenticationMethodNotSupported,
    kafka.SaslAuthenticationFailed,
    kafka.UnsupportedSaslMechanismError,
    kafka.IllegalSaslStateError,
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.TransactionalIdAuthorizationFailed,
    kafka.DelegationTokenAuthDisabled,
    kafka.DelegationTokenNotFound,
    kafka.DelegationTokenOwnerMismatch,
    kafka.DelegationTokenRequestNotAllowed,
    kafka.DelegationTokenAuthorizationFailed,
    kafka.DelegationTokenExpired,
    kafka.InvalidPrincipalType,
    kafka.SecurityDisabled,
    kafka.InvalidTimestampError,
    kafka.InvalidRequiredAcksError,
    kafka.InvalidGroupIdError,
    kafka.InvalidSessionTimeoutError,
    kafka.InvalidTransactionTimeout,
    kafka.InconsistentGroupProtocolError,
    kafka.OffsetMetadataTooLargeError,
    kafka.InvalidCommitOffsetSizeError,
    kafka.UnsupportedVersionError,
    kafka.IncompatibleBrokerVersion,
    kafka.UnrecognizedBrokerVersion,
    kafka.UnsupportedCodecError,
    kafka.KafkaConfigurationError,
    kafka.IllegalArgumentError,
    kafka.QuotaViolationError,
)

_HINTS: Final[dict[type[Exception], str]] = {
    kafka.InvalidTimestampError: "the broker refuses the record timestamp: is the clock of this host right?",
    kafka.IncompatibleBrokerVersion: (
        "the broker lacks an API that is needed; for one without idempotent producers set the broker "
        "option enable_idempotence: false"
    ),
}


def translate(error: BaseException) -> TowpathError:
    """Our error for one that aiokafka, a socket or a timeout raised; its cause is left to the caller.

    What is not known to be the message's or the deployment's fault counts as an outage, since that
    loses nothing: BrokerUnavailable.
    """
    if isinstance(error, TowpathError):
        return error
    detail = describe(error)
    if isinstance(error, TOO_LARGE):
        return MessageRefused("too_large", detail)
    if isinstance(error, _INVALID):
        return MessageRefused("invalid_record", detail)
    if isinstance(error, _TOPOLOGY):
        return TopologyError(f"Kafka: {detail}")
    if isinstance(error, (*_CONFIGURATION, ssl.SSLCertVerificationError)):
        hint = next((text for kind, text in _HINTS.items() if isinstance(error, kind)), None)
        return ConfigurationError(f"Kafka: {hint} ({detail})" if hint else f"Kafka: {detail}")
    return BrokerUnavailable(f"Kafka: {detail}")


def describe(error: BaseException) -> str:
    """One short line: the class and what it says."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
