"""One window on its way: what may be written next, what is in flight, what became of it."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from towpath.brokers.ordering import OrderKey, chains, order_key
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.errors import ConfigurationError, MessageRefused


class Work:
    """The ledger of a window. A message of a key becomes startable when the one before it is confirmed."""

    def __init__(self, window: Sequence[OutboundMessage], result: PublishResult) -> None:
        self.window = window
        self.result = result
        self.excluded: set[str] = set()
        """Addresses that a person must see to."""
        self.in_flight: dict[int, int] = {}
        """Index → bytes, for what was written and is not settled."""
        self.in_flight_bytes = 0
        self._startable: deque[int] = deque()
        self._followers: dict[int, int] = {}
        self._withheld: set[OrderKey] = set()
        self._by_id: dict[str, list[int]] = {}

    def begin(self) -> None:
        """Start, or start again with what is not settled: nothing is in flight now."""
        self.in_flight.clear()
        self.in_flight_bytes = 0
        groups = sorted(chains(self.window, self.open_indexes()), key=len, reverse=True)
        self._startable = deque(group[0] for group in groups)
        self._followers = {first: second for group in groups for first, second in pairwise(group)}

    def open_indexes(self) -> list[int]:
        """What is still to be published, in order."""
        return [
            index
            for index, message in enumerate(self.window)
            if index not in self.result.acknowledged
            and index not in self.result.refused
            and message.address not in self.excluded
            and order_key(message) not in self._withheld
        ]

    @property
    def is_startable(self) -> bool:
        """Whether a message waits to be written."""
        return bool(self._startable)

    def next(self) -> int:
        """The next message to write."""
        return self._startable.popleft()

    def wrote(self, index: int, size_bytes: int) -> None:
        """It is in flight."""
        self.in_flight[index] = size_bytes
        self.in_flight_bytes += size_bytes

    def refuse_one(self, index: int, refusal: MessageRefused) -> None:
        """Note a refusal and hold back the later messages of its key."""
        self._landed(index)
        self.result.refused[index] = refusal
        key = order_key(self.window[index])
        if key is not None:
            self._withheld.add(key)

    def exclude(self, address: str, problem: ConfigurationError) -> None:
        """Leave out an address until a person has acted."""
        self.excluded.add(address)
        self.result.configuration = problem

    def confirm(self, numbers: Iterable[int]) -> None:
        """The broker has them: their followers may go."""
        refused, acknowledged = self.result.refused, self.result.acknowledged
        for index in numbers:
            self._landed(index)
            if index not in refused:
                acknowledged.add(index)
                follower = self._followers.get(index)
                if follower is not None:
                    self._startable.append(follower)

    def refuse(self, numbers: Iterable[int]) -> None:
        """The broker could not take them."""
        for index in numbers:
            self.refuse_one(index, MessageRefused("nacked", "the broker could not take it (basic.nack)"))

    def give_back(self, message_id: str, detail: str) -> None:
        """No queue wanted it. The confirm that follows changes nothing any more."""
        if not self._by_id:
            for index, message in enumerate(self.window):
                self._by_id.setdefault(str(message.message_id), []).append(index)
        for index in self._by_id.get(message_id, ()):
            if index in self.in_flight:
                self.refuse_one(index, MessageRefused("unroutable", detail))

    def _landed(self, index: int) -> None:
        self.in_flight_bytes -= self.in_flight.pop(index, 0)
