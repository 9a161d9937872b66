"""Three brokers of Apache Kafka, each of which can be stopped, killed and frozen by itself."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from towpath.testing.services.kafka import KafkaServer

_SIZE: Final = 3
_SETTINGS: Final[Mapping[str, str]] = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}


class KafkaCluster:
    """Every topic is on all three and takes what two have; any one of them may be away."""

    def __init__(self, *, heap_megabytes: int = 256) -> None:
        self.brokers = [
            KafkaServer(node_id=1 + number, settings=_SETTINGS, heap_megabytes=heap_megabytes)
            for number in range(_SIZE)
        ]
        """By node id, from 1 on."""
        voters = ",".join(broker.voter for broker in self.brokers)
        for broker in self.brokers:
            broker.join(voters)

    @property
    def bootstrap(self) -> str:
        """host:port of each, for a client."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    def broker(self, node_id: int) -> KafkaServer:
        """One of them."""
        return self.brokers[node_id - 1]

    def start(self) -> Self:
        """Starts those that do not run, at once: none answers before most of them are there."""
        with ThreadPoolExecutor(_SIZE) as threads:
            list(threads.map(KafkaServer.start, self.brokers))
        return self

    def close(self) -> None:
        """Ends them and removes their data. Idempotent."""
        for broker in self.brokers:
            broker.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
