"""Which dead letters are meant."""

from dataclasses import dataclass, fields
from datetime import datetime
from uuid import UUID

from towpath.errors import UsageError

STAGES = ("publish", "decode", "handle", "broker")
STATES = ("open", "replayed", "discarded")
_MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Filter:
    """Alternatives within a field, all fields together; an empty field means any.

    `since` and `until` bound the last death; both are aware. Raises UsageError for values that no
    row can have.
    """

    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    message_ids: tuple[UUID, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in STAGES:
                raise UsageError(f"there is no stage {stage!r}, only {', '.join(STAGES)}")
        for number in self.ids:
            if not 0 < number <= _MAX_ID:
                raise UsageError(f"{number} is not a dead-letter id")
        for instant in (self.since, self.until):
            if instant is not None and instant.tzinfo is None:
                raise UsageError(f"{instant.isoformat()} has no time zone: append Z or an offset")

    @property
    def is_empty(self) -> bool:
        """Whether every dead letter is meant."""
        return self == Filter()

    def parameters(self) -> tuple[object, ...]:
        """The ten parameters of the catalog's statements."""
        lists = (self.groups, self.types, self.reasons, self.fingerprints, self.stages, self.keys)
        many: list[object] = [list(values) or None for values in (*lists, self.ids, self.message_ids)]
        return (*many, self.since, self.until)

    def as_json(self) -> dict[str, object]:
        """What was asked for, without the fields left open; for the audit table."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in given.items() if value not in ((), None)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [item if isinstance(item, int) else str(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value
