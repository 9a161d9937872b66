"""Stages of the relay's work, told by the stack, and samples of a process's CPU time by stage."""

import linecache
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

STAGES: Final = {
    "fetch": "asking for rows and reading the answer from the socket",
    "decode": "rows out of that answer, in asyncpg's C",
    "message": "rows into messages with their headers",
    "encode": "messages into the broker's batches or frames, and what was acknowledged",
    "send": "the broker's client: requests, socket, answers",
    "journal": "progress written down and trimmed",
    "settle": "the rest of the relay: shards, verdicts, spans, metrics",
    "upkeep": "leases, wake-up, delayed events, ring, census",
    "loop": "the event loop, and what is nobody's",
    "sampling": "taking these samples",
}
_MODULES: Final = {
    "towpath.relay.outbound": "message",
    "towpath.messages": "message",
    "towpath.relay.reader": "fetch",
    "towpath.store.outbox": "fetch",
    "towpath.relay.journaling": "journal",
    "towpath.relay.bookkeeping": "journal",
    "towpath.store.journal": "journal",
    "towpath.relay.heartbeat": "upkeep",
    "towpath.relay.wakeup": "upkeep",
    "towpath.relay.mover": "upkeep",
    "towpath.relay.retention": "upkeep",
    "towpath.relay.census": "upkeep",
    "towpath.relay.canary": "upkeep",
    "towpath.relay": "settle",
    "towpath.telemetry": "settle",
    "towpath.store": "upkeep",
    "towpath.brokers": "encode",
    "pamqp": "encode",
    "aiokafka": "send",
    "aiokafka.record": "encode",
    "aiokafka.producer.message_accumulator": "encode",
    "aiormq": "send",
}
_READING: Final = "_read_ready__data_received"
_EVERY_SECONDS: Final = 0.001


@dataclass(frozen=True)
class Site:
    """Where a frame is; of a transport that reads, whose module it reads for, and whether it calls that."""

    module: str
    function: str = ""
    protocol: str = ""
    is_handing_over: bool = False


def stage_of(stack: Iterable[Site]) -> str:
    """The stage of a stack, innermost frame first: whoever called a library is who it works for.

    A transport reads for its protocol. That may be in C, without frames, and call back for each value.
    """
    found = ""
    for site in stack:
        if site.function == _READING:
            if site.protocol.startswith("asyncpg"):
                return "decode" if site.is_handing_over else "fetch"
            return _stage_of_module(site.protocol) or "loop"
        found = found or _stage_of_module(site.module)
    return found or "loop"


def _stage_of_module(module: str) -> str:
    while module and module not in _MODULES:
        module = module.rpartition(".")[0]
    return _MODULES.get(module, "")


def sites(frame: FrameType | None) -> Iterator[Site]:
    """A frame and its callers."""
    while frame is not None:
        code, protocol, is_handing_over = frame.f_code, "", False
        if code.co_name == _READING:
            protocol = type(frame.f_locals["self"].get_protocol()).__module__
            is_handing_over = "data_received" in linecache.getline(code.co_filename, frame.f_lineno)
        yield Site(frame.f_globals.get("__name__", ""), code.co_name, protocol, is_handing_over)
        frame = frame.f_back


class Sampler:
    """Adds up this process's CPU time by stage: each sample takes what was used since the one before.

    A signal by CPU time finds the main thread between two steps of its interpreter, so what C code used
    counts for the frame that called it.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.sample_count = 0
        self._last = 0.0

    def start(self) -> None:
        """Begin; in the main thread."""
        signal.signal(signal.SIGPROF, self._sample)
        self._last = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _EVERY_SECONDS, _EVERY_SECONDS)

    def stop(self) -> None:
        """End; the time since the last sample is the event loop's."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self.seconds["loop"] += time.process_time() - self._last

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        now = time.process_time()
        self.seconds[stage_of(sites(frame))] += now - self._last
        self._last = time.process_time()
        self.seconds["sampling"] += self._last - now
        self.sample_count += 1
