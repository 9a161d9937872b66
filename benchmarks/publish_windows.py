"""Publish made messages: `python -m benchmarks.publish_windows HOW URL ADDRESS COUNT`.

HOW is `towpath` (windows of 2,000 through the adapter of the URL's broker) or `aio-pika` (500 gathered
publishes at a time, with confirms). Message n has the id `UUID(int=n)`. Prints the seconds it took.
"""

import asyncio
import sys
import time
from uuid import UUID

import aio_pika

from benchmarks.orders import KEYS, PAYLOAD, TYPE
from benchmarks.stage import Message, Wire
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import OutboundMessage

WINDOW = 2000
GATHERED = 500


def made(address: str, count: int) -> list[OutboundMessage]:
    """A thousand keys in turn, the headers that the relay writes."""
    wire = Wire()
    return [
        OutboundMessage(
            message_id=UUID(int=number),
            sequence=number,
            address=address,
            type=TYPE,
            key=str(number % KEYS),
            routing_slot=number % 64,
            headers=wire.headers(Message(UUID(int=number), str(number % KEYS)), number),
            payload=PAYLOAD,
        )
        for number in range(1, count + 1)
    ]


async def by_towpath(url: str, messages: list[OutboundMessage]) -> float:
    """Seconds from the first window to the last confirm."""
    publisher = broker_from_url(url).publisher()
    await publisher.start()
    began = time.perf_counter()
    for start in range(0, len(messages), WINDOW):
        window = messages[start : start + WINDOW]
        result = await publisher.publish(window, timeout_seconds=120)
        if len(result.acknowledged) != len(window):
            raise SystemExit(f"not all were acknowledged: {result.unavailable or result.refused}")
    seconds = time.perf_counter() - began
    await publisher.aclose()
    return seconds


async def by_aio_pika(url: str, messages: list[OutboundMessage]) -> float:
    """Seconds from the first batch to the last confirm."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.get_exchange(messages[0].address)

    async def publish(message: OutboundMessage) -> None:
        await exchange.publish(
            aio_pika.Message(
                message.payload or b"",
                headers={name: value.decode() for name, value in message.headers},
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                message_id=str(message.message_id),
                type=message.type,
            ),
            routing_key=f"{message.routing_slot}.{message.type}",
        )

    began = time.perf_counter()
    for start in range(0, len(messages), GATHERED):
        await asyncio.gather(*(publish(message) for message in messages[start : start + GATHERED]))
    seconds = time.perf_counter() - began
    await connection.close()
    return seconds


if __name__ == "__main__":
    how, url, address, count = sys.argv[1:]
    publish = by_towpath if how == "towpath" else by_aio_pika
    print(asyncio.run(publish(url, made(address, int(count)))))
