"""RabbitMQ from the distribution's package, as a node of its own with its own epmd."""

import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from towpath.testing.services import apt
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import Command, Server, ServiceAddress, cache_lock, run

_SCRIPTS = Path("/usr/lib/rabbitmq/bin")  # the programs behind the wrappers that insist on the rabbitmq user
_EPMD = "epmd"
_ERLANG_ARGUMENTS = "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none"
_SETTINGS: Mapping[str, str] = {
    "loopback_users.guest": "true",
    "log.console": "true",
    "log.console.level": "warning",
    "log.file": "false",
    "disk_free_limit.absolute": "50MB",
}


def _is_installed() -> bool:
    return (_SCRIPTS / "rabbitmq-server").exists() and shutil.which(_EPMD) is not None


def install() -> None:
    """Installs the distribution's package unless it is there; its own service is not started."""
    if not _is_installed():
        with cache_lock("rabbitmq"):
            if not _is_installed():
                apt.install(["rabbitmq-server"])


def answers_amqp(port: int) -> bool:
    """Whether a broker on a loopback port answers the AMQP 0-9-1 protocol header with a method frame."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"
    except OSError:
        return False


class RabbitServer(Server):
    """A RabbitMQ node on loopback ports of its own, user and password `guest`."""

    name = "rabbitmq"

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.port = self._reserve_port()
        self._distribution_port = self._reserve_port()
        self._epmd_port = self._reserve_port()
        self._settings = {
            **_SETTINGS,
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(self.name, self.url)

    @property
    def _environment(self) -> dict[str, str]:
        directory = self.group.directory
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(directory),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
            "RABBITMQ_CONFIG_FILES": str(directory / "conf.d"),
            "RABBITMQ_NODENAME": "towpath@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(directory / "rabbitmq.pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "config"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG_ARGUMENTS,
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server instead of waiting for it
        }

    def _prepare(self) -> None:
        if not _is_installed():
            raise ServiceMissing("RabbitMQ", "python -m towpath.testing.services install rabbitmq")
        directory = self.group.directory
        cookie = directory / ".erlang.cookie"
        cookie.write_text(os.urandom(16).hex())
        cookie.chmod(0o400)
        (directory / "rabbitmq.conf").write_text(
            "".join(f"{name} = {value}\n" for name, value in self._settings.items())
        )
        (directory / "enabled_plugins").write_text("[].\n")
        self.group.spawn(Command(_EPMD, [_EPMD], self._environment))
        self.group.wait_until(_EPMD, self._is_epmd_ready, self.ready_timeout_seconds)

    def _is_epmd_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._epmd_port)) == 0

    def _launch(self) -> None:
        self._pid = self.group.spawn(Command(self.name, [_SCRIPTS / "rabbitmq-server"], self._environment))
        self.group.wait_until(self.name, lambda: answers_amqp(self.port), self.ready_timeout_seconds)

    def ctl(self, *arguments: str, timeout_seconds: float = 120.0) -> str:
        """Runs rabbitmqctl against this node and returns what it printed."""
        return run(
            [_SCRIPTS / "rabbitmqctl", "--quiet", *arguments],
            failure=f"rabbitmqctl {' '.join(arguments)} failed",
            env=self._environment,
            timeout_seconds=timeout_seconds,
        )

    def sync_metadata(self) -> None:
        """Call it between declaring quorum queues and `kill`.

        Version 3.10 writes a queue's Raft term only every five seconds; a queue whose node dies before that
        never elects a leader again, and consuming from it hangs.
        """
        self.ctl("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")

    def stop(self) -> None:
        """Shuts down in order; the data stay."""
        self._end(signal.SIGTERM, 30)

    def restart(self) -> None:
        """Stops and starts again on the same ports with the same data."""
        self.stop()
        self.start()
