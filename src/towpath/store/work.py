"""One unit of work as the consumer engine holds it, whether a broker or the database brought it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from uuid import UUID

import msgspec

from towpath.errors import DecodeError
from towpath.messages import Envelope, Headers, read_envelope
from towpath.messages.headers import is_reserved


class Work(msgspec.Struct, eq=False):
    """A message on its way through one consumer group. Identity, not value."""

    id: UUID
    type: str
    kind: str
    source: str
    key: str | None
    lane: str | None
    """What runs one after another: the key, the partition, or None for no order."""
    position: int | None
    payload: bytes | None
    content_type: str | None
    headers: Headers
    trace: str | None
    """The traceparent of its creation."""
    envelope: Envelope | None = None
    """As the broker brought it; work from the database reads its stored headers when it runs."""
    has_body: bool = True
    """Whether it brought its body. False: body and headers are in its row; the claim fills them in."""
    is_from_broker: bool = True
    trigger: str = "broker"
    """What started it: `broker`, or why it had waited."""
    token: UUID | None = None
    attempt: int = 0
    """Attempts spent before this one."""
    version: int = 1
    deliveries: int = 1
    """Starts since the last outcome, this one included."""
    run_no: int = 0
    age_seconds: float = 0.0
    """Since the first start of this run, when it was claimed."""
    claimed_at: float = 0.0
    """Monotonic."""
    deadline_seconds: float | None = None
    """Left until its deadline when it was claimed, by the database clock; None: it has none."""
    created_at: datetime | None = None
    owner: str = ""
    is_cancel_requested: bool = False
    is_effect_begun: bool = False
    """An at-most-once effect was marked in this attempt: it may have happened."""


class Standing(Enum):
    """What a lost claim or a dropped result finds in the database."""

    SETTLED = "settled"
    """Finished, waiting or parked, or running from the database: acknowledge."""
    BUSY = "busy"
    """Running under a living worker and held by the broker: hold the lane and ask again."""
    ABANDONED = "abandoned"
    """Its worker is dead: claim it again."""
    MISSING = "missing"
    """No row."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the database says about a message that could not be claimed."""

    standing: Standing
    deliveries: int = 0
    """Starts without an outcome so far."""


def envelope_of(work: Work) -> Envelope:
    """The envelope of work that starts from its row: its stored wire headers, else its columns."""
    try:
        return read_envelope(work.headers)
    except DecodeError:
        return Envelope(
            message_id=work.id,
            type=work.type,
            source=work.source,
            occurred_at=work.created_at or datetime.fromtimestamp(0, UTC),
            content_type=work.content_type or "application/octet-stream",
            kind="task" if work.kind == "task" else "event",
            sequence=work.position,
            headers=tuple(pair for pair in work.headers if not is_reserved(pair[0])),
        )
