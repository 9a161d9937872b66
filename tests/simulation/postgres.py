"""What of Postgres the promise rests on: transaction ids, snapshots, row locks, a log that a crash cuts.

Tables are dictionaries with immutable values. A change is made in place and remembered, so that a
rollback, and a crash that loses the end of the log, take it back.
"""

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from towpath.store.snapshot import Snapshot

ASYNC_SECONDS = 0.6
"""After so long a commit that did not wait for the disk is on it."""
GONE: Any = object()
Table = dict[Any, Any]


class Blocked(Exception):
    """A row is locked by another transaction: ask again."""


@dataclass(eq=False)
class Transaction:
    """One, from its first statement to its end."""

    is_durable: bool = True
    xid: int | None = None
    undo: list[tuple[Table, Hashable, Any]] = field(default_factory=list)
    locks: set[Hashable] = field(default_factory=set)
    is_over: bool = False

    def put(self, table: Table, key: Hashable, value: Any) -> None:
        """Insert, update, or with GONE delete."""
        self.undo.append((table, key, table.get(key, GONE)))
        set_row(table, key, value)

    def back_to(self, savepoint: int) -> None:
        """Take back what was changed since."""
        while len(self.undo) > savepoint:
            set_row(*self.undo.pop())


@dataclass(frozen=True)
class Commit:
    """One in the log."""

    at: float
    xid: int
    undo: list[tuple[Table, Hashable, Any]]


def set_row(table: Table, key: Hashable, value: Any) -> None:
    if value is GONE:
        table.pop(key, None)
    else:
        table[key] = value


class Postgres:
    """Transactions over tables. Time is given from outside."""

    def __init__(self, clock: Callable[[], float], rnd: random.Random) -> None:
        self.clock = clock
        self._rnd = rnd
        self.next_xid = 100
        self.running: dict[int, Transaction] = {}
        self.locked: dict[Hashable, Transaction] = {}
        self.log: list[Commit] = []
        self._flushed = 0
        self.starts = 1
        self.timeline = 1
        self._open: dict[Transaction, None] = {}  # in their order, unlike a set
        self.asker: Any = None
        """The process whose statement runs."""

    def begin(self, *, is_durable: bool = True) -> Transaction:
        transaction = Transaction(is_durable)
        self._open[transaction] = None
        return transaction

    def xid(self, transaction: Transaction) -> int:
        """Its id, given out at its first write."""
        if transaction.xid is None:
            transaction.xid = self.next_xid
            self.next_xid += 1
            self.running[transaction.xid] = transaction
        return transaction.xid

    def lock(self, transaction: Transaction, key: Hashable) -> None:
        """Lock until the end. Raises Blocked."""
        if self.locked.setdefault(key, transaction) is not transaction:
            raise Blocked
        transaction.locks.add(key)

    def is_locked(self, key: Hashable, by_others_than: Transaction) -> bool:
        return self.locked.get(key, by_others_than) is not by_others_than

    def commit(self, transaction: Transaction) -> None:
        if transaction.xid is not None:
            self.log.append(Commit(self.clock(), transaction.xid, transaction.undo))
            if transaction.is_durable:
                self._flushed = len(self.log)
        self._end(transaction)

    def rollback(self, transaction: Transaction) -> None:
        if not transaction.is_over:
            transaction.back_to(0)
            self._end(transaction)

    def _end(self, transaction: Transaction) -> None:
        transaction.is_over = True
        self._open.pop(transaction, None)
        if transaction.xid is not None:
            self.running.pop(transaction.xid, None)
        for key in transaction.locks:
            self.locked.pop(key, None)

    def unseen(self, table: Table) -> set[Any]:
        """Keys of what transactions in progress have changed."""
        return {key for x in self.running.values() for changed, key, _ in x.undo if changed is table}

    def snapshot(self) -> Snapshot:
        running = sorted(self.running)
        xmin = running[0] if running else self.next_xid
        return Snapshot(f"{xmin}:{self.next_xid}:{','.join(map(str, running))}")

    def crash(self) -> None:
        """An immediate restart: what no commit waited for may be lost from some point on."""
        self._restart(
            max(
                self._flushed,
                sum(commit.at <= self.clock() - ASYNC_SECONDS for commit in self.log),
            )
        )

    def fail_over(self, lag_seconds: float) -> None:
        """A standby takes over that lacks the last commits, whether they were on a disk or not."""
        self.timeline += 1
        self._restart(sum(commit.at <= self.clock() - lag_seconds for commit in self.log))

    def _restart(self, kept: int) -> None:
        for transaction in list(self._open):
            self.rollback(transaction)
        kept = self._rnd.randint(kept, len(self.log))
        while len(self.log) > kept:
            for change in reversed(self.log.pop().undo):
                set_row(*change)
        self._flushed = len(self.log)
        self.next_xid = max((commit.xid for commit in self.log), default=99) + 1  # they are given out again
        self.starts += 1
