"""Telling a pooler that hands out sessions by transaction from one that leaves a client its own."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import asyncpg
import pytest

from towpath.relay.link import are_sessions_shared


class Connection:
    """Answers with the backends that a pooler gives it, one after another."""

    def __init__(self, backends: Iterator[int]) -> None:
        self._backends = backends

    async def fetchval(self, _: str) -> int:
        return next(self._backends)

    def terminate(self) -> None: ...


@pytest.mark.parametrize(
    ("first", "second", "are_shared"),
    [
        ([1], [2], False),
        ([1], [1], True),
        ([1, 2], [2, 1], True),
        ([1], [1, 2], True),
        ([1, 2], [3], True),
        ([1, 2], [3, 4], True),
    ],
    ids=["own", "the same", "the same two", "one among them", "one and others", "different ones"],
)
async def test_sessions_are_a_clients_own_only_where_each_keeps_one_that_is_not_the_others(
    first: list[int], second: list[int], are_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19: also where other clients of the pooler come between, as a relay's other connections do."""
    connections = iter([Connection(cycle(first)), Connection(cycle(second))])

    async def connect(*_: Any, **__: Any) -> Connection:
        return next(connections)

    monkeypatch.setattr(asyncpg, "connect", connect)
    assert await are_sessions_shared("postgresql://ignored") is are_shared
