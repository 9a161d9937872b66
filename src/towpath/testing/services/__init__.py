"""Real servers for demos, tests and benchmarks, started without containers and gone with whoever started them."""

from towpath.testing.services.errors import ServiceFailed, ServiceMissing
from towpath.testing.services.postgres import PostgresServer
from towpath.testing.services.processes import ServiceAddress

__all__ = ["PostgresServer", "ServiceAddress", "ServiceFailed", "ServiceMissing"]
