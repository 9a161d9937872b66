"""Server processes that never outlive their launcher: the launcher's side of the supervisor."""

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from towpath.testing.services import supervisor
from towpath.testing.services.errors import ServiceFailed
from towpath.testing.services.ports import ReservedPort

_PREFIX = "towpath-run-"
_ANSWER_SECONDS = 60.0
"""For a supervisor, which may have to start first, on a busy machine."""


@dataclass(frozen=True)
class ServiceAddress:
    """Where a running service answers."""

    name: str
    url: str


@dataclass(frozen=True)
class Owner:
    """The user a server runs as."""

    uid: int
    gid: int


def run(
    argv: Sequence[str | Path],
    *,
    failure: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    owner: Owner | None = None,
    timeout_seconds: float | None = None,
) -> str:
    """Runs a short program and returns its output; raises ServiceFailed with all it printed if it fails."""
    result = subprocess.run(
        [str(part) for part in argv],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_seconds,
        user=owner.uid if owner else None,
        group=owner.gid if owner else None,
        extra_groups=[] if owner else None,
    )
    if result.returncode != 0:
        raise ServiceFailed(failure, (result.stdout + result.stderr).strip())
    return result.stdout.strip()


@dataclass(frozen=True)
class Command:
    """How to run one process, and how it is ended when the launcher disappears."""

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str]
    owner: Owner | None = None
    end_signal: signal.Signals = signal.SIGKILL
    end_grace_seconds: float = 5.0


def cache_directory() -> Path:
    """What is worth keeping between runs, outside any source tree."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root, "towpath")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Holds a lock across processes, for making one entry of the cache."""
    with Path(cache_directory(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_cached(name: str, make: Callable[[Path], None]) -> Path:
    """Returns the cache entry, made on first use; one that was interrupted half-way does not count."""
    entry = cache_directory() / name
    if not entry.exists():
        with cache_lock(name):
            if not entry.exists():
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_directory()) as scratch:
                    made = Path(scratch, "entry")
                    made.mkdir()
                    make(made)
                    made.rename(entry)
    return entry


def sweep_run_directories() -> None:
    """Removes run directories whose supervisor was itself killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), Path(path, ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - path.stat().st_mtime > 60:
                shutil.rmtree(path, ignore_errors=True)


class ProcessGroup:
    """The processes and the run directory of one server, held by a supervisor process."""

    def __init__(self, name: str) -> None:
        sweep_run_directories()
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
        self.directory.chmod(0o711)
        with Path(self.directory, ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(os.getpid()), str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        self._pending = b""
        self._log_starts: dict[str, int] = {}

    def _ask(
        self, operation: str, *, timeout_seconds: float = _ANSWER_SECONDS, **fields: Any
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            os.write(
                self._process.stdin.fileno(), json.dumps({"operation": operation, **fields}).encode() + b"\n"
            )
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while b"\n" not in self._pending:
                    if not selector.select(timeout_seconds):
                        raise ServiceFailed(f"the supervisor did not answer {operation!r}")
                    chunk = os.read(self._process.stdout.fileno(), 65536)
                    if not chunk:
                        raise ServiceFailed("the supervisor is gone")
                    self._pending += chunk
        except (BrokenPipeError, ValueError) as error:
            raise ServiceFailed("the supervisor is gone") from error
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ServiceFailed(reply["error"])
        return reply

    def log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def log_tail(self, name: str, line_count: int = 20) -> str:
        """The last lines a process wrote."""
        try:
            lines = self.log_path(name).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-line_count:])

    def log_since_spawn(self, name: str) -> str:
        """What a process wrote since it was last started."""
        with self.log_path(name).open("rb") as file:
            file.seek(self._log_starts[name])
            return file.read().decode(errors="replace")

    def spawn(self, command: Command) -> int:
        """Starts a process and returns its pid."""
        log = self.log_path(command.name)
        self._log_starts[command.name] = log.stat().st_size if log.exists() else 0
        reply = self._ask(
            "spawn",
            name=command.name,
            argv=[str(part) for part in command.argv],
            env=dict(command.env),
            cwd=str(self.directory),
            log=str(log),
            uid=command.owner.uid if command.owner else None,
            gid=command.owner.gid if command.owner else None,
            end_signal=command.end_signal,
            end_grace_seconds=command.end_grace_seconds,
        )
        pid: int = reply["pid"]
        return pid

    def exit_code(self, name: str) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        code: int | None = self._ask("poll", name=name)["code"]
        return code

    def send_signal(self, name: str, signum: signal.Signals, *, is_for_tree: bool = False) -> None:
        self._ask("signal", name=name, signal=signum, tree=is_for_tree)

    def stop(self, name: str, signum: signal.Signals, grace_seconds: float) -> int:
        """Signals a process, kills what is left of its tree after the grace, returns the exit code."""
        reply = self._ask(
            "stop",
            timeout_seconds=grace_seconds + _ANSWER_SECONDS,
            name=name,
            signal=signum,
            grace_seconds=grace_seconds,
        )
        code: int = reply["code"]
        return code

    def wait_until(self, name: str, is_ready: Callable[[], bool], timeout_seconds: float) -> None:
        """Polls a readiness check; raises ServiceFailed with the log's end when it exits or time is up."""
        deadline = time.monotonic() + timeout_seconds
        while not is_ready():
            code = self.exit_code(name)
            if code is not None:
                raise ServiceFailed(f"{name} exited with {code} while starting", self.log_tail(name))
            if time.monotonic() > deadline:
                raise ServiceFailed(
                    f"{name} is not ready after {timeout_seconds:.0f} seconds", self.log_tail(name)
                )
            time.sleep(0.02)

    def close(self) -> None:
        """Ends every process and removes the run directory. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(120)


class Server:
    """What all servers share: ports that stay the same, a run directory, and an end.

    `stop` keeps ports and data, so `start` continues with them; `close`, or leaving the context, removes all.
    """

    name: str
    ready_timeout_seconds = 180.0

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._ports: list[ReservedPort] = []
        self._pid: int | None = None

    def _reserve_port(self) -> int:
        port = ReservedPort()
        self._ports.append(port)
        return port.number

    @property
    def group(self) -> ProcessGroup:
        if self._group is None:
            raise ServiceFailed(f"{self.name} has not been started")
        return self._group

    @property
    def pid(self) -> int:
        """The main process."""
        if self._pid is None:
            raise ServiceFailed(f"{self.name} is not running")
        return self._pid

    @property
    def is_running(self) -> bool:
        return self._group is not None and self._pid is not None and self._group.exit_code(self.name) is None

    @property
    def address(self) -> ServiceAddress:
        raise NotImplementedError

    def start(self) -> Self:
        """Starts it and returns when it answers. Does nothing when it runs."""
        if self.is_running:
            return self
        if self._group is None:
            self._group = ProcessGroup(self.name)
            self._prepare()
        self._launch()
        return self

    def _prepare(self) -> None:
        """Makes data and configuration in the run directory, once."""
        raise NotImplementedError

    def _launch(self) -> None:
        """Spawns the processes, sets the pid, waits until it answers."""
        raise NotImplementedError

    def _end(self, signum: signal.Signals, grace_seconds: float) -> None:
        if self._group is not None and self._pid is not None:
            self._group.stop(self.name, signum, grace_seconds)
            self._pid = None

    def kill(self) -> None:
        """SIGKILLs it with all its children, as a power cut would; the data stay."""
        self._end(signal.SIGKILL, 10)

    def suspend(self) -> None:
        """Freezes it: connections stay open and nothing answers."""
        self.group.send_signal(self.name, signal.SIGSTOP, is_for_tree=True)

    def resume(self) -> None:
        self.group.send_signal(self.name, signal.SIGCONT, is_for_tree=True)

    def close(self) -> None:
        """Ends it and removes its data. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None
            self._pid = None
        while self._ports:
            self._ports.pop().release()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
