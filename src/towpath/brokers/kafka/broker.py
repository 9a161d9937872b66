"""`kafka://` and `kafka+ssl://`: makes publishers, subscribers and an admin of one Kafka cluster."""

from collections.abc import Mapping
from types import MappingProxyType

from towpath.brokers.kafka.admin import KafkaAdmin
from towpath.brokers.kafka.config import DEFAULT_PORT, KafkaConfig
from towpath.brokers.kafka.publisher import KafkaPublisher
from towpath.brokers.kafka.subscriber import KafkaSubscriber
from towpath.brokers.ports import Subscription


class KafkaBroker:
    """A Kafka cluster as the URL and the options describe it; nothing is connected yet.

    Options are aiokafka's own arguments by their names, and: `max_message_bytes`, `create_topics`
    (make missing topics while publishing; false), `partitions` and `replication_factor` for those,
    `commit_interval_ms`, `allow_plaintext`, `ssl_cafile`, `ssl_certfile`, `ssl_keyfile`,
    `ssl_password`, `ssl_verify`. Raises ConfigurationError for one that is unknown or malformed.
    """

    def __init__(self, url: str, options: Mapping[str, object] = MappingProxyType({})) -> None:
        self._config = KafkaConfig.read(url, options)

    @property
    def max_message_bytes(self) -> int:
        """Messages above this are refused as `too_large`: 1 MiB without the protocol's overhead."""
        return self._config.max_message_bytes

    @property
    def labels(self) -> Mapping[str, str | int]:
        """`kafka`, and the server where the URL names one."""
        return self._config.url.labels("kafka", DEFAULT_PORT)

    @property
    def queues_per_group(self) -> None:
        """None: partitions are the topic's."""

    def publisher(self) -> KafkaPublisher:
        """A publisher with a producer of its own."""
        return KafkaPublisher(self._config)

    def subscriber(self, subscription: Subscription) -> KafkaSubscriber:
        """One member of a consumer group."""
        return KafkaSubscriber(self._config, subscription)

    def admin(self) -> KafkaAdmin:
        """Creates and checks topics."""
        return KafkaAdmin(self._config)
