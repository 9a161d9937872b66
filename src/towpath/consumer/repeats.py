"""Messages that come again after they were settled: looked up before they are claimed.

Whoever reads a topic anew, or takes over from a member that could not commit its offsets, meets thousands
of them. A claim that loses costs a write transaction and a look at what it lost to; here one look answers
for all that was received together, and they take no place in a lane. Looked at is what the broker says it
delivered before, and what comes while most of those looked at last turned out to be settled.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from asyncpg.pgproto import pgproto

from towpath.brokers.ports import Delivery, Subscriber
from towpath.consumer.upkeep import StoreWatch
from towpath.errors import StoreUnavailable
from towpath.messages.headers import CE_ID
from towpath.store.claims import ClaimStore
from towpath.store.work import Standing

_SHARE: Final = 0.5
"""While so many of those looked at were settled before, the next are looked up first."""


class Repeats:
    """Sifts what one worker receives."""

    def __init__(self, subscriber: Subscriber, claims: ClaimStore, watch: StoreWatch) -> None:
        self._subscriber = subscriber
        self._claims = claims
        self._watch = watch
        self._are_expected = False

    def note(self, settled_count: int, count: int) -> None:
        """Of `count` messages looked at together so many had been settled before."""
        self._are_expected = settled_count >= count * _SHARE

    async def sift(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Acknowledge those that were settled before; returns the others, in their order."""
        if not self._are_expected and not any(delivery.is_redelivered for delivery in deliveries):
            return deliveries
        ids = {delivery: id_ for delivery in deliveries if (id_ := _id_of(delivery)) is not None}
        try:
            findings = await self._claims.findings(list(ids.values()))
        except StoreUnavailable as error:
            self._watch.failed(error)
            self._are_expected = False
            return deliveries
        settled = {delivery for delivery, id_ in ids.items() if findings[id_].standing is Standing.SETTLED}
        self.note(len(settled), len(deliveries))
        self._subscriber.acknowledge(settled)
        return [delivery for delivery in deliveries if delivery not in settled]


def _id_of(delivery: Delivery) -> UUID | None:
    """The id that the message names; None where it has to be read to be known."""
    named = [value for name, value in delivery.headers if name == CE_ID]
    if len(named) != 1 or delivery.death is not None:
        return None
    try:
        id_: UUID = pgproto.UUID(named[0].decode())
    except ValueError:
        return None
    return id_
