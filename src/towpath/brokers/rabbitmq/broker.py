"""`amqp://` and `amqps://`: makes publishers, subscribers and an admin of one RabbitMQ virtual host."""

from collections.abc import Mapping
from types import MappingProxyType

from towpath.brokers.ports import Subscription
from towpath.brokers.rabbitmq.admin import RabbitAdmin
from towpath.brokers.rabbitmq.config import RabbitConfig
from towpath.brokers.rabbitmq.publisher import RabbitPublisher
from towpath.brokers.rabbitmq.subscriber import RabbitSubscriber


class RabbitBroker:
    """A RabbitMQ virtual host as the URL and the options describe it; nothing is connected yet.

    Options: `max_message_bytes` (16 MiB), `publish_concurrency` (messages in flight; 2000),
    `queues_per_group` (1; changing it needs a drain), `heartbeat_seconds` (10), `connect_timeout_ms`,
    `connection_name`, `allow_plaintext`, `ssl_cafile`, `ssl_certfile`, `ssl_keyfile`, `ssl_password`,
    `ssl_verify`. Raises ConfigurationError for one that is unknown or malformed.
    """

    def __init__(self, url: str, options: Mapping[str, object] = MappingProxyType({})) -> None:
        self._config = RabbitConfig.read(url, options)

    @property
    def max_message_bytes(self) -> int:
        """Messages above this are refused as `too_large`."""
        return self._config.max_message_bytes

    @property
    def labels(self) -> Mapping[str, str | int]:
        """`rabbitmq` and the server."""
        return self._config.labels

    @property
    def queues_per_group(self) -> int:
        """The option of that name."""
        return self._config.queues_per_group

    def publisher(self) -> RabbitPublisher:
        """A publisher with a connection of its own."""
        return RabbitPublisher(self._config)

    def subscriber(self, subscription: Subscription) -> RabbitSubscriber:
        """One member of a consumer group, with a connection of its own."""
        return RabbitSubscriber(self._config, subscription)

    def admin(self) -> RabbitAdmin:
        """Creates and checks exchanges and queues."""
        return RabbitAdmin(self._config)
