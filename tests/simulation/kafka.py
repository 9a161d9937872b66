"""A partitioned broker with one consumer group: logs, committed offsets, generations of members.

`SimConsumer` is what the adapter uses of aiokafka's consumer. The group is Kafka's, and eager: for a
rebalance everybody gives everything back and joins again; who does not join in time, or is silent for
longer than a session, is put out, and its commits count no more.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka import errors as kafka
from aiokafka.structs import OffsetAndMetadata

from tests.simulation.links import tell
from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimLoop

TOPIC: Final = "orders"
SESSION_SECONDS: Final = 2.5
REBALANCE_SECONDS: Final = 4.0
HEARTBEAT_SECONDS: Final = 0.5


class SimKafka:
    """The broker's side."""

    def __init__(
        self, loop: SimLoop, rnd: random.Random, partitions: int, on_commit: Callable[[int, int, int], None]
    ) -> None:
        self.loop = loop
        self.rnd = rnd
        self.trouble: set[str] = set()
        """Of `broker away` and `lose answers of the broker`."""
        self.cut_off: set[Process | None] = set()
        """Whom nothing of it reaches."""
        self.logs: list[list[ConsumerRecord]] = [[] for _ in range(partitions)]
        self.committed: dict[int, int] = {}
        self.marks: dict[int, OffsetAndMetadata] = {}
        """What was committed, with what was written beside it."""
        self.generation = 0
        self._on_commit = on_commit
        self._members: dict[SimConsumer, float] = {}
        """When each was heard of last."""
        self._joining: dict[SimConsumer, asyncio.Future[list[int]]] = {}
        self._rebalance_until: float | None = None

    @property
    def is_up(self) -> bool:
        return "broker away" not in self.trouble

    def delay(self) -> float:
        """Seconds on the way, in one direction."""
        return self.rnd.expovariate(1 / 0.004)

    def append(self, partition: int, key: str, value: bytes, headers: Iterable[tuple[str, bytes]]) -> None:
        """A producer's record, which comes whatever happens."""
        log = self.logs[partition]
        log.append(
            ConsumerRecord(TOPIC, partition, len(log), 0, 0, key.encode(), value, None, 0, 0, tuple(headers))
        )
        for member in self._members:
            member.wake.set()

    def look(self) -> None:
        """Twice a second: put out who is silent, and end what has lasted long enough."""
        now = self.loop.time()
        if not self.is_up:
            self._members = dict.fromkeys(self._members, now)  # its clocks begin anew
        for member, heard_at in list(self._members.items()):
            if now - heard_at > SESSION_SECONDS and member not in self._joining:
                self.drop(member)
        if self._rebalance_until is not None and now > self._rebalance_until:
            self._members = {each: at for each, at in self._members.items() if each in self._joining}
        self._complete()
        self.loop.call_later(0.5, self.look, context=OUTSIDE)

    def rebalance(self) -> None:
        """Everybody joins again."""
        if self._rebalance_until is None:
            self._rebalance_until = self.loop.time() + REBALANCE_SECONDS

    def drop(self, member: "SimConsumer") -> None:
        """It is out of the group."""
        if self._members.pop(member, None) is not None:
            self._joining.pop(member, None)
            self.rebalance()
            self._complete()

    def join(self, member: "SimConsumer") -> asyncio.Future[list[int]]:
        """Its partitions, when all have joined."""
        future = self._joining.get(member)
        if future is None:
            future = self._joining[member] = self.loop.create_future()
            self._members[member] = self.loop.time()
            self.rebalance()
            self._complete()
        return future

    def _complete(self) -> None:
        if self._rebalance_until is None or self._members.keys() - self._joining.keys():
            return
        self._rebalance_until = None
        self.generation += 1
        joined, self._joining = list(self._joining.items()), {}
        self.rnd.shuffle(joined)
        for place, (member, future) in enumerate(joined):
            self._members[member] = self.loop.time()
            member.generation = self.generation
            if not future.done():
                future.set_result(list(range(place, len(self.logs), len(joined))))

    def heartbeat(self, member: "SimConsumer") -> bool:
        """False: it has to join again. Raises UnknownMemberIdError."""
        if member not in self._members:
            raise kafka.UnknownMemberIdError
        self._members[member] = self.loop.time()
        return self._rebalance_until is None

    def commit(self, member: "SimConsumer", offsets: Mapping[TopicPartition, Any]) -> None:
        """Raises CommitFailedError where the member is not of this generation."""
        if member not in self._members or member.generation != self.generation:
            raise kafka.CommitFailedError("the generation is over")
        for place, mark in offsets.items():
            before = self.committed.get(place.partition, 0)
            self.committed[place.partition], self.marks[place.partition] = mark.offset, mark
            self._on_commit(place.partition, before, mark.offset)


class SimConsumer:
    """A client, with a task of its own that keeps its place in the group."""

    def __init__(self, broker: SimKafka, **_: object) -> None:
        self._broker = broker
        self._process = PROCESS.get()
        self.generation = -1
        self.wake = asyncio.Event()
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._listener: Any = None
        self._answered_at = 0.0
        self._is_joined = self._has_revoked = False
        self._client = SimpleNamespace(_conns={}, _md_update_fut=None, _sync_task=None)
        self._coordinator: Any = None
        self._fetcher = None

    async def _ask(self, act: Callable[[], Any]) -> Any:
        broker = self._broker
        loop, answer = broker.loop, broker.loop.create_future()

        def arrive() -> None:
            result, error = None, None
            if not self._is_reached:
                error = kafka.KafkaConnectionError("nobody listens")
            else:
                try:
                    result = act()
                except kafka.KafkaError as refused:
                    error = refused
                if "lose answers of the broker" in broker.trouble:
                    error = kafka.RequestTimedOutError("no answer came")
            loop.call_later(broker.delay(), tell, answer, result, error, context=OUTSIDE)

        loop.call_later(broker.delay(), arrive, context=OUTSIDE)
        return await answer

    @property
    def _is_reached(self) -> bool:
        return self._broker.is_up and self._process not in self._broker.cut_off

    async def start(self) -> None:
        await self._ask(lambda: None)

    async def topics(self) -> set[str]:
        return set(await self._ask(lambda: [TOPIC]))

    def subscribe(self, _: list[str], listener: object) -> None:
        self._listener = listener
        task = asyncio.create_task(self._coordinate())
        self._coordinator = SimpleNamespace(_coordination_task=task, generation=1, member_id="")

    async def _coordinate(self) -> None:
        while True:
            try:
                if not self._is_joined:
                    await self._rejoin()
                await asyncio.sleep(HEARTBEAT_SECONDS)
                self._is_joined = await self._ask(lambda: self._broker.heartbeat(self))
            except kafka.UnknownMemberIdError:
                self._is_joined, self.generation = False, -1
            except kafka.KafkaError:
                await asyncio.sleep(0.2)

    async def _rejoin(self) -> None:
        if not self._has_revoked:
            self._paused = set(self._positions)
            await self._listener.on_partitions_revoked(list(self._positions))
            self._has_revoked = True
        partitions = await (await self._ask(lambda: self._broker.join(self)))
        self._has_revoked, self._is_joined = False, True
        self._positions = {TopicPartition(TOPIC, number): 0 for number in partitions}
        self._paused = set(self._positions)
        await self._listener.on_partitions_assigned(list(self._positions))  # in one order, unlike a set

    async def getmany(self, *nowhere: TopicPartition, timeout_ms: int = 0, max_records: int = 0) -> Any:
        if nowhere:
            return {}
        self.wake.clear()
        found = self._take(max_records)
        if not found:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self.wake.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(self._broker.delay())
            found = self._take(max_records)
        return found

    def _take(self, most: int) -> dict[TopicPartition, list[Any]]:
        found: dict[TopicPartition, list[Any]] = {}
        if not self._is_reached:
            return found
        self._answered_at = self._broker.loop.time()
        for place, position in self._positions.items():
            records = self._broker.logs[place.partition][position : position + most]
            if records and place not in self._paused:
                found[place] = records
                self._positions[place] += len(records)
                most -= len(records)
        return found

    def _check(self, place: TopicPartition) -> None:
        if place not in self._positions:
            raise kafka.IllegalStateError(place)

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._check(place)
        self._positions[place] = offset
        self.wake.set()

    def pause(self, place: TopicPartition) -> None:
        self._check(place)
        self._paused.add(place)

    def resume(self, place: TopicPartition) -> None:
        self._check(place)
        self._paused.discard(place)
        self.wake.set()

    async def commit(self, offsets: Mapping[TopicPartition, Any]) -> None:
        await self._ask(lambda: self._broker.commit(self, offsets))

    async def known_topics(self, _: Collection[str]) -> dict[str, str]:
        """As `connection.known_topics`: names and ids."""
        return dict(await self._ask(lambda: {TOPIC: "topic id"}))

    async def mark(self, place: TopicPartition) -> OffsetAndMetadata | None:
        """As `connection.committed`: what was committed last."""
        mark: OffsetAndMetadata | None = await self._ask(lambda: self._broker.marks.get(place.partition))
        return mark

    async def beginning_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: len(self._broker.logs[place.partition]) for place in places}

    def assignment(self) -> set[TopicPartition]:
        return set(self._positions)

    def last_poll_timestamp(self, _: TopicPartition) -> float:
        return self._answered_at * 1000

    def partitions_for_topic(self, _: str) -> set[int]:
        return set(range(len(self._broker.logs)))

    async def stop(self) -> None:
        try:
            await self._ask(lambda: self._broker.drop(self))
        finally:
            if self._coordinator is not None:
                self._coordinator._coordination_task.cancel()
