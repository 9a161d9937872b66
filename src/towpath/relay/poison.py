"""Messages the broker will not take: out of the way, in one transaction with the progress past them."""

from __future__ import annotations

from collections import defaultdict

from towpath.errors import MessageRefused
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import JournalWriter, entry_of
from towpath.relay.link import link_errors
from towpath.relay.progress import Batch, Shards, progress_before
from towpath.relay.publish import Verdicts, is_copy, is_pointer
from towpath.store.outbox import ID, SHARD, Server
from towpath.store.unpublished import Unpublished


class Poison:
    """Puts given-up messages aside.

    A message with a body goes to the dead-letter catalog. A dead letter's copy is noted on its row:
    it never becomes a dead letter itself. The message of a submitted task, which has no body, is
    only skipped: its row is still there, and the reaper runs it.
    """

    def __init__(self, journal: JournalWriter, store: Unpublished, shards: Shards, hooks: RelayHooks) -> None:
        self._journal = journal
        self._store = store
        self._shards = shards
        self._hooks = hooks
        self.count = 0

    async def put_aside(self, batch: Batch, verdicts: Verdicts, server: Server) -> None:
        """Write catalog rows and journal, one transaction per shard; a lost lease drops the shard.

        Raises StoreUnavailable: nothing of the shard was written, publish it again. MemoryStale as
        the journal does.
        """
        by_shard: dict[int, list[tuple[int, MessageRefused, int]]] = defaultdict(list)
        for index, refusal, tries in verdicts.refused:
            by_shard[batch.rows[index][SHARD]].append((index, refusal, tries))
        for number, given_up in by_shard.items():
            if await self._put_aside_in_shard(batch, number, given_up, verdicts.left.get(number), server):
                for index, refusal, tries in given_up:
                    self.count += 1
                    row, message = batch.rows[index], batch.messages[index]
                    is_buried = not is_copy(row) and not is_pointer(row)
                    self._hooks.put_aside(message, refusal, tries, is_buried=is_buried)

    async def _put_aside_in_shard(
        self,
        batch: Batch,
        number: int,
        given_up: list[tuple[int, MessageRefused, int]],
        left: list[int] | None,
        server: Server,
    ) -> bool:
        shard = self._shards.get(number)
        part = batch.parts[number]
        if shard is None or shard.stamp != part.stamp:
            return False
        done = progress_before(part, batch.rows[left[0]][ID]) if left else part.done
        entry = entry_of({number: done}, {number: shard.epoch})
        with link_errors():
            connection = await self._journal.connection()
            transaction = connection.transaction()
            await transaction.start()
            try:
                appended = await self._journal.append(connection, entry, server)
                if appended.seq is not None:
                    for index, refusal, tries in given_up:
                        row, message = batch.rows[index], batch.messages[index]
                        if is_copy(row):
                            await self._store.mark_copy(connection, row, refusal)
                        elif not is_pointer(row):
                            await self._store.bury(connection, row, message, refusal, tries)
            except BaseException:
                self._journal.drop_connection()  # rolls back, whatever state the connection is in
                raise
            await transaction.commit()
        self._journal.appended([shard], {number: done}, appended)
        return appended.seq is not None
