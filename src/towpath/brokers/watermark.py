"""How far a partition is settled: pure bookkeeping over the offsets that were received."""

from collections import deque
from enum import Enum


class _State(Enum):
    OUTSTANDING = 1
    SETTLED = 2
    RELEASED = 3


class Watermark:
    """Received offsets of one partition under one assignment, and the offset that may be committed.

    Offsets come ascending but with gaps (transactions, compaction), are settled in any order, and may
    come again after a seek. The position advances over received offsets only, never over a number
    that might still arrive, and never past one that is outstanding or released.
    """

    __slots__ = ("_highest", "_order", "_states")

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}
        self._order: deque[int] = deque()
        self._highest: int | None = None

    @property
    def position(self) -> int | None:
        """The offset to commit (the next one to read after a restart); None while nothing was received."""
        if self._order:
            return self._order[0]
        return None if self._highest is None else self._highest + 1

    def receive(self, offset: int) -> bool:
        """Note an arrival. False when it is known already and must not be handed out again."""
        if self._highest is None or offset > self._highest:
            self._states[offset] = _State.OUTSTANDING
            self._order.append(offset)
            self._highest = offset
            return True
        state = self._states.get(offset)
        if state is _State.RELEASED:
            self._states[offset] = _State.OUTSTANDING
            return True
        return False

    def skip_to(self, offset: int) -> None:
        """Nothing below `offset` will arrive any more, also what was released there."""
        if self._highest is None or self._highest < offset - 1:
            self._highest = offset - 1
        for known in self._order:
            if known >= offset:
                break
            if self._states[known] is _State.RELEASED:
                self._states[known] = _State.SETTLED
        self._advance()

    def acknowledge(self, offset: int) -> bool:
        """Settle an offset. False when it was not outstanding (a repeat, or never received)."""
        if self._states.get(offset) is not _State.OUTSTANDING:
            return False
        self._states[offset] = _State.SETTLED
        self._advance()
        return True

    def release(self, offset: int) -> bool:
        """Hand an offset back, so that its next arrival counts as new. False when it was not outstanding."""
        if self._states.get(offset) is not _State.OUTSTANDING:
            return False
        self._states[offset] = _State.RELEASED
        return True

    def _advance(self) -> None:
        while self._order and self._states[self._order[0]] is _State.SETTLED:
            del self._states[self._order.popleft()]
