"""What dead workers left at the broker: taken over, as many at once as is safe for their neighbours."""

from collections.abc import Callable, Mapping
from typing import Final
from uuid import UUID

from towpath.consumer.held import Held, Suspect
from towpath.consumer.lanes import Received
from towpath.consumer.pauses import Pauses
from towpath.consumer.roster import Roster
from towpath.consumer.slots import Slots
from towpath.consumer.suspects import Suspects
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.store.claims import Claimed, ClaimStore

_BUSY_SECONDS: Final = 0.1
_OUTAGE_SECONDS: Final = 0.5


class Takeovers:
    """Starts suspects among the messages that a worker holds."""

    def __init__(
        self,
        held: Held,
        *,
        claims: ClaimStore,
        roster: Roster,
        watch: StoreWatch,
        suspects: Suspects,
        slots: Slots,
        pauses: Pauses,
    ) -> None:
        self._held = held
        self._claims = claims
        self._roster = roster
        self._watch = watch
        self._suspects = suspects
        self._slots = slots
        self._pauses = pauses

    async def look(self, dispatch: Callable[[Claimed, Mapping[UUID, Received]], None]) -> None:
        """Start those that may; `dispatch` runs what was claimed."""
        with self._suspects.look("broker"):
            for suspect in list(self._held.suspects):
                received = suspect.received
                if suspect not in self._held.suspects:
                    continue  # given back to the broker while another was taken over
                if not self._held.is_current(received):
                    self._held.suspects.remove(suspect)
                    self._held.drop(received)
                elif self._may_start(suspect):
                    self._held.suspects.remove(suspect)
                    self._held.take_slot(received)
                    with self._suspects.claiming(suspect.start):
                        dispatch(await self._take_over(received), {received.work.id: received})

    def _may_start(self, suspect: Suspect) -> bool:
        type_ = suspect.received.work.type
        if self._pauses.holds(type_) or self._slots.obstacle(type_) is not None:
            return False
        young_count = self._roster.young_count(self._suspects.quiet_seconds)
        return self._suspects.may_start(suspect.start, young_count, "broker")

    async def _take_over(self, received: Received) -> Claimed:
        try:
            claimed = await self._claims.claim([received.work], takes_over=True)
        except StoreUnavailable as error:
            self._watch.failed(error)
            self._held.hold(received, _OUTAGE_SECONDS)
            return Claimed()
        if claimed.lost:
            self._held.hold(received, _BUSY_SECONDS)
        return claimed
