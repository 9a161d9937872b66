"""How much of an age was spent behind pauses. Pure, clock given."""

import pytest

from towpath.consumer.pauses import Pauses
from towpath.store.pauses import GroupPause
from towpath.telemetry.metrics import NO_TELEMETRY


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pauses(*known: GroupPause) -> tuple[Pauses, Clock]:
    clock = Clock()
    made = Pauses("g", None, telemetry=NO_TELEMETRY, on_change=lambda _: None, clock=clock)  # type: ignore[arg-type]
    made.told(known)
    return made, clock


def over(paused_ago: float, resumed_ago: float, type_: str = "") -> GroupPause:
    return GroupPause(type_, paused_ago, resumed_ago, is_open=False)


def in_force(paused_ago: float, type_: str = "") -> GroupPause:
    return GroupPause(type_, paused_ago, 0.0, is_open=True)


@pytest.mark.parametrize(
    ("known", "age", "free"),
    [
        ([], 100, 0),
        ([over(80, 50)], 100, 30),
        ([over(80, 50)], 60, 10),
        ([over(80, 50)], 40, 0),
        ([in_force(80)], 100, 80),
        ([in_force(80)], 30, 30),
        ([over(80, 50, "other")], 100, 0),
        ([over(80, 50), over(70, 20, "t")], 100, 60),
        ([over(70, 20, "t"), over(80, 10)], 100, 70),
        ([over(90, 80), over(30, 20)], 85, 15),
    ],
)
def test_time_behind_any_pause_is_free_once(known: list[GroupPause], age: float, free: float) -> None:
    """C12: pauses of the group and of the type may overlap."""
    found, _ = pauses(*known)
    assert found.free_seconds("t", age) == free


def test_time_goes_on_between_two_looks() -> None:
    """C12"""
    found, clock = pauses(over(80, 50), in_force(5, "t"))
    clock.now += 10
    assert found.free_seconds("t", 110) == 45
