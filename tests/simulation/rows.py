"""What the tables of the model hold."""

from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from towpath.store.installed import SHARDS_PER_BROKER

SHARDS = range(SHARDS_PER_BROKER)
COLUMNS = (
    "id", "shard", "message_id", "kind", "destination", "type", "key", "content_type", "headers", "payload",
    "created_at", "key_hash", "fits",
)  # fmt: skip
_PLACES = {name: place for place, name in enumerate(COLUMNS)}
ID, SHARD, MESSAGE_ID, DESTINATION, KEY, HEADERS, PAYLOAD, FITS = 0, 1, 2, 4, 6, 8, 9, 12
Record: TypeAlias = dict[str, Any]


class OutboxRow(tuple[Any, ...]):
    """By position and by name, as the driver's records."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        return tuple.__getitem__(self, _PLACES[place] if isinstance(place, str) else place)

    def but(self, **changes: object) -> "OutboxRow":
        return OutboxRow(changes.get(name, value) for name, value in zip(COLUMNS, self, strict=True))

    @property
    def size(self) -> int:
        return len(self[PAYLOAD] or b"") + len(self[HEADERS])


@dataclass(frozen=True)
class Lease:
    relay: UUID | None = None
    epoch: int = 0
    until: float = float("-inf")
    journaled: int = 0


@dataclass(frozen=True)
class Gate:
    shard: int
    destination: str
    key: str | None
    policy: str
    message_id: UUID
    sequence: int
    is_released: bool = False


@dataclass(frozen=True)
class Letter:
    row: OutboxRow
    state: str = "open"


@dataclass(frozen=True)
class Task:
    """A message on its way through the group."""

    id: UUID
    type: str
    source: str
    key: str | None
    lane: str | None
    position: int | None
    state: str
    held_by: str
    kind: str = "event"
    deliveries: int = 0
    attempt: int = 0
    version: int = 1
    run_no: int = 0
    worker: UUID | None = None
    token: UUID | None = None
    due_at: float | None = None
    waiting_for: str | None = None
    started_at: float | None = None
    payload: bytes | None = None
    content_type: str | None = None
    headers: str | None = None
    trace: str | None = None

    @property
    def place(self) -> tuple[str, str | None]:
        return self.source, self.lane
