"""Which delivery tags of a channel are to be acknowledged, and the frames that say so.

A delivery that is given back has no frame: a nack would bring it again behind later ones that are
on their way already, so it stays open until the channel is closed, which puts back everything that
is open in its first order.
"""

import asyncio
from collections import deque

import aiormq


class Settling:
    """Tags of one channel. `multiple` acknowledges a whole run, but only where nothing before it is open."""

    def __init__(self, channel: aiormq.Channel) -> None:
        self._channel = channel
        self._order: deque[int] = deque()
        self._outstanding: set[int] = set()
        self._acknowledged: set[int] = set()
        self._released: set[int] = set()
        self._sending = asyncio.Lock()

    def receive(self, tag: int) -> None:
        """Note an arrival; tags ascend."""
        self._order.append(tag)
        self._outstanding.add(tag)

    def acknowledge(self, tag: int) -> bool:
        """Mark for acknowledgement. False when it was settled already."""
        if tag not in self._outstanding:
            return False
        self._outstanding.discard(tag)
        self._acknowledged.add(tag)
        return True

    def release(self, tag: int) -> bool:
        """Leave it open for good. False when it was settled already."""
        if tag not in self._outstanding:
            return False
        self._outstanding.discard(tag)
        self._released.add(tag)
        return True

    async def send(self, *, is_waiting: bool = False) -> None:
        """Write what was marked; with `is_waiting` return when it has left the process.

        A second call waits for the first: acknowledged runs must reach the broker in order.
        """
        async with self._sending:
            acknowledged, self._acknowledged = self._acknowledged, set()
            prefix_end = self._advance(acknowledged)
            if prefix_end is not None:
                await self._channel.basic_ack(prefix_end, multiple=True, wait=is_waiting)
            for tag in sorted(acknowledged):
                await self._channel.basic_ack(tag, wait=is_waiting)

    def _advance(self, acknowledged: set[int]) -> int | None:
        """Take the settled tags off the front; the last of them that is to be acknowledged in one go."""
        prefix_end = None
        while self._order and not self._is_open(self._order[0]):
            tag = self._order.popleft()
            if tag in acknowledged:
                acknowledged.discard(tag)
                prefix_end = tag
        return prefix_end

    def _is_open(self, tag: int) -> bool:
        return tag in self._outstanding or tag in self._released
