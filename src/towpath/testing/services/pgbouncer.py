"""PgBouncer from the distribution's package, before a Postgres that runs already."""

import os
import shutil
import signal
import socket
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from towpath.testing.services import apt
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.postgres import unprivileged_owner
from towpath.testing.services.processes import Command, Server, ServiceAddress, cache_lock

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"


def _program() -> str | None:
    return shutil.which("pgbouncer", path=_PATH)


def install() -> None:
    """Installs the distribution's package unless it is there; its own service is not started."""
    if _program() is None:
        with cache_lock("pgbouncer"):
            if _program() is None:
                apt.install(["pgbouncer"])


class PgBouncerServer(Server):
    """A pooler on a loopback port of its own: takes any client, logs in as the user of the URL given."""

    name = "pgbouncer"

    def __init__(
        self,
        upstream_url: str,
        *,
        pool_mode: Literal["session", "transaction"],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.port = self._reserve_port()
        self._upstream = urlsplit(upstream_url)
        self._settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": pool_mode,
            "default_pool_size": "30",
            "max_client_conn": "200",
            **(settings or {}),
        }

    def before(self, url: str) -> str:
        """The URL of a database of the upstream server, through the pooler."""
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{self.port}"))

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(self.name, self.before(urlunsplit(self._upstream)))

    def _prepare(self) -> None:
        if _program() is None:
            raise ServiceMissing("PgBouncer", "python -m towpath.testing.services install pgbouncer")
        upstream = self._upstream
        to = {
            "host": upstream.hostname or "127.0.0.1",
            "port": str(upstream.port or 5432),
            "user": upstream.username or "postgres",
            **({"password": upstream.password} if upstream.password else {}),
        }
        lines = [
            "[databases]",
            "* = " + " ".join(f"{name}={value}" for name, value in to.items()),
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in self._settings.items()),
        ]
        path = self.group.directory / "pgbouncer.ini"
        owner = unprivileged_owner()
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)
        if owner is not None:
            os.chown(path, owner.uid, owner.gid)

    def _launch(self) -> None:
        program = _program()
        if program is None:
            raise ServiceMissing("PgBouncer", "python -m towpath.testing.services install pgbouncer")
        configuration = self.group.directory / "pgbouncer.ini"
        self._pid = self.group.spawn(
            Command(self.name, [program, configuration], {"PATH": _PATH}, unprivileged_owner())
        )
        self.group.wait_until(self.name, self._is_ready, self.ready_timeout_seconds)

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Disconnects everyone and ends."""
        self._end(signal.SIGTERM, 10)
