"""The evidence of a run in the shapes that invariants look at."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final
from uuid import UUID

from tests.faults.evidence import Evidence, Letter, Task
from tests.faults.ledger import Called, Intended, Lapsed, Lost, Returned, Struck

_NEVER: Final = 2**63
_NOTICED_NS: Final = 15 * 10**9
"""A member that stood still notices later that its lease is gone."""


class Case:
    """The evidence, put into the shapes that the invariants look at."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def intended(self) -> Mapping[UUID, Intended]:
        """By message; of a task that was submitted again, the one that made it."""
        records = [each for each in self.evidence.records if isinstance(each, Intended)]
        records.sort(key=lambda each: (self._is_there(each), not each.is_repeat))
        return {each.id: each for each in records}

    @cached_property
    def committed(self) -> Mapping[UUID, Intended]:
        """Messages whose transaction is in the database."""
        return {id_: each for id_, each in self.intended.items() if self._is_there(each)}

    def _is_there(self, intended: Intended) -> bool:
        return intended.transaction in self.evidence.deeds and not intended.is_abandoned

    @cached_property
    def lost(self) -> Lost:
        """What a failover took back."""
        return next((each for each in self.evidence.records if isinstance(each, Lost)), Lost())

    @cached_property
    def known(self) -> Mapping[UUID, Intended]:
        """Those, and ghosts: of a transaction that a failover took back, and ended like any other."""
        ghosts = {
            id_: each
            for id_, each in self.intended.items()
            if each.transaction in self.lost.transactions and not each.is_abandoned
        }
        return {**ghosts, **self.committed}

    @cached_property
    def tasks(self) -> Mapping[UUID, Task]:
        return {task.id: task for task in self.evidence.tasks}

    @cached_property
    def letters(self) -> Mapping[UUID, list[Letter]]:
        found: dict[UUID, list[Letter]] = defaultdict(list)
        for letter in self.evidence.letters:
            found[letter.id].append(letter)
        return found

    @cached_property
    def calls(self) -> Mapping[UUID, list[Called]]:
        """In the order of time."""
        found: dict[UUID, list[Called]] = defaultdict(list)
        for record in self.evidence.records:
            if isinstance(record, Called):
                found[record.id].append(record)
        return {id_: sorted(calls, key=lambda call: call.at) for id_, calls in found.items()}

    def histories(self, id_: UUID) -> tuple[list[Called], list[Called]]:
        """The calls of a message as the database knew them that died, and as the one does that survives."""
        calls, lost = self.calls.get(id_, []), self.lost
        return (
            [call for call in calls if call.at <= lost.until],
            [call for call in calls if not lost.since <= call.at <= lost.until],
        )

    def ended_at(self, call: Called) -> int:
        """When its handler was through, or the end of time."""
        ends = self.returns.get((call.id, call.process), [])
        return min((at for at in ends if at >= call.at), default=_NEVER)

    def had_lost_its_lease(self, first: Called, taken_at: int, ended_at: int) -> bool:
        """Whether the first process says so, or a fault kept it from its lease or from its last record."""
        process = first.process
        return any(first.at < at < ended_at + _NOTICED_NS for at in self.lapses.get(process, [])) or any(
            each.since < taken_at and each.until > first.at
            for each in self.strikes
            if process in each.processes
        )

    @cached_property
    def returns(self) -> Mapping[tuple[UUID, str], list[int]]:
        """When a process was through with a call."""
        found: dict[tuple[UUID, str], list[int]] = defaultdict(list)
        for record in self.evidence.records:
            if isinstance(record, Returned):
                found[record.id, record.process].append(record.at)
        return found

    @cached_property
    def lapses(self) -> Mapping[str, list[int]]:
        """When a process noticed that its lease was gone."""
        found: dict[str, list[int]] = defaultdict(list)
        for record in self.evidence.records:
            if isinstance(record, Lapsed):
                found[record.process].append(record.at)
        return found

    @cached_property
    def strikes(self) -> Sequence[Struck]:
        """The faults."""
        return [record for record in self.evidence.records if isinstance(record, Struck)]

    @cached_property
    def published(self) -> Mapping[UUID, None]:
        """First appearances, in order."""
        return dict.fromkeys(self.evidence.published)

    @cached_property
    def ordered(self) -> frozenset[UUID]:
        """Messages whose order is promised: neither delayed, nor replayed, nor without a number."""
        replayed = {letter.id for letter in self.evidence.letters if letter.replays}
        return frozenset(
            id_
            for id_, each in self.committed.items()
            if each.kind != "requested" and not each.is_delayed and id_ not in replayed
        )
