"""The checker is silent about a kept promise, and names each way of breaking it by its invariant."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import pytest

from tests.faults.checker import check
from tests.faults.evidence import Done, Evidence, Letter, Move, Task
from tests.faults.ledger import (
    Begun,
    Called,
    Ended,
    Intended,
    Lapsed,
    Ledger,
    Lost,
    Record,
    Returned,
    Struck,
    read,
)

A, B, CALL, ONCE, SUBMITTED, DEAD, GHOST, ABANDONED = (UUID(int=number) for number in range(1, 9))


def evidence() -> Evidence:
    """A run of a few messages that kept the promise; one died, was replayed and succeeded."""
    records: list[Record] = [
        Intended("t1", A, "transactional", "k", 1),
        Ended("t1", "committed"),
        Intended("t2", B, "transactional", "k", 2),
        Intended("t2", ABANDONED, "transactional", "k", 3, is_abandoned=True),
        Ended("t2", "unknown"),
        Intended("t3", CALL, "idempotent", "c", 1, "fails"),
        Intended("t3", ONCE, "at_most_once", "c", 2),
        Intended("t3", SUBMITTED, "submitted", "c", 3, is_delayed=True),
        Ended("t3", "committed"),
        Intended("t4", DEAD, "transactional", "k", 3, "dies"),
        Ended("t4", "committed"),
        Intended("t5", GHOST, "transactional", "k", 4),
        Ended("t5", "rolled_back"),
        Begun(CALL, "idempotent", "member-0", 30),
        Called(CALL, "idempotent", f"{CALL}:act", "member-0", 31),
        Returned(CALL, "member-0", 33),
        Called(CALL, "idempotent", f"{CALL}:act", "member-1", 35),
        Returned(CALL, "member-1", 36),
        Called(ONCE, "at_most_once", f"{ONCE}", "member-1", 40),
        Returned(ONCE, "member-1", 41),
    ]
    ids = (A, B, CALL, ONCE, SUBMITTED, DEAD)
    return Evidence(
        records=records,
        deeds=frozenset({"t1", "t2", "t3", "t4"}),
        done=[
            Done(A, "transactional", 10),
            Done(B, "transactional", 20),
            Done(CALL, "idempotent", 36),
            Done(SUBMITTED, "submitted", 50),
            Done(DEAD, "transactional", 90),
        ],
        tasks=[Task(id_, "SUCCEEDED") for id_ in ids],
        moves=[
            Move(CALL, "task.retry_scheduled", "WAITING"),
            Move(DEAD, "task.dead", "DEAD"),
            Move(DEAD, "task.replayed", "WAITING"),
        ],
        letters=[Letter(DEAD, "replayed", "handle", 1, 1)],
        published=[A, B, A, CALL, ONCE, DEAD],
        copies=[DEAD],
        leftovers={"key gates": 0},
    )


def found(changed: Evidence) -> set[str]:
    return {breach.invariant for breach in check(changed)}


def test_a_promise_that_was_kept_has_no_breaches() -> None:
    """Duplicates on the wire, a lost answer to COMMIT, retries and a replay are all within the promise."""
    assert check(evidence()) == []


def test_what_is_sent_again_on_purpose_may_take_effect_behind_what_came_later() -> None:
    """A queue that was deleted: its message is republished, while later ones of its key have run."""
    late = [Done(A, "transactional", 25), *(each for each in evidence().done if each.id != A)]
    changed = msgspec.structs.replace(evidence(), done=late)

    assert found(changed) == {"I3"}
    assert found(msgspec.structs.replace(changed, republished=frozenset({A}))) == set()


def test_what_went_with_its_topic_is_not_judged_by_where_it_was_sent_again() -> None:
    """A topic that was deleted: nobody saw the first appearance of what lay in it."""
    changed = msgspec.structs.replace(evidence(), published=[B, A, CALL, ONCE, DEAD])

    assert found(changed) == {"I3"}
    assert found(msgspec.structs.replace(changed, reappeared=frozenset({A}))) == set()


def replaced(**changes: Any) -> Callable[[Evidence], Evidence]:
    return lambda kept: msgspec.structs.replace(kept, **changes)


def without(field: str, id_: UUID) -> Callable[[Evidence], Evidence]:
    def change(kept: Evidence) -> Evidence:
        left = [each for each in getattr(kept, field) if each.id != id_]
        return msgspec.structs.replace(kept, **{field: left})

    return change


def plus(field: str, *more: Any) -> Callable[[Evidence], Evidence]:
    return lambda kept: msgspec.structs.replace(kept, **{field: [*getattr(kept, field), *more]})


def in_state(id_: UUID, state: str) -> Callable[[Evidence], Evidence]:
    def change(kept: Evidence) -> Evidence:
        tasks = [Task(id_, state) if task.id == id_ else task for task in kept.tasks]
        return msgspec.structs.replace(kept, tasks=tasks)

    return change


def both(*changes: Callable[[Evidence], Evidence]) -> Callable[[Evidence], Evidence]:
    def change(kept: Evidence) -> Evidence:
        for each in changes:
            kept = each(kept)
        return kept

    return change


DEFECTS: Final[dict[str, tuple[Callable[[Evidence], Evidence], Sequence[str]]]] = {
    "acknowledged before the claim, then killed": (
        both(without("tasks", A), without("done", A)), ["I1"],
    ),
    "the cursor passed an open transaction": (replaced(published=[A, CALL, ONCE, DEAD]), ["I1"]),
    "the database forgot a commit": (replaced(deeds=frozenset({"t2", "t3", "t4"})), ["I1", "I2", "I4"]),
    "the database kept a rollback": (
        both(replaced(deeds=evidence().deeds | {"t5"}), plus("tasks", Task(GHOST, "SUCCEEDED"))),
        ["I1", "I2", "I4"],
    ),
    "sent beside the transaction": (plus("published", GHOST), ["I2"]),
    "a savepoint's rollback dropped nothing": (plus("published", ABANDONED), ["I2"]),
    "sent by time and not by commit": (
        replaced(published=[B, A, CALL, ONCE, DEAD]), ["I3"],
    ),
    "a follower passed the message that waits": (
        plus("done", Done(B, "transactional", 5)), ["I3", "I4"],
    ),
    "a zombie settled without its token": (plus("done", Done(A, "transactional", 11)), ["I4"]),
    "settled and then rolled back": (without("done", A), ["I4"]),
    "a retry under a new key": (
        plus("records", Called(CALL, "idempotent", f"{CALL}:2", "member-1", 37)), ["I5"],
    ),
    "two living workers at one call": (
        plus("records", Called(CALL, "idempotent", f"{CALL}:act", "member-1", 32)), ["I5"],
    ),
    "succeeded without its call": (
        replaced(records=[each for each in evidence().records if not isinstance(each, Called)]), ["I5", "I6"],
    ),
    "in doubt and repeated": (
        plus("records", Called(ONCE, "at_most_once", f"{ONCE}", "member-0", 44)), ["I6"],
    ),
    "the parked were forgotten": (both(in_state(B, "PARKED"), without("done", B)), ["I7"]),
    "left in doubt": (in_state(ONCE, "UNKNOWN"), ["I7"]),
    "dead and succeeded": (plus("moves", *[Move(DEAD, "task.dead", "DEAD")] * 2), ["I8"]),
    "killed by a passing trouble": (
        both(
            in_state(CALL, "DEAD"),
            without("done", CALL),
            plus("letters", Letter(CALL, "open", "handle", 1, 0)),
            plus("copies", CALL),
        ),
        ["I8"],
    ),
    "a request became two tasks": (
        both(
            plus(
                "records",
                Intended("t1", UUID(int=20), "requested", "r", 0, request="r"),
                Intended("t2", UUID(int=21), "requested", "r", 0, request="r"),
                Called(UUID(int=20), "requested", "20", "member-0", 60),
                Called(UUID(int=21), "requested", "21", "member-0", 61),
            ),
            plus("tasks", Task(UUID(int=20), "SUCCEEDED"), Task(UUID(int=21), "SUCCEEDED")),
            plus("published", UUID(int=20), UUID(int=21)),
        ),
        ["I8"],
    ),
    "a full disk spent an attempt": (
        plus("moves", Move(A, "task.retry_scheduled", "WAITING", "sqlstate_53100", 1)), ["I8"],
    ),
    "buried outside the catalog": (
        both(in_state(DEAD, "DEAD"), without("done", DEAD), replaced(letters=[], copies=[], moves=[])),
        ["I8", "I9"],
    ),
    "two rows in the catalog": (plus("letters", Letter(DEAD, "replayed", "handle", 1, 1)), ["I9"]),
    "no copy at the broker": (replaced(copies=[]), ["I9"]),
    "two copies for one death": (plus("copies", DEAD), ["I9"]),
    "replayed twice by one word": (plus("moves", Move(DEAD, "task.replayed", "WAITING")), ["I10"]),
    "a gate left closed": (replaced(leftovers={"key gates": 1}), ["I11"]),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_by_its_invariant_and_by_no_other(defect: str) -> None:
    """The names say what would have happened in the engine."""
    change, expected = DEFECTS[defect]
    assert set(expected) == found(change(evidence()))


def test_a_worker_that_was_frozen_may_be_at_a_call_that_another_has_taken_over() -> None:
    """I5 speaks of living leases: a fault that held the first worker up then, and no other, excuses it."""
    call = Called(CALL, "idempotent", f"{CALL}:act", "member-2", 32)
    taken_over = plus("records", call, Returned(CALL, "member-2", 34))(evidence())

    def struck(since: int, until: int, *processes: str) -> set[str]:
        return found(plus("records", Struck("member_frozen", processes, since, until))(taken_over))

    assert struck(30, 34, "member-0") == set()
    assert struck(33, 34, "member-0") == struck(10, 20, "member-0") == struck(30, 34, "member-1") == {"I5"}
    lapsed = {name: found(plus("records", Lapsed(name, 32))(taken_over)) for name in ("member-0", "member-1")}
    assert lapsed == {"member-0": set(), "member-1": {"I5"}}


def test_a_relay_that_was_struck_may_repeat_a_copy() -> None:
    """As it may repeat any message: at least once."""
    struck = plus("records", Struck("relay_killed", ("relay-0",), 1, 2))
    assert check(both(struck, plus("copies", DEAD))(evidence())) == []


def test_what_a_repeated_submit_asked_for_is_not_what_is_expected() -> None:
    """The first one was delayed, so there is no message; whoever repeated it was given that task."""
    id_ = UUID(int=20)
    again = plus(
        "records",
        Intended("t1", id_, "requested", "r", 0, is_delayed=True, request="r"),
        Intended("t2", id_, "requested", "r", 0, request="r", is_repeat=True),
        Called(id_, "requested", "20", "member-0", 60),
    )
    assert check(both(again, plus("tasks", Task(id_, "SUCCEEDED")))(evidence())) == []


def test_what_a_failover_took_back_may_be_out_and_takes_effect_once_where_it_is() -> None:
    """A ghost: its commit was answered, it was published, and the standby had never received it."""
    id_ = UUID(int=20)
    ghost = both(
        plus("records", Intended("t6", id_, "transactional", "k", 1), Ended("t6", "committed")),
        plus("published", id_),
        plus("tasks", Task(id_, "SUCCEEDED")),
        plus("done", Done(id_, "transactional", 95)),
        plus("copies", id_),
    )
    lost = plus("records", Lost(frozenset({"t6"}), frozenset({id_})))

    assert found(ghost(evidence())) == {"I1", "I2", "I4", "I9"}
    assert found(both(ghost, lost)(evidence())) == set()
    assert found(both(ghost, lost, plus("done", Done(id_, "transactional", 96)))(evidence())) == {"I4"}
    assert found(both(ghost, lost, in_state(id_, "PARKED"), without("done", id_))(evidence())) == {"I7"}
    assert found(both(lost, replaced(deeds=frozenset({"t2", "t3", "t4"})))(evidence())) == {"I1", "I2", "I4"}


def test_a_call_whose_mark_a_failover_took_back_may_be_made_once_more() -> None:
    """At most once, as each of the two databases knows it."""
    again = plus("records", Called(ONCE, "at_most_once", f"{ONCE}", "member-0", 44))

    def failed_over(since: int, until: int) -> set[str]:
        lost = plus("records", Lost(since=since, until=until))
        return found(both(again, lost)(evidence()))

    assert failed_over(39, 42) == set()
    assert failed_over(41, 42) == failed_over(39, 50) == failed_over(45, 50) == {"I6"}


def test_evidence_and_ledgers_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Also what a process wrote before it was started again."""
    kept = evidence()
    for _ in range(2):
        Ledger(tmp_path, "member-0").write(*kept.records[:2])
    kept.save(tmp_path / "evidence.json")

    assert Evidence.load(tmp_path / "evidence.json") == kept
    assert [*read(tmp_path)] == [*kept.records[:2]] * 2
