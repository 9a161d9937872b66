"""The relay's pure parts: pace, shares, messages, verdicts, progress, trimming, time away."""

import struct
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from towpath.backoff import RetryPolicy
from towpath.brokers.ports import OutboundMessage, PublishResult
from towpath.errors import BrokerUnavailable, ConfigurationError, MessageRefused, SettingsError
from towpath.messages.envelope import Envelope, read_envelope, source_of, wire_headers
from towpath.relay.away import Away
from towpath.relay.heartbeat import fair_share
from towpath.relay.hooks import RelayHooks
from towpath.relay.journaling import Superseded
from towpath.relay.options import RelayOptions
from towpath.relay.outbound import Outbound
from towpath.relay.progress import Batch, Part, Shard, Shards, boot_time
from towpath.relay.publish import Verdicts, judge
from towpath.relay.wakeup import Gate
from towpath.relay.window import Pace
from towpath.settings import RelaySettings
from towpath.store.journal import Progress
from towpath.store.outbox import KeyList, KeyRanges, Row
from towpath.store.parking import Gated
from towpath.store.snapshot import Snapshot

CREATED_AT = datetime(2026, 7, 1, 12, 30, 5, 120, tzinfo=UTC)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
INSTALLATION = str(UUID(int=7))
S1, S2, S3 = Snapshot("10:10:"), Snapshot("12:20:12,15"), Snapshot("30:30:")


def row(id_: int = 1, *, shard: int = 0, key: str | None = "k", kind: str = "event", **fields: Any) -> Row:
    """An outbox row as it is read."""
    given = {"type": "t", "destination": "orders", "headers": "[]", "payload": b"x", **fields}
    return (
        id_,
        shard,
        UUID(int=id_),
        kind,
        given["destination"],
        given["type"],
        key,
        "application/json",
        given["headers"],
        given["payload"],
        given.get("created_at", (CREATED_AT - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)),
        given.get("key_hash", 65),
        True,
    )


def batch(rows: list[Row], done: Progress, shards: Shards) -> Batch:
    """Rows read under the shards' present stamps."""
    messages, refused = Outbound(INSTALLATION, {}).messages(rows)
    parts = {shard.number: Part(done, shard.stamp) for shard in shards}
    return Batch(rows, messages, parts, refused)


def loaded(*numbers: int, held_bytes: int = 10**6) -> Shards:
    """Shards that stand at S1."""
    shards = Shards(held_bytes=held_bytes)
    for number in numbers:
        shards.acquire(number, 1, 100.0)
    shards.loaded(dict.fromkeys(numbers, Progress(S1, S1)), dict.fromkeys(numbers, Gated()))
    return shards


def judged(read: Batch, result: PublishResult, shards: Shards, attempts: int, **policies: Any) -> Verdicts:
    """The verdicts where destinations have these policies."""
    return judge(read, result, attempts, tries_of=shards.tries_of, policies=policies)


def shard_of(shards: Shards, number: int = 0) -> Shard:
    shard = shards.get(number)
    assert shard is not None
    return shard


class Polling:
    """A pace and the clock of who keeps to it."""

    def __init__(self, shortest: float = 0.005, longest: float = 0.25, window_rows: int = 2000) -> None:
        self.pace = Pace(shortest, longest, 1.0, window_rows)
        self.now = 100.0

    def after(self, row_count: int, *, is_notified: bool = False) -> float:
        wait = self.pace.after(row_count, self.now, is_notified=is_notified)
        self.now += wait
        return wait

    def at_rate(self, rows_per_second: float) -> float:
        """The wait once rows have come at that rate for a while."""
        wait = self.after(0)
        for _ in range(50):
            wait = self.after(round(rows_per_second * wait))
        return wait


def test_polls_are_quick_while_rows_come_and_for_a_hold_after_then_ever_slower() -> None:
    polling = Polling()
    assert polling.after(10) == 0.005
    waits = [polling.after(0) for _ in range(60)]
    assert waits[:20] == [0.005] * 20
    assert waits[20:26] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25]
    assert set(waits[26:]) == {0.25}
    assert polling.pace.is_idle
    assert polling.after(1) == 0.005
    assert not polling.pace.is_idle
    assert polling.after(0) == 0.005


def test_no_window_fills_for_longer_than_an_idle_relay_waits() -> None:
    """P6"""
    polling = Polling(longest=0.01)
    assert polling.at_rate(10_000) == 0.01
    assert not polling.pace.is_idle


@pytest.mark.parametrize(
    ("rows_per_second", "seconds"),
    [
        (200, 0.005),
        (1000, 0.0025),
        (4000, 0.0025),
        (6000, 0.03),
        (10_000, 0.05),
        (20_000, 0.05),
        (40_000, 0.025),
        (100_000, 0.01),
    ],
)
def test_a_window_fills_the_longer_the_more_rows_come_up_to_half_of_what_is_published_at_once(
    rows_per_second: float, seconds: float
) -> None:
    """P6: and no longer where latency counts, or where it would be read twice for its size."""
    assert Polling().at_rate(rows_per_second) == pytest.approx(seconds, rel=0.05)


def test_a_burst_among_few_rows_makes_no_window_wait_longer() -> None:
    """P6: the rows behind it would be late."""
    polling = Polling()
    for _ in range(10):
        polling.after(1)
    assert polling.after(500) == 0.0025
    assert max(polling.after(number % 2) for number in range(100)) == 0.005


def test_polls_become_rare_only_where_rows_are_notified_and_after_a_while() -> None:
    """R13: and are at the interval for idling again as soon as they are not."""
    polling = Polling()
    waits = [polling.after(0, is_notified=True) for _ in range(60)]
    assert waits[25:37] == [0.25] * 12
    assert set(waits[37:]) == {1.0}
    assert polling.after(0) == 0.25
    assert Polling(longest=2.0).after(0, is_notified=True) <= 2.0


def test_only_a_poll_that_began_after_producers_were_asked_may_be_followed_by_sleep() -> None:
    """R13: a row committed between an empty poll and the asking would wait for long otherwise."""
    gate = Gate()
    assert not gate.covers(polled_at=10.0, now=10.0)
    gate.asked(sent_at=10.0, answered_at=10.1, seconds_left=1.5)
    assert not gate.covers(polled_at=10.05, now=10.2)
    assert gate.covers(polled_at=10.1, now=10.2)
    gate.asked(sent_at=11.0, answered_at=11.1, seconds_left=1.5)
    assert gate.covers(polled_at=10.1, now=12.4)


def test_a_gap_in_the_asking_calls_for_another_poll() -> None:
    """R13: what was written in the gap did not notify."""
    gate = Gate()
    gate.asked(sent_at=10.0, answered_at=10.1, seconds_left=1.5)
    assert not gate.covers(polled_at=10.2, now=11.5)
    gate.asked(sent_at=11.4, answered_at=11.6, seconds_left=1.5)
    assert not gate.covers(polled_at=10.2, now=11.6)
    assert gate.covers(polled_at=11.6, now=11.7)
    gate.lapse()
    assert not gate.covers(polled_at=11.7, now=11.7)


@pytest.mark.parametrize("living", [1, 2, 3, 5, 8, 16, 17, 40])
def test_fair_shares_add_up_and_differ_by_at_most_one(living: int) -> None:
    shares = [fair_share(16, living, place) for place in range(living)]
    assert sum(shares) == 16
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("kind", ["event", "task"])
def test_a_message_carries_the_headers_that_the_envelope_defines(kind: Any) -> None:
    """R17: made from templates for speed, equal to those made the plain way."""
    stored = (
        '[["traceparent","00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],["bin",{"b64":"/w=="}]]'
    )
    one = row(5, kind=kind, headers=stored, payload=None if kind == "task" else b"x")
    outbound = Outbound(INSTALLATION, {"orders": "orders-topic"})
    (message, again), refused = outbound.messages([one, one])
    expected = wire_headers(
        Envelope(
            message_id=UUID(int=5),
            type="t",
            source=source_of(INSTALLATION, "orders"),
            occurred_at=CREATED_AT,
            content_type="application/json",
            kind=kind,
            body="row" if kind == "task" else "inline",
            sequence=5,
            installation=INSTALLATION,
            headers=(
                ("traceparent", TRACE.encode()),
                ("bin", b"\xff"),
            ),
        )
    )
    assert (message.headers, refused) == (expected, {})
    assert message == again
    assert (message.address, message.sequence, message.routing_slot) == ("orders-topic", 5, 1)


@pytest.mark.parametrize(
    "instant",
    [datetime(2026, 7, 1, tzinfo=UTC), datetime(1999, 12, 31, 23, 59, 59, 1, tzinfo=UTC), CREATED_AT],
)
def test_the_time_of_a_message_is_written_as_the_envelope_does(instant: datetime) -> None:
    """R26"""
    microseconds = (instant - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    (message,), _ = Outbound(INSTALLATION, {}).messages([row(created_at=microseconds)])
    assert read_envelope(message.headers).occurred_at == instant
    assert ("ce_time", instant.isoformat().replace("+00:00", "Z").encode()) in message.headers


def test_a_copy_carries_its_headers_as_stored() -> None:
    (message,), _ = Outbound(INSTALLATION, {}).messages(
        [row(kind="copy", headers='[["ce_id","x"],["a","b"]]')]
    )
    assert message.headers == (("ce_id", b"x"), ("a", b"b"))


def test_a_changed_address_reaches_the_next_messages() -> None:
    outbound = Outbound(INSTALLATION, {})
    assert outbound.messages([row()])[0][0].address == "orders"
    outbound.readdress({"orders": "elsewhere"})
    assert outbound.messages([row()])[0][0].address == "elsewhere"


def test_keys_are_consumed_from_the_front_and_grouped_by_transaction() -> None:
    pairs = [(7, 1), (9, 2), (7, 3), (7, 5), (9, 8)]
    keys = KeyList(b"".join(struct.pack("!QQ", xid, id_) for xid, id_ in pairs))
    ranges = KeyRanges()
    assert ranges.add(3, keys.first(4)) == 5
    assert (ranges.count, ranges.shards, ranges.xids) == (4, [3, 3], [7, 9])
    assert (ranges.first_ids, ranges.last_ids) == ([1, 2], [5, 2])
    keys.consume_up_to(4)
    assert list(keys.first(10)) == [(7, 5), (9, 8)]
    keys.consume_up_to(100)
    assert len(keys) == 0


def test_a_settled_batch_moves_every_shard_of_it() -> None:
    shards = loaded(0, 1)
    done = Progress(S1, S2)
    shards.settle(batch([row(1, shard=0)], done, shards), {})
    assert [shard.done for shard in shards] == [done, done]


def test_progress_stops_before_the_first_unsettled_message() -> None:
    """R10"""
    shards = loaded(0, 1)
    read = batch([row(1), row(2, shard=1), row(3), row(4)], Progress(S1, S2), shards)
    shards.settle(read, {0: [2]})
    held = shard_of(shards).held
    assert shard_of(shards).done == Progress(S1, S2, 2)
    assert shard_of(shards, 1).done == Progress(S1, S2)
    assert held is not None
    assert [message.sequence for message in held.messages] == [3]
    due = shards.due(0.0, row_limit=10, byte_limit=1000)
    assert due is not None
    shards.settle(due, {})
    assert shard_of(shards).done == Progress(S1, S2)
    assert shard_of(shards).held is None


def test_what_was_read_before_a_failure_is_dropped_when_it_comes_back() -> None:
    """R5, R10: the batch behind the failed one was read too early."""
    shards = loaded(0)
    first = batch([row(1)], Progress(S1, S2), shards)
    second = batch([row(2)], Progress(S2, S3), shards)
    shards.settle(first, {0: [0]})
    shards.settle(second, {})
    assert shard_of(shards).done == Progress(S1, S2, 0)


def test_memory_of_a_forgotten_or_lost_shard_settles_nothing() -> None:
    shards = loaded(0, 1)
    read = batch([row(1), row(2, shard=1)], Progress(S1, S2), shards)
    shards.forget()
    shards.remove(1)
    shards.settle(read, {})
    assert shard_of(shards).done is None


def test_more_than_the_held_bytes_is_read_again_and_not_kept() -> None:
    shards = loaded(0, 1, held_bytes=100)
    read = batch([row(1, payload=bytes(80)), row(2, shard=1, payload=bytes(80))], Progress(S1, S2), shards)
    shards.settle(read, {0: [0], 1: [1]})
    held = [shard.number for shard in shards if shard.held is not None]
    assert held == [0]
    assert [shard.number for shard in shards.readable(0.0)] == [1]
    assert [shard.done for shard in shards] == [Progress(S1, S2, 0), Progress(S1, S2, 1)]


def test_an_acknowledged_batch_leaves_nothing_to_judge() -> None:
    shards = loaded(0)
    verdicts = judged(batch([row(1)], Progress(S1, S2), shards), PublishResult({0}), shards, 3)
    assert (verdicts.left, verdicts.refused) == ({}, [])


def test_a_refused_message_is_given_up_after_the_tries_and_a_hopeless_one_at_once() -> None:
    """R8"""
    shards = loaded(0)
    read = batch([row(1), row(2, key="l"), row(3)], Progress(S1, S2), shards)
    result = PublishResult(set(), {0: MessageRefused("unroutable"), 1: MessageRefused("too_large")})
    first = judged(read, result, shards, 2)
    assert [each.index for each in first.refused] == [1]
    assert first.left == {0: [0, 2]}
    second = judged(read, result, shards, 2)
    assert [(each.index, each.tries) for each in second.refused] == [(0, 2), (1, 2)]


def test_of_two_hopeless_messages_the_second_is_not_decided_where_the_first_makes_it_wait() -> None:
    """R23: of its key with park_key, of its whole shard with block, and not at all with park."""
    shards = loaded(0, 1)
    rows = [row(1), row(2), row(3, key="l"), row(4, shard=1)]
    result = PublishResult(set(), {index: MessageRefused("too_large") for index in range(4)})
    given_up = {
        policy: [
            each.index
            for each in judged(
                batch(rows, Progress(S1, S2), shards), result, shards, 3, orders=policy
            ).refused
        ]
        for policy in ("park", "park_key", "block")
    }
    assert given_up == {"park": [0, 1, 2, 3], "park_key": [0, 2, 3], "block": [0, 3]}


def test_a_message_that_blocks_its_shard_is_given_up_only_when_nothing_before_it_waits() -> None:
    """R8: else it is read again with what waits, and once discarded it would block the shard again."""
    shards = loaded(0)
    read = batch([row(1, key="l"), row(2)], Progress(S1, S2), shards)
    result = PublishResult(set(), {0: MessageRefused("nacked"), 1: MessageRefused("too_large")})
    assert judged(read, result, shards, 3, orders="block").left == {0: [0, 1]}
    alone = judged(read, PublishResult({0}, {1: MessageRefused("too_large")}), shards, 3, orders="block")
    assert ([each.index for each in alone.refused], alone.left) == ([1], {})


def test_nothing_waits_for_a_tasks_message_a_copy_or_without_a_key() -> None:
    """R8, D7: there would be no dead letter to decide about, or no key to hold."""
    shards = loaded(0)
    rows = [row(1, kind="task", payload=None), row(2, kind="copy"), row(3, key=None), row(4, kind="task")]
    result = PublishResult(set(), {index: MessageRefused("too_large") for index in range(4)})
    read = batch(rows, Progress(S1, S2), shards)
    policies = [each.policy for each in judged(read, result, shards, 3, orders="park_key").refused]
    assert policies == ["park", "park", "park", "park_key"]


def test_a_broker_that_is_back_is_asked_within_five_seconds() -> None:
    """R7: by default, however long it was away; a pause has jitter, and is never longer than its cap."""
    backoff = RelayOptions().backoff
    assert max(backoff.delay(failures).total_seconds() for failures in range(1, 200)) < 4


def test_an_unknown_outcome_counts_no_try() -> None:
    """R7"""
    shards = loaded(0)
    read = batch([row(1)], Progress(S1, S2), shards)
    for _ in range(10):
        verdicts = judged(read, PublishResult(unavailable=BrokerUnavailable("away")), shards, 3)
        assert (verdicts.left, verdicts.refused) == ({0: [0]}, [])
    assert shard_of(shards).tries == {}


def test_superseded_rows_are_those_no_shard_needs() -> None:
    superseded = Superseded()
    superseded.written(1, [0, 1])
    superseded.written(2, [0])
    assert superseded.seqs == []
    superseded.written(3, [1])
    assert superseded.seqs == [1]
    superseded.lost(0)
    superseded.written(4, [1])
    assert superseded.seqs == [1, 3]


def test_an_absent_broker_is_asked_ever_less_often_and_at_once_after_an_answer() -> None:
    """R7"""
    away = Away(RetryPolicy(base="1s", cap="4s"), RelayHooks(uuid4(), {"system": "test"}))
    gone = PublishResult(unavailable=BrokerUnavailable("gone"))
    waits = []
    for now in range(10):
        away.observe(gone, float(now))
        waits.append(away.until - now)
    assert all(1 <= wait <= 4 for wait in waits)
    assert away.problem is gone.unavailable
    away.observe(PublishResult({0}), 100.0)
    assert (away.until, away.problem) == (0.0, None)


def test_a_partial_answer_is_no_absence() -> None:
    away = Away(RetryPolicy(base="1s", cap="4s"), RelayHooks(uuid4(), {"system": "test"}))
    away.observe(PublishResult({0}, unavailable=BrokerUnavailable("one partition")), 5.0)
    assert away.until == 0.0
    assert away.problem is not None


def test_a_configuration_failure_is_shown_and_spends_nothing() -> None:
    away = Away(RetryPolicy(base="1s", cap="4s"), RelayHooks(uuid4(), {"system": "test"}))
    away.observe(PublishResult(configuration=ConfigurationError("no topic")), 5.0)
    assert away.until == 0.0
    assert isinstance(away.problem, ConfigurationError)


def test_options_that_cannot_hold_a_lease_are_refused() -> None:
    """R6"""
    with pytest.raises(SettingsError, match="fit into the lease"):
        RelayOptions(lease=10, publish_deadline=9, renew_every=1)
    assert RelayOptions.of(RelaySettings(canaries=False)) == RelayOptions()


def test_a_batch_is_put_together_and_taken_apart_without_mixing_up_refusals() -> None:
    shards = loaded(0, 1)
    left = batch([row(1), row(2, headers='{"a":[]}')], Progress(S1, S2), shards)
    right = batch([row(3, shard=1, headers="3")], Progress(S1, S2), shards)
    merged = Batch.merged([left, right])
    assert sorted(merged.refused) == [1, 2]
    taken = merged.select([2], {})
    assert isinstance(taken.messages[0], OutboundMessage)
    assert (taken.messages[0].sequence, list(taken.refused)) == (3, [0])


def test_the_lag_of_the_journal_counts_from_the_first_message_not_written_down() -> None:
    """R15: however much is published after it; windows without messages do not count."""
    shards = loaded(0)
    assert shards.journal_lag(boot_time()) == 0
    shards.settle(batch([], Progress(S1, S2), shards), {})
    assert shards.journal_lag(boot_time()) == 0
    shards.settle(batch([row(1)], Progress(S1, S2), shards), {})
    since = shard_of(shards).dirty_since
    shards.settle(batch([row(2)], Progress(S1, S2), shards), {})
    assert since is not None
    assert shards.journal_lag(since + 5) == 5
