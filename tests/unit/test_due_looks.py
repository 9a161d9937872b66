"""How far back a member looks for rows that were committed after their due time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from towpath.store import due
from towpath.store.database import Database


def test_a_row_is_found_the_later_the_later_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3, C3: in the steady state a look reads what was started in the last second."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(due, "time", clock)
    looks = due.DueStore(cast(Database, SimpleNamespace(schema="towpath")), "g", ["t"])
    back: list[Any] = []
    for tick in range(1280):
        clock.now = tick / 10
        back.append(looks._seconds_back())
    assert [index for index, seconds in enumerate(back) if seconds == 64] == list(range(0, 1280, 160))
    assert [index for index, seconds in enumerate(back) if seconds >= 16] == list(range(0, 1280, 40))
    assert [index for index, seconds in enumerate(back) if seconds >= 4] == list(range(0, 1280, 10))
    assert {*back} == {1, 4, 16, 64}
