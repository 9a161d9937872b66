"""How far a group has read, by its own notes: what is left when the broker has forgotten."""

from collections.abc import Iterable, Mapping

from towpath.brokers.ports import Bookmark, Mark
from towpath.store.database import Database, store_errors
from towpath.store.statements import load


class OffsetStore:
    """Notes of one group. Partitions are named as in `Delivery.partition`: `topic:3`."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._sql = load("offsets", database.schema)
        self._group = group

    async def note(self, marks: Mapping[str, Mark]) -> None:
        """Remember these, in one statement. Raises StoreUnavailable."""
        columns = ([mark.position for mark in marks.values()], [mark.refusal for mark in marks.values()])
        with store_errors():
            await self._database.pool.execute(
                self._sql["note_offsets"], self._group, *_columns(marks), *columns
            )

    async def take(self, partitions: Iterable[str]) -> dict[str, Bookmark]:
        """What is noted; a person's word is given out once. Raises StoreUnavailable."""
        with store_errors():
            rows = await self._database.pool.fetch(
                self._sql["take_bookmarks"], self._group, *_columns(partitions)
            )
        return {
            f"{row['address']}:{row['partition']}": Bookmark(row["position"], row["word"]) for row in rows
        }


def _columns(partitions: Iterable[str]) -> tuple[list[str], list[int]]:
    split = [name.rpartition(":") for name in partitions]
    return [address for address, _, _ in split], [int(number) for _, _, number in split]
