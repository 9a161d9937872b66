"""A Postgres snapshot as text, with just the algebra that reading by snapshot difference needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions were finished at one moment: `xmin:xmax:xid,xid,…`.

    Snapshots of one server are ordered in time: what a later one hides, an earlier one hides too.
    """

    text: str

    @property
    def xmax(self) -> int:
        """The first transaction id not yet given out."""
        return int(self.text.split(":", 2)[1])

    @property
    def in_progress(self) -> tuple[int, ...]:
        """Transactions below `xmax` that had not finished."""
        listed = self.text.split(":", 2)[2]
        return tuple(map(int, listed.split(","))) if listed else ()

    @property
    def bounds(self) -> tuple[str, str]:
        """`xmax` and the transactions in progress as the statements take them."""
        _, xmax, listed = self.text.split(":", 2)
        return xmax, f"{{{listed}}}"

    def sees(self, xid: int) -> bool:
        """Whether the transaction had finished: what `pg_visible_in_snapshot` answers."""
        return xid < self.xmax and xid not in self.in_progress

    @property
    def age_order(self) -> tuple[int, int]:
        """Grows from earlier to later snapshots of one server."""
        return self.xmax, -len(self.in_progress)
