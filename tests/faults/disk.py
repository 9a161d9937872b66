"""A small file system in memory that can be filled to its last byte."""

import ctypes
import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from towpath.testing.services.errors import ServiceFailed
from towpath.testing.services.postgres import unprivileged_owner
from towpath.testing.services.processes import run

_CLONE_NEWNS: Final = 0x20000
_CHUNK: Final = bytes(1 << 20)


def keep_mounts_private() -> None:
    """Only this process and its children see what is mounted from now on; it is gone with the last of them.

    To be called before there are threads. A machine that does not allow it does not allow mounts either.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        run(["mount", "--make-rprivate", "/"], failure="mounts could not be kept private")


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path | None]:
    """An empty one that belongs to whom Postgres runs as; None where this machine lets nobody mount one."""
    owner = unprivileged_owner()
    options = f"size={megabytes}m,mode=700" + (f",uid={owner.uid},gid={owner.gid}" if owner else "")
    path = Path(tempfile.mkdtemp(prefix="towpath-disk-"))
    try:
        run(["mount", "-t", "tmpfs", "-o", options, "towpath", path], failure="there is no small disk")
        is_mounted = True
    except (ServiceFailed, OSError):
        is_mounted = False
    try:
        yield path if is_mounted else None
    finally:
        if is_mounted:
            run(["umount", path], failure="the small disk stays mounted")
        path.rmdir()


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(_CHUNK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def make_room(disk: Path) -> None:
    """As before `fill`."""
    (disk / "ballast").unlink()
