"""Messages that carry the script of their own handling, one type for each kind of effect, for one group."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from tests.acceptance.apps.messages import steps_address
from towpath.messages import event, task

Kind: TypeAlias = Literal[
    "transactional", "plain", "batch", "idempotent", "at_most_once", "submitted", "requested", "garbled"
]
Fate: TypeAlias = Literal["succeeds", "fails", "is_rejected", "dies", "hangs", "lingers", "is_cancelled"]
"""`fails`: the first two attempts; `dies`: until it is cured; `hangs`: the first attempt runs into its
timeout; `lingers`: longer than its message may stay unacknowledged; `is_cancelled`: by its producer."""

RETENTION_VARIABLE: Final = "TOWPATH_TEST_RETENTION"
"""How long the group keeps finished rows."""
TASKS: Final = frozenset({"submitted", "requested"})
FATES: Final[dict[Kind, tuple[Fate, ...]]] = {
    "transactional": ("fails", "is_rejected", "dies", "hangs"),
    "plain": ("is_rejected", "dies"),
    "batch": ("dies",),
    "idempotent": ("fails", "is_rejected", "dies", "hangs", "lingers"),
    "at_most_once": ("fails", "is_rejected", "dies", "hangs"),
    "submitted": ("fails", "is_rejected", "dies", "is_cancelled"),
    "requested": (),
    "garbled": (),
}
"""Beside success."""


class Messages(NamedTuple):
    """The classes of one group."""

    transactional: type[Any]
    plain: type[Any]
    """For a plain function, in a thread."""
    batch: type[Any]
    idempotent: type[Any]
    at_most_once: type[Any]
    submitted: type[Any]
    requested: type[Any]
    """The same task when its `request` is the same."""
    garbled: type[Any]


def declare(group: str, *, is_reader: bool = False) -> Messages:
    """The messages of a group; all at one address, so `n` orders those of one key whatever their kind.

    A reader expects more of a `garbled` message than its producer puts into it.
    """
    address = steps_address(group)

    @dataclass(frozen=True)
    class Scripted:
        key: str
        n: int
        fate: Fate = "succeeds"

    def scripted(name: str) -> type[Any]:
        return event(f"faults.{name}", destination=address, key="key")(
            dataclass(frozen=True)(type(name.title(), (Scripted,), {"__annotations__": {}}))
        )

    @task("faults.submitted", group=group, key="key", destination=address)
    @dataclass(frozen=True)
    class Submitted(Scripted):
        pass

    @task("faults.requested", group=group, key="key", destination=address, unique=("request",))
    @dataclass(frozen=True)
    class Requested(Scripted):
        request: str = ""

    garbled = scripted("garbled")
    if is_reader:

        @event("faults.garbled", destination=address, key="key")
        @dataclass(frozen=True)
        class Garbled:
            key: str
            missing: int

        garbled = Garbled
    return Messages(
        *map(scripted, ("transactional", "plain", "batch", "idempotent", "at_most_once")),
        Submitted,
        Requested,
        garbled,
    )
