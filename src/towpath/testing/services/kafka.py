"""Apache Kafka as one KRaft node, from its Maven artifacts on the machine's Java."""

import base64
import shutil
import signal
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from towpath.testing.services import java
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import (
    Command,
    Server,
    ServiceAddress,
    cache_directory,
    make_cached,
    run,
)

KAFKA_VERSION: Final = "4.4.0"
_ARTIFACTS = (
    java.Artifact("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    java.Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.5"),
)
_SETTINGS: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "DIRECT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "DIRECT",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # A killed broker can register again only when its last session has run out.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}
_LOGGING = """\
status=error
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{ISO8601} %p %m (%c)%n%throwable
rootLogger.level=warn
rootLogger.appenderRef.console.ref=console
logger.server.name=kafka.server.KafkaRaftServer
logger.server.level=info
"""
_READY = "Kafka Server started"
_INSTALL = "python -m towpath.testing.services install kafka"


def _libraries_entry() -> str:
    return f"kafka-{KAFKA_VERSION}"


def _environment(libraries: Path) -> dict[str, str]:
    return {"CLASSPATH": f"{libraries}/*", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}


def _properties(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def install() -> None:
    """Installs Java and downloads the libraries unless they are there."""
    java.install_java()
    make_cached(_libraries_entry(), lambda target: java.copy_artifacts(_ARTIFACTS, target))


def _libraries() -> Path:
    libraries = cache_directory() / _libraries_entry()
    if not libraries.exists():
        raise ServiceMissing("Apache Kafka", _INSTALL)
    return libraries


def _format(target: Path) -> None:
    """Makes an empty, formatted log directory."""
    with tempfile.TemporaryDirectory(prefix="towpath-kafka-") as scratch:
        logs = Path(scratch, "logs")
        properties = Path(scratch, "server.properties")
        listeners = {
            "listeners": "DIRECT://127.0.0.1:1,PROXIED://127.0.0.1:2,CONTROLLER://127.0.0.1:3",
            "controller.quorum.voters": "1@127.0.0.1:3",
        }
        properties.write_text(_properties({**_SETTINGS, **listeners, "log.dirs": str(logs)}))
        run(
            [str(java.find_java()), "-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"]
            + ["-t", _new_id(), "-c", str(properties)],
            failure="Kafka's storage could not be formatted",
            env=_environment(_libraries()),
        )
        shutil.copytree(logs, target, dirs_exist_ok=True)


def _new_id() -> str:
    """As Kafka writes them; none may begin with a dash."""
    return "T" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def _renumber(meta: Path, node_id: int) -> None:
    """The template's log directory, for another node of the same cluster."""
    mine = {"node.id": str(node_id), "directory.id": _new_id()}
    lines = [line for line in meta.read_text().splitlines() if line.partition("=")[0] not in mine]
    meta.write_text("\n".join([*lines, _properties(mine)]))


class KafkaServer(Server):
    """A Kafka broker on loopback ports of its own.

    For fault tests, connections to `proxied_port` are told that the broker is at `advertised_port`: put a
    proxy there, and a client that begins at the proxy stays on it.
    """

    name = "kafka"

    def __init__(
        self,
        *,
        node_id: int = 1,
        settings: Mapping[str, str] | None = None,
        heap_megabytes: int = 512,
        is_for_benchmark: bool = False,
    ) -> None:
        super().__init__()
        self.port = self._reserve_port()
        self.proxied_port = self._reserve_port()
        self.advertised_port = self._reserve_port()
        controller_port = self._reserve_port()
        self.node_id = node_id
        self.voter = f"{node_id}@127.0.0.1:{controller_port}"
        """In the quorum of controllers."""
        self._settings = {
            **_SETTINGS,
            "node.id": str(node_id),
            "listeners": f"DIRECT://127.0.0.1:{self.port},PROXIED://127.0.0.1:{self.proxied_port},"
            f"CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"DIRECT://127.0.0.1:{self.port},PROXIED://127.0.0.1:{self.advertised_port}",
            "controller.quorum.voters": self.voter,
            **(settings or {}),
        }
        self._java_options = [f"-Xmx{heap_megabytes}m", "-XX:+UseSerialGC"]
        if not is_for_benchmark:
            self._java_options.append("-XX:TieredStopAtLevel=1")  # starts faster, runs slower

    def join(self, voters: str) -> None:
        """Be one of a cluster from the first start on."""
        self._settings["controller.quorum.voters"] = voters

    @property
    def bootstrap(self) -> str:
        """host:port for a client."""
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(self.name, f"kafka://{self.bootstrap}")

    def _prepare(self) -> None:
        directory = self.group.directory
        template = make_cached(f"kafka-{KAFKA_VERSION}-formatted", _format)
        shutil.copytree(template, directory / "logs")
        if self.node_id != 1:
            _renumber(directory / "logs" / "meta.properties", self.node_id)
        properties = _properties({**self._settings, "log.dirs": str(directory / "logs")})
        (directory / "server.properties").write_text(properties)
        (directory / "log4j2.properties").write_text(_LOGGING)

    def _launch(self) -> None:
        directory = self.group.directory
        self._pid = self.group.spawn(
            Command(
                self.name,
                [
                    str(java.find_java()),
                    *self._java_options,
                    f"-Dlog4j2.configurationFile={directory}/log4j2.properties",
                ]
                + ["kafka.Kafka", str(directory / "server.properties")],
                _environment(_libraries()),
            )
        )
        self.group.wait_until(
            self.name, lambda: _READY in self.group.log_since_spawn(self.name), self.ready_timeout_seconds
        )

    def stop(self) -> None:
        """Shuts down in order; the data stay."""
        self._end(signal.SIGTERM, 20)

    def restart(self) -> None:
        """Stops and starts again on the same ports with the same data."""
        self.stop()
        self.start()
