"""A broker from its URL: the one place that knows which adapters there are."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from towpath.brokers.ports import Broker
from towpath.errors import ConfigurationError, MissingExtra, SettingsError

if TYPE_CHECKING:
    from towpath.settings import Settings

_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def broker_from_url(url: str, options: Mapping[str, object] = _NO_OPTIONS) -> Broker:
    """The adapter for `kafka://`, `kafka+ssl://`, `amqp://`, `amqps://` or `memory://NAME`.

    Nothing is connected yet. Raises ConfigurationError for a URL or an option it cannot use, and
    MissingExtra where the client library is not installed.

    ```python
    broker = broker_from_url("kafka://localhost:9092", {"compression_type": "lz4"})
    ```
    """
    scheme = url.partition("://")[0].lower()
    if scheme in ("kafka", "kafka+ssl"):
        try:
            from towpath.brokers.kafka.broker import KafkaBroker  # noqa: PLC0415  an optional dependency
        except ModuleNotFoundError as error:
            raise _missing(error, "aiokafka", "kafka") from error
        return KafkaBroker(url, options)
    if scheme in ("amqp", "amqps"):
        try:
            from towpath.brokers.rabbitmq.broker import RabbitBroker  # noqa: PLC0415  an optional dependency
        except ModuleNotFoundError as error:
            raise _missing(error, "aio_pika", "rabbitmq") from error
        return RabbitBroker(url, options)
    if scheme == "memory":
        from towpath.brokers.memory.broker import MemoryBroker  # noqa: PLC0415  only where it is used

        return MemoryBroker(url, options)
    raise ConfigurationError(
        f"unknown broker scheme {scheme[:40]!r}: use kafka://, kafka+ssl://, amqp://, amqps:// or memory://NAME"
    )


def broker_of(settings: "Settings") -> Broker:
    """The broker of the settings. Raises SettingsError and MissingExtra."""
    from towpath.settings.types import revealed  # noqa: PLC0415  needs an extra that the adapters do not

    try:
        return broker_from_url(settings.broker_url.get_secret_value(), revealed(settings.broker_options))
    except MissingExtra:
        raise
    except ConfigurationError as error:
        raise SettingsError(f"TOWPATH_BROKER_URL or TOWPATH_BROKER_OPTIONS: {error}") from error


def _missing(error: ModuleNotFoundError, module: str, extra: str) -> Exception:
    """MissingExtra when it is the client library that is absent, the error itself when it is not."""
    if error.name is not None and error.name.split(".")[0] in (module, "aiormq", "aiokafka", "aio_pika"):
        return MissingExtra(extra, f"a {extra} broker")
    return error
