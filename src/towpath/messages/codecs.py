"""Payloads to bytes and back: JSON for pydantic models, msgspec structs and dataclasses.

Encoding refuses what would not come back: naive datetimes, NaN and infinities. Decoding untrusted
bytes ends in a value or in a DecodeError, whatever the bytes are.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any, Final, TypeVar

import msgspec

from towpath.errors import DecodeError, InvalidMessage, UnknownType
from towpath.messages.registry import field_names, is_message_class, is_pydantic

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"

_DETAIL_LIMIT: Final = 300
_SHOWN_ERRORS: Final = 3
# JSON that a naive datetime, NaN or an infinity may have left behind; only then the values are walked.
_SUSPICIOUS: Final = re.compile(
    rb'"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?"|(?<=[:\[,])(?:null|NaN|-?Infinity)(?=[,\]}])'
)
_JSON_SUFFIX: Final = re.compile(r"application/\S+\+json")
# What validators written by users raise for data they did not expect.
_BAD_DATA: Final = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)

_canonical: Final = msgspec.json.Encoder(order="sorted")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Codec:
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]
    plain: Callable[[Any], Any]
    """Field values as something that msgspec can encode."""


def encode(payload: object) -> tuple[bytes, str]:
    """The payload as bytes, and its content type. Bytes pass as they are.

    Raises InvalidMessage for values JSON cannot carry, UnknownType for other classes.
    """
    if isinstance(payload, bytes):
        return bytes(payload), OCTETS
    codec = _codec(type(payload))
    try:
        data = codec.dump(payload)
        if _SUSPICIOUS.search(data):
            _check_values(payload)
    except InvalidMessage:
        raise
    except _BAD_DATA as error:
        raise InvalidMessage(
            f"{type(payload).__qualname__} cannot be encoded as JSON: {_short(error)}"
        ) from error
    return data, JSON


def decode(cls: type[T], data: bytes | None, content_type: str | None) -> T:
    """A value of `cls` from bytes; a missing content type counts as JSON.

    Raises DecodeError `not_json`, `wrong_shape` or `unsupported_content_type`; nothing of the
    payload stands in its text. Raises UnknownType when `cls` is no message class.
    """
    if data is None:
        raise DecodeError("wrong_shape", "the message has no body")
    if issubclass(cls, bytes):
        return cls(data)
    codec = _codec(cls)
    if not is_json(content_type):
        raise DecodeError(
            "unsupported_content_type", f"{cls.__qualname__} is read from JSON, not {content_type!r:.100}"
        )
    try:
        value: T = codec.load(data)
    except DecodeError:
        raise
    except RecursionError as error:
        raise DecodeError("not_json", "nested too deeply") from error
    except _BAD_DATA as error:
        raise DecodeError(
            "wrong_shape", f"{type(error).__name__} in a validator of {cls.__qualname__}"
        ) from error
    return value


def canonical_fields(payload: object, names: Sequence[str]) -> bytes:
    """The same bytes for equal values of these fields, whatever the process. Raises InvalidMessage."""
    try:
        values = _codec(type(payload)).plain({name: getattr(payload, name) for name in names})
        return _canonical.encode(values)
    except _BAD_DATA as error:
        name = type(payload).__qualname__
        raise InvalidMessage(f"the unique fields of {name} cannot be encoded: {_short(error)}") from error


def is_json(content_type: str | None) -> bool:
    """Whether the content type means UTF-8 JSON."""
    if content_type is None:
        return True
    essence, _, parameters = content_type.lower().partition(";")
    if "charset=" in parameters and not re.search(r"charset=\"?(utf-?8|us-ascii)\b", parameters):
        return False
    essence = essence.strip()
    return essence in (JSON, "text/json") or (
        essence.startswith("application/") and essence.endswith("+json")
    )


def _codec(cls: type) -> _Codec:
    return _make_codec(cls)


@cache
def _make_codec(cls: type) -> _Codec:
    if not is_message_class(cls):
        raise UnknownType(f"{cls.__qualname__} is not a dataclass, pydantic model, msgspec Struct or bytes")
    return _pydantic_codec(cls) if is_pydantic(cls) else _msgspec_codec(cls)


def _msgspec_codec(cls: type) -> _Codec:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(cls)

    def load(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            raise DecodeError("wrong_shape", _short(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError("not_json", _short(error)) from error

    # Sets in one order, so that the same task submitted by two processes is the same body.
    return _Codec(msgspec.json.Encoder(order="deterministic").encode, load, plain=lambda values: values)


def _pydantic_codec(cls: type) -> _Codec:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - installed, since `cls` is made with it

    adapter: TypeAdapter[Any] = TypeAdapter(cls)

    def dump(payload: object) -> bytes:
        return adapter.dump_json(payload, by_alias=True, warnings="error")

    def load(data: bytes) -> Any:
        try:
            return adapter.validate_json(data)
        except ValidationError as error:
            # Its own text shows the input, which may be a secret.
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            reason = "not_json" if errors[0]["type"] == "json_invalid" else "wrong_shape"
            shown = [f"{'.'.join(map(str, e['loc'])) or '$'}: {e['msg']}" for e in errors[:_SHOWN_ERRORS]]
            more = f" and {len(errors) - _SHOWN_ERRORS} more" if len(errors) > _SHOWN_ERRORS else ""
            raise DecodeError(reason, "; ".join(shown)[:_DETAIL_LIMIT] + more) from None

    return _Codec(dump, load, plain=partial(TypeAdapter(Any).dump_python, mode="json"))


def _check_values(value: object, path: str = "$") -> None:
    """Raise InvalidMessage for the first naive datetime or non-finite float within."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidMessage(
                f"{path} is a naive datetime: instants need a time zone, for example datetime.now(UTC)"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidMessage(f"{path} is {value}, which JSON cannot carry")
    elif value is not None and not isinstance(value, str | int | bytes):
        for name, item in _items(value):
            _check_values(item, f"{path}.{name}")


def _items(value: Any) -> Iterable[tuple[object, object]]:
    """What is inside a value, with the names to show; empty for scalars and foreign objects."""
    cls = type(value)
    if isinstance(value, Mapping):
        return [*((f"{key!r:.40} (key)", key) for key in value), *value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    if isinstance(value, msgspec.Struct) or is_pydantic(cls) or dataclasses.is_dataclass(cls):
        names = sorted(field_names(cls)) + sorted(getattr(value, "__pydantic_extra__", None) or ())
        return [(name, getattr(value, name, None)) for name in names]
    return ()


def _short(error: BaseException) -> str:
    return str(error)[:_DETAIL_LIMIT]
