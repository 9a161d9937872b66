"""Declaring messages: wire type, destination and ordering key stand beside the class.

```python
@event("order.placed", destination="orders", key="order_id")
class OrderPlaced(BaseModel):
    order_id: str
    amount: int
```

The declaration is kept on the class itself; there is no registry to import or to fill.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

from towpath.errors import InvalidMessage, UnknownType
from towpath.messages.limits import check_content_type, check_destination, check_group, check_key, check_type

ATTRIBUTE: Final = "__towpath__"

Kind = Literal["event", "task"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What a message class declares."""

    cls: type
    type: str
    kind: Kind
    destination: str
    key_field: str | None = None
    group: str | None = None
    """The consumer group a task is addressed to; None for events."""
    unique: tuple[str, ...] = ()
    """The fields that make a task the same task; empty: every submit is a new one."""


@dataclass(frozen=True, slots=True)
class RawMessage:
    """An event that is encoded already, or whose type is known only at run time.

    `emit(session, RawMessage("order.placed", body, destination="orders", key="o1"))`
    """

    type: str
    data: bytes
    destination: str
    key: str | None = None
    content_type: str = "application/octet-stream"

    def __post_init__(self) -> None:
        check_type(self.type)
        check_destination(self.destination)
        check_content_type(self.content_type)
        check_key(self.key)
        if not isinstance(self.data, bytes):
            raise InvalidMessage(f"the data of a raw message is bytes, not {type(self.data).__name__}")


def event(wire_type: str, /, *, destination: str, key: str | None = None) -> Callable[[type[T]], type[T]]:
    """Declare an event: a fact that any number of consumer groups may read.

    `key` names the field that orders: events with one value of it arrive in commit order. Raises
    InvalidMessage where the class is declared, when something is outside the limits.
    """

    def declare(cls: type[T]) -> type[T]:
        _declare(MessageSpec(cls, check_type(wire_type), "event", check_destination(destination), key))
        return cls

    return declare


def task(
    wire_type: str,
    /,
    *,
    group: str,
    key: str | None = None,
    unique: Sequence[str] = (),
    destination: str | None = None,
) -> Callable[[type[T]], type[T]]:
    """Declare a task: work addressed to one consumer group that shares the producer's database.

    Submitted twice with equal `unique` fields it is one task. The destination is `tasks.<group>`
    unless given. Raises InvalidMessage where the class is declared.
    """

    def declare(cls: type[T]) -> type[T]:
        if isinstance(unique, str):
            raise InvalidMessage(f"unique={unique!r} is text: write unique=({unique!r},)")
        address = f"tasks.{check_group(group)}" if destination is None else destination
        spec = MessageSpec(
            cls, check_type(wire_type), "task", check_destination(address), key, group, tuple(unique)
        )
        _declare(spec)
        return cls

    return declare


def _declare(spec: MessageSpec) -> None:
    cls = spec.cls
    if not is_message_class(cls):
        raise InvalidMessage(
            f"{cls.__qualname__} is not a dataclass, pydantic model, msgspec Struct or bytes subclass"
            " (put the decorator above @dataclass)"
        )
    for name in (spec.key_field, *spec.unique):
        if name is not None and name not in field_names(cls) and not hasattr(cls, name):
            raise InvalidMessage(f"{cls.__qualname__} has no field {name!r}")
    setattr(cls, ATTRIBUTE, spec)


def is_message_class(cls: object) -> bool:
    """Whether the class has one of the shapes that the codecs know."""
    return isinstance(cls, type) and (
        issubclass(cls, bytes | msgspec.Struct) or is_pydantic(cls) or dataclasses.is_dataclass(cls)
    )


def is_pydantic(cls: type) -> bool:
    """Whether it is a pydantic model or dataclass; does not import pydantic."""
    return hasattr(cls, "__pydantic_core_schema__") or hasattr(cls, "__pydantic_validator__")


def field_names(cls: type) -> frozenset[str]:
    """The declared fields of a message class."""
    if issubclass(cls, msgspec.Struct):
        return frozenset(cls.__struct_fields__)
    fields = getattr(cls, "__pydantic_fields__", None) or getattr(cls, "__dataclass_fields__", None)
    return frozenset(fields or ())


def spec_of(message: object) -> MessageSpec:
    """The declaration of a message class or instance. Raises UnknownType."""
    cls = message if isinstance(message, type) else type(message)
    spec = cls.__dict__.get(ATTRIBUTE)
    if isinstance(spec, MessageSpec) and spec.cls is cls:
        return spec
    if issubclass(cls, bytes | bytearray | memoryview):
        raise UnknownType("bytes carry no type: wrap them in RawMessage(type, data, destination=…)")
    inherited = getattr(cls, ATTRIBUTE, None)
    hint = f"; only {inherited.cls.__qualname__} is declared" if isinstance(inherited, MessageSpec) else ""
    raise UnknownType(f"{cls.__qualname__} is not a declared message{hint}: decorate it with @event or @task")


def key_of(spec: MessageSpec, payload: object) -> str | None:
    """The ordering key of a payload as text; None: unkeyed. Raises InvalidMessage."""
    return None if spec.key_field is None else check_key(getattr(payload, spec.key_field))
