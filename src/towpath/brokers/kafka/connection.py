"""Starting and, above all, ending aiokafka's clients: the one module that reaches into their private parts.

`AIOKafkaProducer.stop()` flushes, and closing a connection writes out what is buffered. After a
publish deadline neither may happen: another relay may own the messages by then.
"""

# ruff: noqa: SLF001  the library's public methods flush; what this module is for cannot be done with them
import asyncio
import contextlib
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError, UnknownError
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from towpath.brokers.kafka.config import DEFAULT_PORT, KafkaConfig
from towpath.brokers.kafka.errors import translate
from towpath.brokers.kafka.topic_ids import topic_ids
from towpath.errors import BrokerUnavailable, TowpathError

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_GRACE_SECONDS: Final = 2.0
_SECURITY_ARGUMENTS: Final = (
    "ssl_context",
    "security_protocol",
    "sasl_mechanism",
    "sasl_plain_username",
    "sasl_plain_password",
    "sasl_kerberos_service_name",
    "sasl_kerberos_domain_name",
    "sasl_oauth_token_provider",
)


async def connection_error(config: KafkaConfig, error: BaseException) -> TowpathError:
    """Why the cluster could not be reached: the client's bootstrap hides refused credentials and bad TLS."""
    if not isinstance(error, (KafkaError, OSError, TimeoutError)):
        return translate(error)
    host, port = config.url.hosts[0]
    chosen = {name: config.client[name] for name in _SECURITY_ARGUMENTS if name in config.client}
    try:
        async with asyncio.timeout(min(3.0, config.request_timeout_seconds)):
            connection = await create_conn(host, port or DEFAULT_PORT, request_timeout_ms=3000, **chosen)
    except (KafkaError, OSError, TimeoutError) as reason:
        return translate(reason)
    connection.close()
    return translate(error)


async def start_producer(config: KafkaConfig) -> AIOKafkaProducer:
    """A connected producer. Raises BrokerUnavailable or ConfigurationError."""
    producer = AIOKafkaProducer(**config.client, **config.producer)
    try:
        await producer.start()
    except BaseException as error:
        await bury(producer.client, end_producer(producer))
        if isinstance(error, (KafkaError, OSError, TimeoutError)):
            reason = await connection_error(config, error)
            if isinstance(error, UnknownError) and config.producer["enable_idempotence"]:
                reason = BrokerUnavailable(
                    f"{reason} (a broker without idempotent producers? then set the broker option "
                    "enable_idempotence: false)"
                )
            raise reason from error
        raise
    return producer


def end_producer(producer: AIOKafkaProducer) -> list[asyncio.Task[Any]]:
    """Stop at once: nothing that is buffered is written any more, here or in the kernel.

    Returns the library's tasks, cancelled, for `bury`.
    """
    producer._closed = True
    sender = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
    abort(producer.client)
    return [] if sender is None else [sender]


def end_consumer(consumer: AIOKafkaConsumer) -> list[asyncio.Task[Any]]:
    """Stop at once without committing or leaving; returns the library's tasks, cancelled."""
    consumer._closed = True
    coordinator, fetcher = consumer._coordinator, consumer._fetcher
    owners = (
        (coordinator, "_coordination_task"),
        (coordinator, "_heartbeat_task"),
        (coordinator, "_commit_refresh_task"),
        (fetcher, "_fetch_task"),
    )
    tasks = [getattr(owner, name, None) for owner, name in owners if owner is not None]
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    abort(consumer._client)
    return running


def abort(client: AIOKafkaClient) -> None:
    """Reset every connection: unsent bytes are thrown away."""
    for connection in list(client._conns.values()):
        writer = connection._writer
        if writer is not None:
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):  # closed by the other side meanwhile
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        connection.close()


async def known_topics(consumer: AIOKafkaConsumer, topics: Collection[str]) -> Mapping[str, str]:
    """The ids of those that exist. Raises errors of the client."""
    return await topic_ids(consumer._client, topics)


async def committed(consumer: AIOKafkaConsumer, partition: TopicPartition) -> OffsetAndMetadata | None:
    """With what was written beside the offset, which the library's own method drops. Raises KafkaError."""
    found = (await consumer._coordinator.fetch_committed_offsets([partition])).get(partition)
    return None if found is None or found.offset < 0 else found


async def stop_consumer(consumer: AIOKafkaConsumer, *, timeout_seconds: float) -> None:
    """Leave the group and close. Raises KafkaError, OSError or TimeoutError.

    The library cancels tasks of its own and awaits them: one that lets the cancellation through, because
    its coordinator is dead, would cancel whoever called. So it is called in a task apart.
    """
    ending = asyncio.create_task(_leave_and_stop(consumer))
    try:
        await asyncio.wait([ending], timeout=timeout_seconds)
        if not ending.done():
            raise TimeoutError
        if ending.cancelled():
            raise KafkaError("the client cancelled its own stop")
        ending.result()
    finally:
        ending.cancel()


async def _leave_and_stop(consumer: AIOKafkaConsumer) -> None:
    """Leave also a group whose generation is 0; the library takes that for "never joined" and stays silent.

    Apache Kafka counts from 1. The embedded broker counts from 0, and would hold the partitions for
    the dead member until its session runs out.
    """
    coordinator = consumer._coordinator
    if coordinator is not None and coordinator.generation == 0 and coordinator.member_id:
        await coordinator._send_req(LeaveGroupRequest(coordinator.group_id, coordinator.member_id))
    await consumer.stop()


def reset_consumer(consumer: AIOKafkaConsumer) -> None:
    """Break the connections of a living consumer, so that it makes new ones at once."""
    abort(consumer._client)


async def bury_consumer(consumer: AIOKafkaConsumer) -> None:
    """End a consumer without committing or leaving, and wait for its rest, bounded."""
    await bury(consumer._client, end_consumer(consumer))


async def bury(client: AIOKafkaClient, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for the rest of an ended client, bounded; never raises for a dead broker."""
    waiting = list(tasks)
    waiter = client._md_update_fut
    synchronizer = client._sync_task
    if synchronizer is not None:
        synchronizer.cancel()
        waiting.append(synchronizer)
        client._sync_task = None
    if waiter is not None and not waiter.done():
        waiter.set_result(False)  # whoever waits for metadata would wait for ever
    if waiting:
        _, pending = await asyncio.wait(waiting, timeout=_GRACE_SECONDS)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_GRACE_SECONDS)
    abort(client)  # a connection that was being made meanwhile
