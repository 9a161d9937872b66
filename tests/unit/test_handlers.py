"""Everything wrong with a handler is said when it is declared, with the fix."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Call, Tx
from towpath.handlers import Effect, InvalidHandler
from towpath.messages import Message, event, task


@event("parcel.posted", destination="parcels", key="parcel")
@dataclass(frozen=True)
class Posted:
    parcel: str


@task("parcel.weigh", group="depot")
@dataclass(frozen=True)
class Weigh:
    parcel: str


@dataclass(frozen=True)
class Undeclared:
    parcel: str


class Carrier:
    pass


def test_a_handler_is_described_by_its_signature() -> None:
    app = App("depot", retry=RetryPolicy(attempts=3))

    @app.idempotent(timeout="90s", dependency="carrier", concurrency=4, retry=RetryPolicy(attempts=9))
    async def ship(parcel: Message[Posted], call: Call, *, carrier: Carrier) -> None: ...

    handler = app.handlers["parcel.posted"]
    assert (handler.name, handler.effect, handler.destination) == ("ship", Effect.IDEMPOTENT, "parcels")
    assert (handler.payload_class, handler.wants_message, handler.wants_context) == (Posted, True, True)
    assert handler.resources == {"carrier": Carrier}
    assert (handler.timeout, handler.dependency, handler.concurrency) == (timedelta(seconds=90), "carrier", 4)
    assert handler.retry.attempts == 9


def test_a_payload_alone_is_enough() -> None:
    app = App("depot")

    @app.transactional()
    async def ship(parcel: Posted) -> None: ...

    handler = app.handlers["parcel.posted"]
    assert (handler.wants_message, handler.wants_context, handler.resources) == (False, False, {})
    assert (handler.retry, handler.timeout, handler.concurrency) == (
        RetryPolicy(),
        timedelta(minutes=5),
        None,
    )


def test_an_annotation_with_none_takes_null_values() -> None:
    """C11."""
    app = App("depot")

    @app.transactional()
    async def ship(parcel: Message[Posted | None]) -> None: ...

    handler = app.handlers["parcel.posted"]
    assert (handler.payload_class, handler.wants_message, handler.takes_null) == (Posted, True, True)


def test_bytes_are_raw_and_say_their_type_and_destination() -> None:
    app = App("depot")

    @app.transactional(type="scan", destination="scans")
    async def scan(data: bytes, tx: Tx) -> None: ...

    handler = app.handlers["scan"]
    assert (handler.payload_class, handler.destination, handler.spec) == (None, "scans", None)


def test_a_destination_in_the_decorator_wins_over_the_declared_one() -> None:
    app = App("depot")

    @app.transactional(destination="parcels.eu")
    async def ship(parcel: Posted) -> None: ...

    assert app.destinations == ("parcels.eu",)


def plain(parcel: Posted, tx: Tx) -> None: ...


async def nothing() -> None: ...


async def too_many(parcel: Posted, tx: Tx, more: int) -> None: ...


async def starred(parcel: Posted, *rest: Any) -> None: ...


async def keywords(parcel: Posted, **rest: Any) -> None: ...


async def unannotated(parcel, tx: Tx) -> None:  # type: ignore[no-untyped-def]
    ...


async def calls(parcel: Posted, call: Call) -> None: ...


async def untyped_context(parcel: Posted, tx) -> None:  # type: ignore[no-untyped-def]
    ...


async def unresolvable(parcel: "Parcel") -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


async def undeclared(parcel: Undeclared) -> None: ...


async def number(parcel: int) -> None: ...


async def either(parcel: Posted | int) -> None: ...


async def bare_message(parcel: Message) -> None:  # type: ignore[type-arg]
    ...


async def raw(data: bytes) -> None: ...


async def loose_resource(parcel: Posted, *, carrier) -> None:  # type: ignore[no-untyped-def]
    ...


async def odd_resource(parcel: Posted, *, carrier: "Carrier | None") -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            plain,
            "plain is transactional and a plain function: its second parameter is annotated SyncTx, not Tx",
        ),
        (nothing, "nothing takes 0 positional parameters: write (payload) or (payload, context)"),
        (too_many, "too_many takes 3 positional parameters: write (payload) or (payload, context)"),
        (starred, "starred: *args and **kwargs cannot be injected"),
        (keywords, "keywords: *args and **kwargs cannot be injected"),
        (unannotated, "unannotated: annotate 'parcel' with the message class"),
        (calls, "calls is transactional: its second parameter is annotated Tx, not Call"),
        (
            untyped_context,
            "untyped_context is transactional: its second parameter is annotated Tx, not None",
        ),
        (unresolvable, "unresolvable: an annotation cannot be resolved: name 'Parcel' is not defined"),
        (raw, "raw takes bytes: say type= and destination= in its decorator"),
        (loose_resource, "loose_resource: the resource 'carrier' needs a class as its annotation"),
        (odd_resource, "odd_resource: the resource 'carrier' needs a class as its annotation"),
    ],
)
def test_a_wrong_signature_is_refused_with_the_fix(function: Any, message: str) -> None:
    with pytest.raises(InvalidHandler) as caught:
        App("depot").transactional()(function)
    assert str(caught.value) == message


@pytest.mark.parametrize("function", [undeclared, number, either, bare_message])
def test_a_payload_that_is_no_declared_message_is_refused(function: Any) -> None:
    with pytest.raises(InvalidHandler, match=f"^{function.__name__}: "):
        App("depot").idempotent()(function)


async def ship(parcel: Posted) -> None: ...


async def weigh(parcel: Weigh) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "letter.posted"}, "ship: type='letter.posted', but Posted is 'parcel.posted'"),
        ({"concurrency": 0}, "ship: concurrency must be at least 1, got 0"),
        ({"timeout": "0s"}, "ship: timeout must be longer than zero"),
        ({"destination": "no spaces"}, "ship: the destination 'no spaces' is refused"),
        ({"destination": ""}, "ship: the destination '' is refused"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidHandler) as caught:
        App("depot").idempotent(**options)(ship)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "options", [{"type": "a b", "destination": "scans"}, {"type": "s", "destination": "/"}]
)
def test_the_type_and_destination_of_raw_bytes_are_checked(options: dict[str, Any]) -> None:
    """P11: what the catalog could not store would hold up its partition for ever."""
    with pytest.raises(InvalidHandler, match="is refused"):
        App("depot").idempotent(**options)(raw)


def test_a_bad_duration_fails_with_the_text_shown() -> None:
    with pytest.raises(ValueError, match="'soon'"):
        App("depot").idempotent(timeout="soon")(ship)


def test_a_type_has_one_handler_in_a_group() -> None:
    app = App("depot")
    app.idempotent()(ship)
    with pytest.raises(InvalidHandler) as caught:
        app.transactional()(ship)
    assert str(caught.value) == "ship: parcel.posted is handled by ship already"


def test_a_task_is_for_the_group_it_is_addressed_to() -> None:
    with pytest.raises(InvalidHandler) as caught:
        App("office").transactional()(weigh)
    assert str(caught.value) == "weigh: parcel.weigh is addressed to 'depot', not 'office'"
    App("depot").transactional()(weigh)
