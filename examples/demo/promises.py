"""What the producer promised: its own account, written down after each COMMIT or ROLLBACK."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias
from uuid import UUID

Group: TypeAlias = Literal["agents", "orders"]
Scene: TypeAlias = Literal["plain", "brief", "rejected", "outage", "exhausted"]

AGENTS: Final = "agents"
ORDERS: Final = "orders"
INVOICE_LIMIT_CENTS: Final = 100_000
"""What the table of invoices takes until somebody mends its constraint."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One message that was written in a business transaction."""

    message_id: UUID
    group: Group
    key: str
    step: int
    """Counts the committed messages of the key from 1."""
    scene: Scene
    is_committed: bool
    invoice_cents: int | None = None
    """Of a paid order: what has to be billed, exactly once."""

    @property
    def end(self) -> str:
        """The state it has to end in."""
        return "FAILED" if self.scene == "rejected" else "SUCCEEDED"

    @property
    def dies_first(self) -> bool:
        """Whether it has to be replayed before it can succeed."""
        return self.scene == "exhausted"


@dataclass(frozen=True, slots=True)
class Promises:
    """Everything one run of the producer did."""

    promises: tuple[Promise, ...]
    transaction_count: int
    rolled_back_count: int
    savepoint_count: int
    """Committed transactions that gave up a part of their work."""
    repeat_count: int
    """Submits that repeated an earlier one and were given its task."""
    seconds: float

    @property
    def committed(self) -> tuple[Promise, ...]:
        """What must come true."""
        return tuple(promise for promise in self.promises if promise.is_committed)

    @property
    def rolled_back(self) -> tuple[Promise, ...]:
        """What must never be seen."""
        return tuple(promise for promise in self.promises if not promise.is_committed)

    @property
    def invoices_cents(self) -> dict[str, int]:
        """The amount to be billed, by order."""
        return {each.key: each.invoice_cents for each in self.committed if each.invoice_cents is not None}

    @property
    def dead_count(self) -> int:
        """How many dead letters the script leads to."""
        too_large = sum(cents > INVOICE_LIMIT_CENTS for cents in self.invoices_cents.values())
        return too_large + sum(promise.dies_first for promise in self.committed)


def write(path: Path, promises: Promises) -> None:
    """Put the file in place at once, so that a reader never sees half of it."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(promises), default=str))
    scratch.rename(path)


def read(path: Path) -> Promises:
    """What `write` wrote."""
    values = json.loads(path.read_text())
    return Promises(promises=tuple(_promises(values.pop("promises"))), **values)


def _promises(rows: Iterable[dict[str, object]]) -> Iterable[Promise]:
    for row in rows:
        message_id = UUID(str(row.pop("message_id")))
        yield Promise(message_id=message_id, **row)  # type: ignore[arg-type]  # its own asdict
