"""A broker that keeps what arrives, in that order, and answers late, wrongly or not at all."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimLoop
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, MessageRefused


@dataclass(frozen=True)
class Arrival:
    at: float
    number: int
    sender: str


class SimBroker:
    """What a relay is given as its broker."""

    labels: Final[Mapping[str, str | int]] = {"system": "simulated"}

    def __init__(
        self,
        loop: SimLoop,
        rnd: random.Random,
        refuses: Callable[[int], bool],
        may_send: Callable[[Process, str | None], bool],
        delay_seconds: float,
    ) -> None:
        self.loop = loop
        self.rnd = rnd
        self.refuses = refuses
        self.may_send = may_send
        """Whether a process owns the shard of a key at this moment."""
        self._delay_seconds = delay_seconds
        self.arrivals: list[Arrival] = []
        self.offered_at = 0.0
        """When the last message came."""
        self.trouble: set[str] = set()
        """Of `broker away`, `lose replies`, `slow broker`."""
        self.doubtful_until = 0.0
        """Until then relays may trust in leases that the standby never had; shards may have two owners."""
        self._inside: dict[str | None, tuple[Process | None, float]] = {}
        self.trespasses: list[str] = []

    def publisher(self) -> "SimPublisher":
        return SimPublisher(self)

    def enter(self, keys: Iterable[str | None], until: float) -> None:
        """A publish begins; no other living process may be in one of these keys."""
        process = PROCESS.get()
        for key in keys:
            other, others_until = self._inside.get(key, (process, 0.0))
            if (
                other is not process
                and not self.is_doubtful
                and other is not None
                and not other.is_dead
                and self.loop.time() < others_until
            ):
                self.trespasses.append(f"{other.name} and {process and process.name} in key {key} at once")
            self._inside[key] = (process, until)

    def leave(self, keys: Iterable[str | None]) -> None:
        for key in keys:
            if self._inside.get(key, (None, 0.0))[0] is PROCESS.get():
                del self._inside[key]

    @property
    def is_doubtful(self) -> bool:
        return self.loop.time() < self.doubtful_until

    @property
    def is_up(self) -> bool:
        return "broker away" not in self.trouble

    def delay(self) -> float:
        return self.rnd.expovariate(1 / (0.5 if "slow broker" in self.trouble else self._delay_seconds))


class SimPublisher:
    """Writes a window in pieces; a message of a key goes after the one before was confirmed, or with it."""

    def __init__(self, broker: SimBroker) -> None:
        self._broker = broker

    async def start(self) -> None:
        await asyncio.sleep(self._broker.delay())
        if not self._broker.is_up:
            raise BrokerUnavailable("switched off")

    async def cluster(self) -> str | None:
        return None

    def keep_partitions(self, keep: object) -> None:
        """There are none."""

    async def aclose(self) -> None:
        """Nothing is open."""

    async def publish(self, window: Sequence[OutboundMessage], *, timeout_seconds: float) -> PublishResult:
        result = PublishResult()
        piece = self._broker.rnd.randint(1, len(window))
        link = _Link(self._broker, PROCESS.get())
        withheld: set[str | None] = set()
        keys = dict.fromkeys(message.key for message in window)
        self._broker.enter(keys, self._broker.loop.time() + timeout_seconds)
        try:
            async with asyncio.timeout(timeout_seconds):
                for start in range(0, len(window), piece):
                    await self._offer(
                        link, window, range(start, min(start + piece, len(window))), withheld, result
                    )
        except TimeoutError:
            result.unavailable = BrokerUnavailable("the deadline passed")
        except BrokerUnavailable as error:
            result.unavailable = error
        finally:
            link.is_closed = True
            self._broker.leave(keys)
        return result

    async def _offer(
        self,
        link: "_Link",
        window: Sequence[OutboundMessage],
        indexes: Sequence[int],
        withheld: set[str | None],
        result: PublishResult,
    ) -> None:
        sent = [(index, link.send(window[index])) for index in indexes if window[index].key not in withheld]
        for index, confirm in sent:
            message = window[index]
            if message.key in withheld:
                continue
            if await confirm:
                result.acknowledged.add(index)
            else:
                result.refused[index] = MessageRefused("refused_by_broker")
                withheld.add(message.key)


class _Link:
    """One connection: messages arrive in the order they were written."""

    def __init__(self, broker: SimBroker, process: Process | None) -> None:
        self._broker = broker
        self._process = process
        self._last_at = 0.0
        self._refused: set[str | None] = set()
        self.is_closed = False
        self._is_cut = False

    def send(self, message: OutboundMessage) -> asyncio.Future[bool]:
        broker = self._broker
        confirm: asyncio.Future[bool] = broker.loop.create_future()
        self._last_at = max(self._last_at + 1e-6, broker.loop.time() + broker.delay())
        broker.loop.call_at(self._last_at, self._arrive, message, confirm, context=OUTSIDE)
        return confirm

    def _arrive(self, message: OutboundMessage, confirm: asyncio.Future[Any]) -> None:
        broker = self._broker
        broker.offered_at = broker.loop.time()
        if self._is_cut or not broker.is_up or (self.is_closed and broker.rnd.random() < 0.5):
            self._is_cut = True  # and with it all that follows
            _fail(confirm)
            return
        if message.key in self._refused:
            return
        process = self._process
        if process and not (
            process.is_stopped
            or self.is_closed
            or broker.is_doubtful
            or broker.may_send(process, message.key)
        ):
            broker.trespasses.append(f"{process.name} without a lease in key {message.key}")
        number = int(message.payload or b"0")
        is_refused = broker.refuses(number)
        if is_refused:
            self._refused.add(message.key)
        else:
            broker.arrivals.append(Arrival(broker.loop.time(), number, process.name if process else ""))
        if "lose replies" in broker.trouble:
            broker.loop.call_later(broker.delay(), _fail, confirm, context=OUTSIDE)
        else:
            broker.loop.call_later(broker.delay(), _confirm, confirm, not is_refused, context=OUTSIDE)


def _confirm(future: asyncio.Future[Any], is_taken: bool) -> None:
    if not future.done():
        future.set_result(is_taken)


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(BrokerUnavailable("the connection broke"))
