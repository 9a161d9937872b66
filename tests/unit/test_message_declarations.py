"""Declaring messages: what is wrong is said where the class is written."""

import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

from towpath.errors import InvalidMessage, UnknownType
from towpath.messages import Message, RawMessage, event, key_of, spec_of, task


@dataclass
class Plain:
    id: str
    other: int = 0


class Model(pydantic.BaseModel):
    id: str


class Struct(msgspec.Struct):
    id: str


@pydantic.dataclasses.dataclass
class PydanticDataclass:
    id: str


class Blob(bytes):
    pass


@pytest.mark.parametrize("cls", [Plain, Model, Struct, PydanticDataclass])
def test_every_shape_can_be_declared(cls: Any) -> None:
    declared = event("thing.made", destination="things", key="id")(type("Sub", (cls,), {}))

    spec = spec_of(declared)
    assert spec_of(declared(id="1")) is spec
    assert (spec.type, spec.kind, spec.destination, spec.group) == ("thing.made", "event", "things", None)
    assert key_of(spec, declared(id="k")) == "k"


def test_bytes_are_declared_by_a_subclass() -> None:
    declared = event("blob.made", destination="blobs")(type("Sub", (Blob,), {}))

    assert key_of(spec_of(declared), declared(b"x")) is None


def test_a_task_goes_to_its_group_unless_told_otherwise() -> None:
    charge = task("charge", group="billing", key="id", unique=("id", "other"))(type("A", (Plain,), {}))
    elsewhere = task("charge", group="billing", destination="work")(type("B", (Plain,), {}))

    assert spec_of(charge).destination == "tasks.billing"
    assert (spec_of(charge).group, spec_of(charge).unique) == ("billing", ("id", "other"))
    assert spec_of(elsewhere).destination == "work"


def test_a_property_may_be_the_key() -> None:
    @event("t", destination="d", key="both")
    @dataclass
    class Pair:
        a: str
        b: int

        @property
        def both(self) -> str:
            return f"{self.a}/{self.b}"

    assert key_of(spec_of(Pair), Pair("x", 1)) == "x/1"


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("a", "a"),
        ("", ""),
        (None, None),
        (7, "7"),
        (-(2**70), str(-(2**70))),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Colour.RED, "red"),
        ("ü" * 256, "ü" * 256),
    ],
)
def test_keys_are_text_whole_numbers_and_uuids(value: Any, key: str | None) -> None:
    """P11"""
    declared: Any = event("t", destination="d", key="id")(type("Sub", (Plain,), {}))

    assert key_of(spec_of(declared), declared(value)) == key


@pytest.mark.parametrize("value", [1.5, True, b"a", ["a"], object(), "ü" * 257, "a\0b", "\udc00", 10**400])
def test_other_keys_are_refused(value: Any) -> None:
    """P11"""
    declared: Any = event("t", destination="d", key="id")(type("Sub", (Plain,), {}))

    with pytest.raises(InvalidMessage, match="the key"):
        key_of(spec_of(declared), declared(value))


REFUSED: list[tuple[Any, str]] = [
    (lambda: event("", destination="d")(Plain), "1 to 200"),
    (lambda: event("t" * 201, destination="d")(Plain), "1 to 200"),
    (lambda: event("a b", destination="d")(Plain), "without spaces"),
    (lambda: event("a\n", destination="d")(Plain), "printable"),
    (lambda: event("t", destination="")(Plain), "destination"),
    (lambda: event("t", destination="a/b")(Plain), "destination"),
    (lambda: event("t", destination="ü")(Plain), "destination"),
    (lambda: event("t", destination="d" * 201)(Plain), "200"),
    (lambda: event("t", destination="d", key="absent")(Plain), "no field 'absent'"),
    (lambda: task("t", group="Billing")(Plain), "group"),
    (lambda: task("t", group="")(Plain), "1 to 100"),
    (lambda: task("t", group="g" * 101)(Plain), "1 to 100"),
    (lambda: task("t", group="g", unique=("absent",))(Plain), "no field 'absent'"),
    (lambda: task("t", group="g", unique="id")(Plain), r"write unique=\('id',\)"),
    (lambda: event("t", destination="d")(int), "put the decorator above @dataclass"),
    (lambda: event("t", destination="d")(type("NotYet", (), {})), "put the decorator above @dataclass"),
    (lambda: RawMessage("t", b"", "a b"), "destination"),
    (lambda: RawMessage("t", b"", "d", content_type="a\r\nb"), "content type"),
    (lambda: RawMessage("t", b"", "d", key="x" * 513), "512 bytes"),
    (lambda: RawMessage("t", "text", "d"), "bytes"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_outside_the_limits_fails_at_the_declaration(number: int) -> None:
    """P11"""
    declare, text = REFUSED[number]
    with pytest.raises(InvalidMessage, match=text):
        declare()


@pytest.mark.parametrize("thing", [Plain("1"), Plain, 1, "text", None, object()])
def test_an_undeclared_class_is_unknown(thing: Any) -> None:
    with pytest.raises(UnknownType, match="@event or @task"):
        spec_of(thing)


def test_a_subclass_is_another_message() -> None:
    @event("t", destination="d")
    @dataclass
    class Declared:
        id: str

    class Extended(Declared):
        secret: str = "x"

    with pytest.raises(UnknownType, match=r"only .*Declared is declared"):
        spec_of(Extended("1"))


def test_a_message_shows_the_metadata_of_its_envelope() -> None:
    from datetime import UTC, datetime

    from towpath.messages import Envelope

    at = datetime.now(UTC)
    envelope = Envelope(UUID(int=1), "t", "/s", at, "application/json", sequence=7, headers=(("a", b"b"),))
    message = Message(Plain("1"), "k", envelope)

    assert (message.id, message.type, message.occurred_at) == (UUID(int=1), "t", at)
    assert (message.key, message.sequence, message.headers) == ("k", 7, (("a", b"b"),))


def test_producing_imports_nothing_but_the_base_dependencies() -> None:
    program = """
import sys
class Blocked:
    names = {"pydantic", "pydantic_settings", "tenacity", "aiokafka", "aio_pika", "alembic", "rich", "typer",
             "starlette", "uvicorn", "psycopg", "pytest", "opentelemetry.sdk", "httpx"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
from dataclasses import dataclass
from towpath.messages import event, task, decode, encode
from towpath.outbox import emit, emit_many, send, submit
from towpath import tasks
@event("t", destination="d")
@dataclass
class T:
    a: int
assert decode(T, encode(T(1))[0], None) == T(1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
