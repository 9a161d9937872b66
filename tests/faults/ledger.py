"""What processes meant and did, outside the system under test: one append-only file per process.

A record is one line, written by one `write` to a file opened with O_APPEND before anything else: SIGKILL
takes back none, and a process without free file descriptors can still write. Times are nanoseconds of
the boot-time clock, which the processes of a machine share and nobody sets.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from tests.faults.messages import Fate, Kind

ENVIRONMENT_VARIABLE: Final = "TOWPATH_TEST_LEDGER"
PROCESS_VARIABLE: Final = "TOWPATH_TEST_PROCESS"
_CALM: Final = "calm"
_CURED: Final = "cured"


class Intended(msgspec.Struct, frozen=True, tag=True):
    """A message of a transaction, written before the transaction's end."""

    transaction: str
    id: UUID
    kind: Kind
    key: str
    n: int
    fate: Fate = "succeeds"
    is_abandoned: bool = False
    """In a savepoint that is rolled back."""
    is_delayed: bool = False
    request: str = ""
    """Equal requests are one task."""
    is_repeat: bool = False
    """Of a task that is there already."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """What the end of a transaction said. Unknown: COMMIT was sent and not answered."""

    transaction: str
    how: Literal["committed", "rolled_back", "unknown"]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A handler began."""

    id: UUID
    kind: Kind
    process: str
    at: int


class Called(msgspec.Struct, frozen=True, tag=True):
    """An outside system was asked to act."""

    id: UUID
    kind: Kind
    idempotency_key: str
    process: str
    at: int


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The handler that asked it is through, however it ended."""

    id: UUID
    process: str
    at: int


class Lapsed(msgspec.Struct, frozen=True, tag=True):
    """A member noticed that its lease was gone."""

    process: str
    at: int


class Struck(msgspec.Struct, frozen=True, tag=True):
    """A fault, from when to when, and the processes it may hold up or end."""

    fault: str
    processes: tuple[str, ...]
    since: int
    until: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """What a failover took back: commits from `since` on that the standby lacked. It took over at `until`."""

    transactions: frozenset[str] = frozenset()
    letters: frozenset[UUID] = frozenset()
    """Of the dead-letter catalog."""
    since: int = 0
    until: int = -1


Record: TypeAlias = Intended | Ended | Begun | Called | Returned | Lapsed | Struck | Lost
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Record).decode


def now() -> int:
    """Nanoseconds since the machine was started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Ledger:
    """The file of one process, and what the others wrote beside it."""

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self._directory = directory
        self._file = os.open(directory / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @classmethod
    def of_this_process(cls) -> "Ledger":
        """As the environment says."""
        return cls(Path(os.environ[ENVIRONMENT_VARIABLE]), os.environ[PROCESS_VARIABLE])

    def write(self, *records: Record) -> None:
        """Append."""
        os.write(self._file, b"".join(_encode(record) + b"\n" for record in records))

    def own(self) -> Iterator[Record]:
        """What this process wrote, also before it was started again."""
        return read(self._directory, self.process)

    def begun(self, id_: UUID, kind: Kind) -> None:
        """A handler began."""
        self.write(Begun(id_, kind, self.process, now()))

    @contextmanager
    def call(self, id_: UUID, kind: Kind, idempotency_key: str) -> Iterator[None]:
        """The outside system acts; the block is the rest of the handler."""
        self.write(Called(id_, kind, idempotency_key, self.process, now()))
        try:
            yield
        finally:
            self.write(Returned(id_, self.process, now()))

    def has_called(self, id_: UUID) -> bool:
        """Whether any process made the call of a message."""
        sought = b'{"type":"Called","id":"%s"' % str(id_).encode()
        return any(sought in path.read_bytes() for path in self._directory.glob("*.jsonl"))

    @property
    def is_calm(self) -> bool:
        """Whether no process is frozen any more: a call that was not made will not be made."""
        return (self._directory / _CALM).exists()

    def is_cured(self, id_: UUID) -> bool:
        """Whether what made a message die is gone."""
        try:
            return str(id_) in (self._directory / _CURED).read_text().splitlines()
        except FileNotFoundError:
            return False


def calm(directory: Path) -> None:
    """No process is frozen any more."""
    (directory / _CALM).touch()


def cure(directory: Path, ids: list[UUID]) -> None:
    """These may succeed from now on."""
    with (directory / _CURED).open("a") as file:
        file.write("".join(f"{id_}\n" for id_ in ids))


def read(directory: Path, process: str = "*") -> Iterator[Record]:
    """The records of one process or of all; in order within one."""
    for path in sorted(directory.glob(f"{process}.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            if line:
                yield _decode(line)
