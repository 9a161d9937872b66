"""What a process holds, as its own allocators count it: resident memory is also what they keep for later.

`TOWPATH_TEST_HOLDING` names the file that is written every few seconds, for a soak to read.
"""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

ENVIRONMENT_VARIABLE: Final = "TOWPATH_TEST_HOLDING"
_EVERY_SECONDS: Final = 5.0


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def tell() -> None:
    """From now on, in a thread, if anybody wants to know."""
    if path := os.environ.get(ENVIRONMENT_VARIABLE):
        threading.Thread(target=_tell_for_ever, args=[Path(path)], daemon=True).start()


def file_of(directory: Path, name: str) -> Path:
    """Where the process of that name tells it."""
    return directory / f"{name}.held"


def read(path: Path) -> tuple[int, int] | None:
    """Bytes that C code has from malloc, and objects of Python's own allocator; None before that is told."""
    try:
        of_c, of_python = map(int, path.read_text().split())
    except (OSError, ValueError):  # not begun, or being written
        return None
    return of_c, of_python


def _tell_for_ever(path: Path) -> None:
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _MallInfo
    while True:
        info = mallinfo()
        with suppress(OSError):  # such as no descriptor left
            path.write_text(f"{info.uordblks + info.hblkhd} {sys.getallocatedblocks()}")
        time.sleep(_EVERY_SECONDS)
