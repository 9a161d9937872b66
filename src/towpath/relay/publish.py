"""Publishing a batch: who may, by when, and what a result means for each message."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.ordering import order_key
from towpath.brokers.ports import OutboundMessage, Publisher, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, TopologyError
from towpath.relay.hooks import RelayHooks
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Batch
from towpath.relay.provenance import Provenance
from towpath.store.canary import is_canary
from towpath.store.outbox import DESTINATION, KEY, KIND, PAYLOAD, SHARD, OnPoison, Row
from towpath.store.parking import Gate

_HOPELESS: Final = frozenset({"too_large", "malformed_header"})
"""Reasons that no further try can change."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A message that is not tried any more."""

    index: int
    refusal: MessageRefused
    tries: int
    policy: OnPoison
    """What waits for a person's decision about it."""


@dataclass(slots=True)
class Verdicts:
    """A batch sorted by what comes next."""

    left: dict[int, list[int]] = field(default_factory=dict)
    """Indexes to publish again, by shard, in order."""
    refused: list[GivenUp] = field(default_factory=list)
    """Messages given up."""
    parked: dict[int, Gate] = field(default_factory=dict)
    """Messages that wait behind a gate, by index."""
    retry_refused: set[int] = field(default_factory=set)
    """Shards with a refused message that may be tried again."""

    def give_back(self, shard: int, indexes: Sequence[int]) -> None:
        """What should have been put aside is to be published again: it could not be written down."""
        self.left[shard] = sorted([*self.left.get(shard, ()), *indexes])
        self.retry_refused.add(shard)


def is_copy(row: Row) -> bool:
    """Whether the row is a dead letter's copy for the broker."""
    return bool(row[KIND] == "copy")


def is_pointer(row: Row) -> bool:
    """Whether the row is a submitted task's message, whose body is in the task's own row."""
    return bool(row[KIND] == "task" and row[PAYLOAD] is None)


def judge(
    batch: Batch,
    result: PublishResult,
    attempts: int,
    *,
    tries_of: Callable[[Row], int],
    policies: Mapping[str, OnPoison],
) -> Verdicts:
    """Sort a batch by its result; `tries_of` counts one more try of a refused message.

    A copy of a dead letter that meets a configuration failure counts as refused: copies must not
    hold up events. Where a given-up message makes others wait, later ones of the batch are not
    given up as well but left: they are parked, or stay unread, from then on. One that blocks its
    shard is given up when nothing before it is left: it would be read again with that.
    """
    verdicts = Verdicts()
    refused = {**result.refused, **batch.refused}
    acknowledged = result.acknowledged
    if len(acknowledged) == len(batch.messages) and not refused:
        return verdicts
    waiting: set[object] = set()
    for index, row in enumerate(batch.rows):
        if index in acknowledged:
            continue
        if index in refused and is_canary(row):
            continue  # it is missed where it is looked for, and nothing waits for it
        if index in batch.parked:
            verdicts.parked[index] = batch.parked[index]
            continue
        number = row[SHARD]
        lane = (number, row[DESTINATION], row[KEY])
        refusal = refused.get(index)
        if refusal is None and result.configuration is not None and is_copy(row):
            refusal = MessageRefused("configuration", str(result.configuration))
        if refusal is not None and number not in waiting and lane not in waiting:
            tries = tries_of(row)
            policy = _policy(row, policies)
            is_over = tries >= attempts or refusal.reason in _HOPELESS
            if is_over and not (policy == "block" and number in verdicts.left):
                verdicts.refused.append(GivenUp(index, refusal, tries, policy))
                if policy != "park":
                    waiting.add(number if policy == "block" else lane)
                continue
            verdicts.retry_refused.add(number)
        verdicts.left.setdefault(number, []).append(index)
    return verdicts


def _policy(row: Row, policies: Mapping[str, OnPoison]) -> OnPoison:
    """What the destination asks for, where there will be a dead letter to decide about and a key to hold."""
    if is_copy(row) or is_pointer(row):
        return "park"
    policy = policies.get(row[DESTINATION], "park")
    return "park" if policy == "park_key" and row[KEY] is None else policy


class Sender:
    """Offers windows to a broker within a deadline; turns every failure into a result."""

    def __init__(
        self, publisher: Publisher, provenance: Provenance, options: RelayOptions, hooks: RelayHooks
    ) -> None:
        self._publisher = publisher
        self._provenance = provenance
        self._deadline = options.publish_deadline
        self._hooks = hooks
        self.is_started = False
        """Whether there is a connection, or was at the last publish."""
        publisher.keep_partitions(provenance.keep_partitions)

    async def connect(self) -> PublishResult | None:
        """Open the connection before the first window and after an outage; a result when that failed.

        Then it is also compared with the broker that this database was published to before.
        """
        if not self.is_started:
            try:
                await self._publisher.start()
                await self._provenance.check(self._publisher)
            except BrokerUnavailable as error:
                return PublishResult(unavailable=error)
            except ConfigurationError as error:
                return PublishResult(configuration=error)
            self.is_started = True
        return None

    async def send(self, batch: Batch) -> PublishResult:
        """Publish the batch's messages but those refused already or parked. At most the publish deadline."""
        messages, indexes = _sendable(batch)
        if not messages:
            return PublishResult()
        started = time.monotonic()
        with self._hooks.window(messages) as sent:
            result = await self._offer(messages)
            sent.acknowledged = result.acknowledged
            sent.refused = {index: refusal.reason for index, refusal in result.refused.items()}
            problem = result.unavailable or result.configuration
            if result.unavailable is not None:
                self.is_started = False
            sent.error = None if problem is None else problem.code
        if indexes is not None:
            result.acknowledged = {indexes[index] for index in result.acknowledged}
            result.refused = {indexes[index]: refusal for index, refusal in result.refused.items()}
        seconds = time.monotonic() - started
        self._hooks.sent(batch, indexes or range(len(messages)), result, sent.error, seconds)
        _excuse_canaries(batch, result)
        return result

    async def _offer(self, messages: Sequence[OutboundMessage]) -> PublishResult:
        try:
            return await self._publisher.publish(messages, timeout_seconds=self._deadline)
        except BrokerUnavailable as error:
            return PublishResult(unavailable=error)
        except ConfigurationError as error:
            return PublishResult(configuration=error)

    async def aclose(self) -> None:
        """Close the connection to the broker."""
        await self._publisher.aclose()


def _excuse_canaries(batch: Batch, result: PublishResult) -> None:
    """A destination that is missing for canaries alone is not the broker's failure."""
    if not isinstance(result.configuration, TopologyError):
        return
    left = set(range(len(batch.rows))) - result.acknowledged - result.refused.keys() - batch.refused.keys()
    left -= batch.parked.keys()
    canaries = {index for index in left if is_canary(batch.rows[index])}
    result.refused.update(dict.fromkeys(canaries, MessageRefused("configuration", str(result.configuration))))
    if canaries == left:
        result.configuration = None


def _sendable(batch: Batch) -> tuple[list[OutboundMessage], list[int] | None]:
    """The messages to send, with their indexes in the batch where some are left out.

    What a refused row withholds: later messages of its key, which would overtake it.
    """
    if not batch.refused and not batch.parked:
        return batch.messages, None
    messages: list[OutboundMessage] = []
    indexes: list[int] = []
    withheld: set[tuple[str, str]] = set()
    for index, message in enumerate(batch.messages):
        key = order_key(message)
        if index in batch.parked or (key is not None and key in withheld):
            continue
        if index in batch.refused:
            if key is not None:
                withheld.add(key)
            continue
        messages.append(message)
        indexes.append(index)
    return messages, indexes
