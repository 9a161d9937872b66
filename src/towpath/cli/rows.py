"""Rows of the database, made readable."""

import base64
from typing import Any

from towpath.errors import DecodeError
from towpath.messages.headers import load_headers
from towpath.telemetry.tracing import trace_id_of


def with_trace_id(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the id that finds its trace."""
    return row | {"trace_id": trace_id_of(row["trace"])}


def with_readable_body(row: dict[str, Any], *, is_shown: bool) -> dict[str, Any]:
    """The row with `payload` as text or base64 and `headers` as pairs, or with the size alone.

    Bodies may be private, so they are shown on request only.
    """
    payload, headers = row.pop("payload"), row.pop("headers")
    row["payload_bytes"] = None if payload is None else len(payload)
    if not is_shown:
        return row
    row["payload"], row["payload_base64"] = _text(payload)
    try:
        row["headers"] = [[name, _text(value)[0] or repr(value)] for name, value in load_headers(headers)]
    except DecodeError:
        row["headers"] = headers
    return row


def _text(payload: bytes | None) -> tuple[str | None, str | None]:
    if payload is None:
        return None, None
    try:
        return payload.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(payload).decode()
