"""libfaketime from the distribution's package: another wall clock for one process, set while it runs."""

from collections.abc import Mapping
from pathlib import Path

from towpath.testing.services import apt
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import cache_lock


def _library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


def install() -> None:
    """Installs the distribution's package unless it is there."""
    if _library() is None:
        with cache_lock("faketime"):
            if _library() is None:
                apt.install(["libfaketime"])


def environment(offset_file: Path) -> Mapping[str, str]:
    """What a process is started with whose clock is off by what the file says, such as `+3600`.

    A change is seen within a second. The monotonic and boot-time clocks, and so all waits, stay true; but
    Python's `time.sleep` fails under version 0.9.10, which refuses an absolute time of the monotonic clock.
    """
    library = _library()
    if library is None:
        raise ServiceMissing("libfaketime", "python -m towpath.testing.services install faketime")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset_file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
    }


def is_loaded(pid: int) -> bool:
    """Whether a process runs, and with it."""
    try:
        return "libfaketime" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return False
