"""The documented limits of message attributes, and the checks that name them.

| attribute | limit |
|---|---|
| type | 1 to 200 characters, printable, no spaces |
| destination | 1 to 200 of `A-Z a-z 0-9 . _ -` |
| group | 1 to 100 of `a-z 0-9 . _ -` |
| key | at most 512 bytes of UTF-8; empty and missing are different |
| owner | at most 200 characters |
| dedupe key | 1 to 512 bytes of UTF-8 |
| content type | 1 to 200 printable ASCII characters |
| headers | names of 1 to 128 printable ASCII characters, 16,384 bytes in all |

A NUL or a lone surrogate in any of them is refused: Postgres cannot store it, and would end the
caller's transaction instead of the call.
"""

import re
from typing import Final, NoReturn
from uuid import UUID

from towpath.errors import InvalidMessage

CANARY: Final = "towpath.canary"
"""Destination and type of the relays' own messages that prove delivery; nobody has to read them."""

TYPE_LIMIT: Final = 200
DESTINATION_LIMIT: Final = 200
GROUP_LIMIT: Final = 100
KEY_LIMIT_BYTES: Final = 512
OWNER_LIMIT: Final = 200
DEDUPE_KEY_LIMIT_BYTES: Final = 512
CONTENT_TYPE_LIMIT: Final = 200
HEADER_NAME_LIMIT: Final = 128
HEADERS_LIMIT_BYTES: Final = 16_384

_DESTINATION: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_GROUP: Final = re.compile(r"[a-z0-9._-]{1,100}")
_SHOWN: Final = 60
_KEY_INTEGER_BITS: Final = 1024


def _refuse(what: str, value: object, rule: str) -> NoReturn:
    if isinstance(value, str | bytes) and len(value) > _SHOWN:
        shown = f"{value[:_SHOWN]!r}…"
    elif isinstance(value, str | bytes | bool | float | None):
        shown = repr(value)
    else:
        shown = f"of type {type(value).__qualname__}"
    raise InvalidMessage(f"{what} {shown} is refused: {rule}")


def _text_bytes(what: str, value: str) -> int:
    """Length in UTF-8. Raises InvalidMessage for text that Postgres cannot store."""
    if "\0" in value:
        _refuse(what, value, "it contains a NUL character")
    try:
        return len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        _refuse(what, value, "it contains a lone surrogate and is not UTF-8 text")


def check_type(value: object) -> str:
    """The wire type, or InvalidMessage."""
    if isinstance(value, str) and 1 <= len(value) <= TYPE_LIMIT and value.isprintable() and " " not in value:
        return value
    _refuse("the type", value, f"a type is 1 to {TYPE_LIMIT} printable characters without spaces")


def check_destination(value: object) -> str:
    """The destination, or InvalidMessage."""
    if isinstance(value, str) and _DESTINATION.fullmatch(value):
        return value
    _refuse("the destination", value, f"a destination is 1 to {DESTINATION_LIMIT} of A-Z a-z 0-9 . _ -")


def check_group(value: object) -> str:
    """The consumer group's name, or InvalidMessage."""
    if isinstance(value, str) and _GROUP.fullmatch(value):
        return value
    _refuse("the group", value, f"a group is 1 to {GROUP_LIMIT} of a-z 0-9 . _ -")


def check_key(value: object) -> str | None:
    """The ordering key as text; None stays None. Accepts str, int and UUID, else InvalidMessage."""
    if value is None:
        return None
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _KEY_INTEGER_BITS:
        return str(int(value))
    if not isinstance(value, str):
        _refuse("the key", value, f"a key is a str, int or UUID of at most {KEY_LIMIT_BYTES} bytes, or None")
    text = str.__str__(value)
    if _text_bytes("the key", text) > KEY_LIMIT_BYTES:
        _refuse("the key", text, f"a key is at most {KEY_LIMIT_BYTES} bytes of UTF-8")
    return text


def check_owner(value: object) -> str:
    """The tenant or user a task belongs to, or InvalidMessage."""
    if isinstance(value, str) and len(value) <= OWNER_LIMIT:
        _text_bytes("the owner", value)
        return value
    _refuse("the owner", value, f"an owner is text of at most {OWNER_LIMIT} characters")


def check_dedupe_key(value: object) -> str:
    """The explicit dedupe key, or InvalidMessage."""
    if isinstance(value, str) and 1 <= _text_bytes("the dedupe key", value) <= DEDUPE_KEY_LIMIT_BYTES:
        return value
    _refuse("the dedupe key", value, f"a dedupe key is text of 1 to {DEDUPE_KEY_LIMIT_BYTES} bytes of UTF-8")


def check_content_type(value: object) -> str:
    """The content type, or InvalidMessage."""
    return _plain("the content type", value, CONTENT_TYPE_LIMIT)


def check_header_name(value: object) -> str:
    """The header name, or InvalidMessage."""
    return _plain("the header name", value, HEADER_NAME_LIMIT)


def check_message_id(value: object) -> UUID:
    """The message id, or InvalidMessage."""
    if isinstance(value, UUID):
        return value
    _refuse("the message id", value, "a message id is a uuid.UUID")


def _plain(what: str, value: object, limit: int) -> str:
    if isinstance(value, str) and 1 <= len(value) <= limit and value.isascii() and value.isprintable():
        return value
    _refuse(what, value, f"it must be 1 to {limit} printable ASCII characters")
