"""Which tasks are meant."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Alternatives within a field, all fields together; an empty field means any.

    `since` and `until` bound the last change of the task; both are aware.
    """

    groups: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    message_ids: tuple[UUID, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    def parameters(self, before: datetime) -> tuple[object, ...]:
        """The nine parameters of the statements."""
        lists: tuple[Sequence[object], ...] = (
            self.groups,
            self.types,
            self.keys,
            self.owners,
            self.reasons,
            self.message_ids,
        )
        return (*(list(values) or None for values in lists), self.since, self.until, before)

    @property
    def is_narrow(self) -> bool:
        """Whether it says more than the group."""
        return self != TaskFilter(groups=self.groups)

    def as_json(self) -> dict[str, object]:
        """What was asked for, without the fields left open; for the audit table."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in given.items() if value not in ((), None)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value
