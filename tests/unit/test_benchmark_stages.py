"""To which stage of the relay's work the profile counts a moment."""

import asyncio
import sys
import time

import pytest

from benchmarks.profile import Profile, shown
from benchmarks.stages import STAGES, Sampler, Site, sites, stage_of

LOOP = [Site("asyncio.base_events"), Site("asyncio.runners"), Site("__main__")]
READING = "_read_ready__data_received"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        ([], "loop"),
        (LOOP, "loop"),
        ([Site("asyncpg.connection"), Site("towpath.store.outbox"), Site("towpath.relay.reader")], "fetch"),
        ([Site("asyncio.selector_events", READING, "asyncpg.protocol.protocol")], "fetch"),
        ([Site("asyncio.selector_events", READING, "asyncpg.protocol.protocol", True)], "decode"),
        (
            [
                Site("towpath.store.outbox", "_from_tuple"),
                Site("asyncio.selector_events", READING, "asyncpg.protocol.protocol", True),
            ],
            "decode",
        ),
        ([Site("asyncio.selector_events", READING, "aiokafka.conn")], "send"),
        ([Site("aiormq.connection"), Site("asyncio.selector_events", READING, "aiormq.abc")], "send"),
        ([Site("uuid"), Site("towpath.relay.outbound"), Site("towpath.relay.reader")], "message"),
        ([Site("json.decoder"), Site("towpath.messages.headers"), Site("towpath.relay.outbound")], "message"),
        ([Site("aiokafka.producer.message_accumulator"), Site("towpath.brokers.kafka.publisher")], "encode"),
        ([Site("aiokafka.conn"), Site("aiokafka.producer.sender")], "send"),
        ([Site("towpath.brokers.kafka.murmur2"), Site("towpath.brokers.kafka.publisher")], "encode"),
        ([Site("pamqp.encode"), Site("towpath.brokers.rabbitmq.frames")], "encode"),
        ([Site("asyncpg.pool"), Site("towpath.store.journal"), Site("towpath.relay.journaling")], "journal"),
        ([Site("towpath.relay.bookkeeping"), Site("towpath.relay.dispatch")], "journal"),
        ([Site("asyncpg.pool"), Site("towpath.store.leases"), Site("towpath.relay.heartbeat")], "upkeep"),
        ([Site("asyncpg.pool"), Site("towpath.relay.link"), Site("towpath.relay.heartbeat")], "settle"),
        ([Site("collections"), Site("towpath.relay.progress"), Site("towpath.relay.dispatch")], "settle"),
        ([Site("towpathology.relay")], "loop"),
    ],
)
def test_a_moment_counts_for_the_innermost_module_that_has_a_stage(stack: list[Site], stage: str) -> None:
    """R11: whoever called a library, but for what a transport reads."""
    assert stage_of([*stack, *LOOP]) == stage


def test_frames_are_named_from_the_innermost_on() -> None:
    """R11"""
    here = list(sites(sys._getframe()))
    assert here[0].function == "test_frames_are_named_from_the_innermost_on"
    assert len(here) > 3


async def test_a_transport_is_known_by_the_one_it_reads_for() -> None:
    """R11: its protocol's own code, in C, has no frames."""
    seen: asyncio.Queue[Site] = asyncio.Queue()

    class Protocol(asyncio.Protocol):
        def data_received(self, _data: bytes) -> None:
            seen.put_nowait(next(site for site in sites(sys._getframe()) if site.function == READING))

    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        site = await asyncio.wait_for(seen.get(), 60)
        writer.close()
    assert (site.protocol, site.is_handing_over) == (__name__, True)


def test_samples_add_up_to_the_time_of_the_process() -> None:
    """R11"""
    sampler, began = Sampler(), time.process_time()
    sampler.start()
    while time.process_time() < began + 0.1:
        pass
    sampler.stop()
    used = time.process_time() - began
    assert sampler.sample_count
    assert sum(sampler.seconds.values()) == pytest.approx(used, abs=0.02)
    assert sampler.seconds.keys() <= STAGES.keys()


def test_a_profile_whose_stages_do_not_add_up_is_void() -> None:
    """R11"""
    profile = Profile()
    profile.add({"messages": 1000, "cpu_s": 0.01, "samples": 9, "stages": {"send": 0.004, "loop": 0.0059}})
    profile.judge()
    assert profile.faults == []
    assert "| send | " in shown(profile.facts("kafka"))
    assert "| 4.00 | 40% |" in shown(profile.facts("kafka"))
    profile.add({"messages": 1000, "cpu_s": 0.01, "samples": 9, "stages": {"send": 0.004}})
    profile.judge()
    assert profile.faults == ["the stages add up to 0.014 s of 0.020 s"]
