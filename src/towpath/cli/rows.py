"""Rows of the database, made readable."""

import base64
from collections.abc import Mapping
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


def timeline(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What happened to a task, in order: its history, and what only its own times tell.

    A first try that succeeds leaves no history.
    """
    empty = dict.fromkeys(("attempt", "due_at", "reason_code", "error_message", "actor"))
    lines = [
        {
            "at": line["at"],
            "event": line["event"],
            "state": line["to_state"],
            **{name: line[name] for name in empty},
        }
        for line in task["history"]
    ]
    known = {line["version"] for line in task["history"]}
    if task["started_at"] is not None:
        lines.append({"at": task["started_at"], "event": "task.started", "state": "RUNNING", **empty})
    if task["finished_at"] is not None and task["version"] not in known:
        ended = {"reason_code": task["reason_code"], "attempt": task["attempt"]}
        lines.append(
            {"at": task["finished_at"], "event": "task.ended", "state": task["state"], **empty, **ended}
        )
    created = {"at": task["created_at"], "event": "task.created", "state": None, **empty}
    return [created, *sorted(lines, key=lambda line: line["at"])]


def _text(payload: bytes | None) -> tuple[str | None, str | None]:
    if payload is None:
        return None, None
    try:
        return payload.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(payload).decode()
