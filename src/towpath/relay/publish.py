"""Publishing a batch: who may, by when, and what a result means for each message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.ports import OutboundMessage, Publisher, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused
from towpath.relay.hooks import RelayHooks
from towpath.relay.options import RelayOptions
from towpath.relay.progress import Batch, Shards
from towpath.store.outbox import ID, KIND, PAYLOAD, SHARD, Row

_HOPELESS: Final = frozenset({"too_large", "malformed_header"})
"""Reasons that no further try can change."""


@dataclass(slots=True)
class Verdicts:
    """A batch sorted by what comes next."""

    left: dict[int, list[int]] = field(default_factory=dict)
    """Indexes to publish again, by shard, in order."""
    refused: list[tuple[int, MessageRefused, int]] = field(default_factory=list)
    """Messages given up: index, refusal, tries."""
    retry_refused: set[int] = field(default_factory=set)
    """Shards with a refused message that may be tried again."""


def is_copy(row: Row) -> bool:
    """Whether the row is a dead letter's copy for the broker."""
    return bool(row[KIND] == "copy")


def is_pointer(row: Row) -> bool:
    """Whether the row is a submitted task's message, whose body is in the task's own row."""
    return bool(row[KIND] == "task" and row[PAYLOAD] is None)


def judge(batch: Batch, result: PublishResult, shards: Shards, attempts: int) -> Verdicts:
    """Sort a batch by its result, and count the tries of refused messages.

    A copy of a dead letter that meets a configuration failure counts as refused: copies must not
    hold up events.
    """
    verdicts = Verdicts()
    refused = {**result.refused, **batch.refused}
    acknowledged = result.acknowledged
    if len(acknowledged) == len(batch.messages) and not refused:
        return verdicts
    for index, row in enumerate(batch.rows):
        if index in acknowledged:
            continue
        number = row[SHARD]
        refusal = refused.get(index)
        if refusal is None and result.configuration is not None and is_copy(row):
            refusal = MessageRefused("configuration", str(result.configuration))
        if refusal is not None:
            shard = shards.get(number)
            tries = 1
            if shard is not None:
                tries = shard.tries[row[ID]] = shard.tries.get(row[ID], 0) + 1
            if tries >= attempts or refusal.reason in _HOPELESS:
                verdicts.refused.append((index, refusal, tries))
                continue
            verdicts.retry_refused.add(number)
        verdicts.left.setdefault(number, []).append(index)
    return verdicts


class Sender:
    """Offers windows to a broker within a deadline; turns every failure into a result."""

    def __init__(self, publisher: Publisher, options: RelayOptions, hooks: RelayHooks) -> None:
        self._publisher = publisher
        self._deadline = options.publish_deadline
        self._hooks = hooks
        self._is_started = False

    async def connect(self) -> PublishResult | None:
        """Open the connection before the first window; a result when that failed."""
        if not self._is_started:
            try:
                await self._publisher.start()
            except BrokerUnavailable as error:
                return PublishResult(unavailable=error)
            except ConfigurationError as error:
                return PublishResult(configuration=error)
            self._is_started = True
        return None

    async def send(self, batch: Batch) -> PublishResult:
        """Publish the batch's messages but those already refused. At most the publish deadline."""
        messages, indexes = _sendable(batch)
        if not messages:
            return PublishResult()
        started = time.monotonic()
        with self._hooks.window(messages) as sent:
            result = await self._offer(messages)
            sent.acknowledged = result.acknowledged
            sent.refused = {index: refusal.reason for index, refusal in result.refused.items()}
            problem = result.unavailable or result.configuration
            sent.error = None if problem is None else problem.code
        if indexes is not None:
            result.acknowledged = {indexes[index] for index in result.acknowledged}
            result.refused = {indexes[index]: refusal for index, refusal in result.refused.items()}
        self._hooks.sent(batch, result.acknowledged, result.refused.values(), time.monotonic() - started)
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


def _sendable(batch: Batch) -> tuple[list[OutboundMessage], list[int] | None]:
    """The messages to send, with their indexes in the batch where some are left out.

    What a refused row withholds: later messages of its key, which would overtake it.
    """
    if not batch.refused:
        return batch.messages, None
    messages: list[OutboundMessage] = []
    indexes: list[int] = []
    withheld = {(batch.messages[index].address, batch.messages[index].key) for index in batch.refused}
    for index, message in enumerate(batch.messages):
        if index not in batch.refused and (
            message.key is None or (message.address, message.key) not in withheld
        ):
            messages.append(message)
            indexes.append(index)
    return messages, indexes
