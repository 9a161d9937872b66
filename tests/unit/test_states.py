"""The transition table says what the design says."""

import pytest

from towpath.states import FINAL, TRANSITIONS, TaskState, is_allowed, sql_in

S = TaskState


def test_every_state_has_a_row_in_the_table() -> None:
    assert set(TRANSITIONS) == {None, *TaskState}


def test_every_state_can_be_reached() -> None:
    reached: set[TaskState] = set()
    frontier = set(TRANSITIONS[None])
    while frontier:
        reached |= frontier
        frontier = {new for old in frontier for new in TRANSITIONS[old]} - reached
    assert reached == set(TaskState)


def test_success_is_overwritten_by_nothing_but_a_rerun() -> None:
    """C7"""
    assert TRANSITIONS[S.SUCCEEDED] == TRANSITIONS[S.FAILED] == {S.WAITING, S.PARKED}
    assert TRANSITIONS[S.DEAD] == {S.WAITING, S.PARKED}
    assert TRANSITIONS[S.CANCELLED] == TRANSITIONS[S.EXPIRED] == frozenset()


def test_what_is_not_final_can_be_cancelled_and_can_expire() -> None:
    for state in set(TaskState) - FINAL:
        assert is_allowed(state, S.CANCELLED)
        assert is_allowed(state, S.EXPIRED)


def test_only_a_claim_ends_in_success() -> None:
    """C7"""
    assert {old for old in TRANSITIONS if S.SUCCEEDED in TRANSITIONS[old]} == {S.RUNNING, S.UNKNOWN}


def test_no_state_leads_to_itself() -> None:
    assert all(state not in TRANSITIONS[state] for state in TaskState)


def test_unknown_leaves_only_by_a_decision_never_by_a_start() -> None:
    """C9, C23"""
    assert S.RUNNING not in TRANSITIONS[S.UNKNOWN]
    assert not S.UNKNOWN.is_final


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[S.DEAD] = frozenset()  # type: ignore[index]


def test_the_sql_list_is_sorted_and_quoted() -> None:
    assert sql_in(frozenset({S.WAITING, S.DEAD})) == "'DEAD', 'WAITING'"
    assert sql_in(TaskState).count("'") == 2 * len(TaskState)
