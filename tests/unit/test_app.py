"""What one consumer group declares."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from towpath.app import App
from towpath.context import Attempt, Call, Tx
from towpath.failures import Failure
from towpath.messages import event
from towpath.outcomes import Dead, Reject, Retry, Snooze


@event("parcel.posted", destination="parcels", key="parcel")
@dataclass(frozen=True)
class Posted:
    parcel: str


@event("parcel.lost", destination="losses")
@dataclass(frozen=True)
class Lost:
    parcel: str


class Carrier:
    pass


class Scales:
    pass


@asynccontextmanager
async def carrier() -> AsyncIterator[Carrier]:
    yield Carrier()


async def test_decorators_return_the_plain_function() -> None:
    app = App("depot")

    @app.transactional()
    async def post(parcel: Posted, tx: Tx) -> Reject | None:
        return Reject("too_heavy") if parcel.parcel == "heavy" else None

    @app.idempotent()
    async def search(parcel: Lost, call: Call, *, carrier: Carrier) -> str:
        return parcel.parcel

    tx: Any = object()
    assert await post(Posted("heavy"), tx) == Reject("too_heavy")
    assert await post(Posted("light"), tx) is None
    assert await search(Lost("a"), tx, carrier=Carrier()) == "a"


def test_apps_know_nothing_of_each_other() -> None:
    one, two = App("one"), App("two")

    @one.transactional()
    async def post(parcel: Posted) -> None: ...

    assert list(one.handlers) == ["parcel.posted"]
    assert list(two.handlers) == []


@pytest.mark.parametrize("name", ["", "Depot", "a b", "-a", "x" * 101, "ä", "a/b"])
def test_a_group_name_fits_into_topics_and_queues(name: str) -> None:
    with pytest.raises(ValueError, match="a group name is 1 to 100 of"):
        App(name)


def test_a_wrong_ordering_is_refused() -> None:
    with pytest.raises(ValueError, match="ordering is 'key', 'partition' or 'none', got 'fifo'"):
        App("depot", ordering="fifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["unknown_max_age", "retention"])
def test_a_wrong_duration_is_refused_when_the_app_is_made(option: str) -> None:
    with pytest.raises(ValueError, match="'ages'"):
        App("depot", **{option: "ages"})  # type: ignore[arg-type]


def test_a_class_has_one_provider() -> None:
    app = App("depot")
    app.provide(Carrier, carrier)
    with pytest.raises(ValueError, match="Carrier has a provider already"):
        app.provide(Carrier, carrier)
    assert list(app.providers) == [Carrier]


@pytest.mark.parametrize("rule", ["retry", 3, Reject, None])
def test_a_wrong_rule_is_refused_where_it_is_declared(rule: Any) -> None:
    with pytest.raises(TypeError, match="the rule for KeyError is"):
        App("depot").classify(KeyError, rule)


def test_rules_decide_what_a_failure_means() -> None:
    app = App("depot")
    app.classify(KeyError, Reject("no_such_parcel"))
    app.classify(TimeoutError, Snooze("5m", reason="slow"))
    app.classify(LookupError, Dead)
    app.classify(OSError, Retry)
    classify = app.classifier.classify
    found: list[Failure] = [
        classify(error) for error in (KeyError(), TimeoutError(), IndexError(), OSError())
    ]
    assert [each.kind for each in found] == ["reject", "snooze", "dead", "retry"]
    assert found[0].reason_code == "no_such_parcel"


def test_the_first_middleware_is_outermost() -> None:
    app = App("depot")

    @app.middleware
    async def outer(attempt: Attempt, call_next: Any) -> object:
        return await call_next()

    @app.middleware
    async def inner(attempt: Attempt, call_next: Any) -> object:
        return await call_next()

    assert list(app.middlewares) == [outer, inner]


def test_all_problems_are_told_at_once() -> None:
    """O2."""
    app = App("depot")
    assert app.problems() == ["group 'depot' has no handlers"]

    @app.transactional(destination="x" * 195)
    async def post(parcel: Posted, *, carrier: Carrier, scales: Scales) -> None: ...

    app.provide(Carrier, carrier)
    app.ignore("parcel.posted", "parcel.lost")
    app.foreign("scans", type="parcel.scanned")
    app.ignore_nulls("scans")
    assert app.problems() == [
        "post: nothing provides Scales for 'scales': call app.provide(Scales, …)",
        f"destination '{'x' * 195}' is too long: its dead-letter address exceeds 200 characters",
        "app.foreign('scans', …): no handler reads that destination",
        "app.ignore_nulls('scans'): no handler reads that destination",
        "'parcel.posted' is both handled and ignored",
    ]


def test_an_app_in_order_has_no_problems() -> None:
    app = App("depot")

    @app.transactional()
    async def post(parcel: Posted, *, carrier: Carrier) -> None: ...

    @app.idempotent()
    async def search(parcel: Lost) -> None: ...

    app.provide(Carrier, carrier)
    app.ignore("parcel.weighed")
    assert app.problems() == []
    assert app.destinations == ("losses", "parcels")
    assert app.ignored_types == {"parcel.weighed"}


def test_what_an_app_shows_cannot_be_changed() -> None:
    app = App("depot")
    for shown in (app.handlers, app.providers):
        with pytest.raises(TypeError):
            shown["x"] = None  # type: ignore[index]
