"""One dead letter as a line of JSON, and the line that says where they come from."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec

from towpath.errors import DecodeError, UsageError
from towpath.messages import load_headers

FORMAT: Final = "towpath dead letters"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Big = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(pattern="^[^\x00]*$")]
_When = Annotated[datetime, msgspec.Meta(tz=True)]


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    headers: msgspec.Raw
    payload: str | None = None
    payload_base64: str | None = None
    content_type: _Text | None = None


class _Revision(_Body, kw_only=True):
    revision: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    at: _When
    actor: _Text
    reason: _Text
    is_validated: bool


class _Letter(_Body, kw_only=True):
    id: _Big
    consumer_group: Annotated[str, msgspec.Meta(pattern="^[^\x00]*$", max_length=100)]
    message_id: UUID
    stage: Literal["publish", "decode", "handle", "broker"]
    state: Literal["open", "replayed", "discarded"]
    death_count: _Count
    replay_count: _Count
    source: _Text
    reason_code: _Text
    fingerprint: _Text
    attempts: _Count
    followers_passed: _Count
    first_dead_at: _When
    last_dead_at: _When
    type: _Text | None = None
    kind: Literal["event", "task", "copy"] | None = None
    key: _Text | None = None
    position: _Big | None = None
    origin: msgspec.Raw = msgspec.Raw(b"null")
    error_class: _Text | None = None
    error_message: _Text | None = None
    trace: _Text | None = None
    copy_error: _Text | None = None
    closed_at: _When | None = None
    lane: _Text | None = None
    owner: Annotated[str, msgspec.Meta(pattern="^[^\x00]*$", max_length=200)] | None = None
    run_no: _Count | None = None
    revisions: list[_Revision] = []


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """The first line."""

    format: str
    installation: str
    schema_version: str
    exported_at: _When


class End(msgspec.Struct, forbid_unknown_fields=True):
    """The last line."""

    count: int


def read_letter(number: int, line: str) -> dict[str, Any]:
    """A dead letter as the import statement takes it. Raises UsageError with the line's number."""
    try:
        letter = msgspec.json.decode(line, type=_Letter)
        read: dict[str, Any] = json.loads(line)
        return {
            **_plain(read, letter),
            "origin": json.loads(bytes(letter.origin)),
            "revisions": [
                _plain(one, revision)
                for one, revision in zip(read.get("revisions", ()), letter.revisions, strict=True)
            ],
        }
    except (msgspec.DecodeError, DecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"line {number} is not a dead letter: {str(error)[:200]}") from error


def _plain(read: dict[str, Any], body: _Body) -> dict[str, Any]:
    """With its headers checked, and its body as base64 alone."""
    headers = bytes(body.headers).decode()
    load_headers(headers)
    encoded = body.payload_base64
    if body.payload is not None and encoded is not None:
        raise ValueError("it has a payload and a payload_base64")
    if body.payload is not None:
        encoded = b64encode(body.payload.encode()).decode()
    elif encoded is not None:
        b64decode(encoded, validate=True)
    return {**read, "headers": json.loads(headers), "payload": None, "payload_base64": encoded}


def line_of(letter: Mapping[str, Any], revisions: Sequence[Mapping[str, Any]]) -> str:
    """A dead letter and its corrections, ASCII."""
    return json.dumps(
        {
            **_with_text(letter),
            "origin": None if letter["origin"] is None else json.loads(letter["origin"]),
            "revisions": [
                {
                    name: value
                    for name, value in _with_text(one).items()
                    if name not in ("dead_letter", "payload_bytes")
                }
                for one in revisions
            ],
        },
        default=_text,
    )


def _with_text(row: Mapping[str, Any]) -> dict[str, Any]:
    """A body as text where it is text, else as base64."""
    payload = row["payload"]
    shown: dict[str, object] = {"payload": None}
    if payload is not None:
        try:
            shown = {"payload": payload.decode()}
        except UnicodeDecodeError:
            shown = {"payload_base64": b64encode(payload).decode()}
    kept = {name: value for name, value in row.items() if name != "payload"}
    return {**kept, **shown, "headers": json.loads(row["headers"])}


def _text(value: object) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
