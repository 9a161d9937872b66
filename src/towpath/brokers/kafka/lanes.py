"""One partition's share of a window: record batches filled, handed over one by one, and their answers."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka

from towpath.brokers.kafka.config import RECORD_OVERHEAD_BYTES
from towpath.brokers.kafka.errors import TOO_LARGE, translate
from towpath.brokers.ordering import OrderKey, order_key
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused

_UNLIMITED: Final = 1 << 30
CLIENT_ERRORS: Final = (kafka.KafkaError, kafka.IllegalOperation, OSError, TimeoutError)


@dataclass(slots=True)
class Lane:
    """What is still to be written to one partition, in order."""

    topic: str
    partition: int
    max_message_bytes: int
    pending: deque[int] = field(default_factory=deque)
    withheld: set[OrderKey] = field(default_factory=set)
    """What comes after a refused message: it would overtake that."""
    batch_limit: int = _UNLIMITED
    is_refused: bool = False
    """A batch was refused as a whole: what is left goes through another producer."""


async def drain_lane(
    producer: AIOKafkaProducer,
    lane: Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    """Write one lane, batch by batch, until nothing is left or something is wrong."""
    while lane.pending and not lane.is_refused:
        taken, answer = await hand_over(producer, lane, window, result)
        await asyncio.wait([answer])
        take_in(lane, taken, answer, window, result)


async def hand_over(
    producer: AIOKafkaProducer, lane: Lane, window: Sequence[OutboundMessage], result: PublishResult
) -> tuple[list[int], "asyncio.Future[Any]"]:
    """Give the client the lane's next batch: what is in it, and its answer to come."""
    lane.is_refused = False
    batch, taken = _fill(producer, lane, window, result)
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if not taken:
        lane.pending.clear()
        answer.set_result(None)
        return taken, answer
    try:
        answer = await producer.send_batch(batch, lane.topic, partition=lane.partition)
    except CLIENT_ERRORS as error:
        answer.set_exception(error)
    return taken, answer


def take_in(
    lane: Lane,
    taken: list[int],
    answer: "asyncio.Future[Any]",
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    """Note what came of a batch, if that is known; a lane with an error not its own is left for now."""
    if not answer.done():
        answer.cancel()
        return
    error = kafka.KafkaConnectionError("given up by the client") if answer.cancelled() else answer.exception()
    if error is None:
        result.acknowledged.update(taken)
        lane.batch_limit = min(_UNLIMITED, lane.batch_limit * 2)
        return
    is_poisoned = isinstance(error, kafka.UnknownError) and any(
        window[index].key is None for index in taken
    )  # an unkeyed record in a compacted topic is refused with a code the client does not know
    if is_poisoned or isinstance(error, (*TOO_LARGE, kafka.CorruptRecordException)):
        lane.is_refused = True
        _split(taken, lane, window, result, error)
    elif isinstance(error, CLIENT_ERRORS):
        lane.pending.clear()
        _note(error, result)
    else:
        raise error


def _fill(
    producer: AIOKafkaProducer, lane: Lane, window: Sequence[OutboundMessage], result: PublishResult
) -> tuple[Any, list[int]]:
    """A batch of the lane's messages, as many as it takes, and their indexes."""
    while True:
        batch = producer.create_batch()
        taken, too_large = _append_all(batch, lane, window)
        if too_large is None:
            return batch, taken
        lane.pending.extendleft(reversed(taken))  # the batch has it, and nothing takes it out again
        size, limit = window[too_large].size_bytes, lane.max_message_bytes
        refusal = MessageRefused("too_large", f"{size} bytes, the limit is {limit}")
        _refuse(too_large, refusal, lane, window, result)


def _append_all(batch: Any, lane: Lane, window: Sequence[OutboundMessage]) -> tuple[list[int], int | None]:
    """Move messages from the lane into the batch while it takes them; their indexes.

    And the index of one that must not be sent, if there is one, which ends that.
    """
    taken: list[int] = []
    append, pending, limit = batch.append, lane.pending, lane.max_message_bytes
    published_at_ms = int(time.time() * 1000)
    while pending and len(taken) < lane.batch_limit:
        index = pending[0]
        message = window[index]
        if lane.withheld and order_key(message) in lane.withheld:
            pending.popleft()
            continue
        key = None if message.key is None else message.key.encode()
        headers = list(message.headers)
        record = append(timestamp=published_at_ms, key=key, value=message.payload, headers=headers)
        if record is None:
            break
        pending.popleft()
        if record.size > limit and _is_too_large(record.size, message, limit):
            return taken, index
        taken.append(index)
    return taken, None


def _is_too_large(record_bytes: int, message: OutboundMessage, limit: int) -> bool:
    """The limit counts what the sender gave; what the format adds has half of the room kept for it."""
    return message.size_bytes > limit or record_bytes > limit + RECORD_OVERHEAD_BYTES // 2


def _split(
    taken: list[int],
    lane: Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
    error: BaseException,
) -> None:
    """Refuse a lone message, or put a refused batch back to be tried in halves."""
    if len(taken) > 1:
        lane.pending.extendleft(reversed(taken))
        lane.batch_limit = len(taken) // 2
        return
    refusal = translate(error)
    if not isinstance(refusal, MessageRefused):
        refusal = MessageRefused("invalid_record", str(refusal))
    _refuse(taken[0], refusal, lane, window, result)


def _refuse(
    index: int,
    refusal: MessageRefused,
    lane: Lane,
    window: Sequence[OutboundMessage],
    result: PublishResult,
) -> None:
    result.refused[index] = refusal
    key = order_key(window[index])
    if key is not None:
        lane.withheld.add(key)


def _note(error: BaseException, result: PublishResult) -> None:
    """An error that is not one message's fault, into the result."""
    ours = translate(error)
    ours.__cause__ = error
    if isinstance(ours, ConfigurationError):
        result.configuration = ours
    else:
        result.unavailable = ours if isinstance(ours, BrokerUnavailable) else BrokerUnavailable(str(ours))
