"""Real servers for demos, tests and benchmarks, without containers, gone with whoever started them.

    with PostgresServer() as postgres, KafkaServer() as kafka:
        run(postgres.url(), kafka.bootstrap)

`stop`, `kill` and `restart` keep ports and data; `close`, or leaving the context, removes everything.
"""

from towpath.testing.services.embedded_kafka import EmbeddedKafka
from towpath.testing.services.errors import ServiceFailed, ServiceMissing
from towpath.testing.services.kafka import KafkaServer
from towpath.testing.services.kafka_cluster import KafkaCluster
from towpath.testing.services.pgbouncer import PgBouncerServer
from towpath.testing.services.postgres import PostgresServer, create_database, drop_database, run_sql
from towpath.testing.services.processes import ServiceAddress
from towpath.testing.services.rabbitmq import RabbitServer

__all__ = [
    "EmbeddedKafka",
    "KafkaCluster",
    "KafkaServer",
    "PgBouncerServer",
    "PostgresServer",
    "RabbitServer",
    "ServiceAddress",
    "ServiceFailed",
    "ServiceMissing",
    "create_database",
    "drop_database",
    "run_sql",
]
