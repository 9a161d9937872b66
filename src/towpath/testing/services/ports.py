"""Loopback ports that stay ours while a server is down for a restart.

They are taken below the ephemeral range: a client that reconnects to an ephemeral port nobody listens on can
be given that same port as its own and connect to itself. A lock file per port keeps launchers apart.
"""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_LOWEST = 15000


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class ReservedPort:
    """A free loopback port, reserved against other launchers until released or this process ends."""

    def __init__(self) -> None:
        directory = Path(tempfile.gettempdir(), f"towpath-ports-{os.getuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
        highest = max(_ephemeral_start(), _LOWEST + 1000)
        generator = random.SystemRandom()  # tests seed the shared one, and must not share ports
        for _ in range(500):
            port = generator.randrange(_LOWEST, highest)
            descriptor = os.open(directory / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            if _is_free(port):
                self.number = port
                self._descriptor: int | None = descriptor
                return
            os.close(descriptor)
        raise RuntimeError("no free loopback port found")

    def release(self) -> None:
        """Gives the port back. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
