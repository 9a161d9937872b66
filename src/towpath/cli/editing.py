"""`towpath dlq edit`: a corrected body or headers, recorded beside the original."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Annotated, Any

import typer

from towpath import settings
from towpath.cli.exits import FAILED, Stop
from towpath.cli.options import Actor, Because, Json, actor_name, reference, text
from towpath.cli.output import as_json
from towpath.cli.session import Session, connected, run_async
from towpath.deadletters import Catalog
from towpath.deadletters.editing import Editable, corrected_headers, open_for_edit, revise, validate
from towpath.errors import DecodeError, PayloadTooLarge, UsageError
from towpath.messages.codecs import is_json


def edit(
    id: Annotated[str, typer.Argument(help="Catalog id or message id.")],  # noqa: A002  the argument's name
    payload: Annotated[
        Path | None, typer.Option(help="File with the whole new body, - for standard input.", allow_dash=True)
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", help="name=value, in place of its values; repeatable.")
    ] = None,
    drop_header: Annotated[
        list[str] | None, typer.Option("--drop-header", help="Name of a header to leave out; repeatable.")
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:APP", help="The group that reads it: its type validates the body."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Take the body without validation.")] = False,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Correct the body or the headers of an open dead letter; the next replay sends the correction.

    Without --payload and --header the body is opened in $EDITOR. The original stays, and so does every
    earlier correction: towpath dlq show tells them all.

    towpath dlq edit 3 --payload fixed.json --app billing.consumer:app --reason "amount was text"
    """
    who, why, wanted = actor_name(actor), text(reason, "--reason"), reference(id)
    changed = _headers(header)

    async def read() -> Editable:
        async with connected() as session:
            return await _open(session, wanted)

    letter = run_async(read())
    headers = corrected_headers(letter, changed, drop_header or ())
    body, is_typed = letter.payload, False
    if payload is not None:
        body = sys.stdin.buffer.read() if str(payload) == "-" else _read_file(payload)
    elif is_typed := not changed and not drop_header:
        body = _in_editor(letter, app, is_forced=force)
    if body == letter.payload and headers == letter.headers:
        _report(letter, None, is_validated=False, is_json=json)
        return
    try:
        is_validated = body == letter.payload or _check(letter, body or b"", app, is_forced=force)
    except (Stop, PayloadTooLarge) as error:
        if is_typed:
            print(f"what you wrote is in {_keep(body or b'')}: --payload takes it", file=sys.stderr)
        raise error from None

    async def record() -> int:
        async with connected() as session:
            return await revise(
                session.connection, letter, payload=body, headers=headers, is_validated=is_validated,
                actor=who, reason=why, schema=session.schema,
            )  # fmt: skip

    _report(letter, run_async(record()), is_validated=is_validated, is_json=json)


def _report(letter: Editable, revision: int | None, *, is_validated: bool, is_json: bool) -> None:
    if is_json:
        as_json({"id": letter.id, "revision": revision, "is_validated": is_validated})
    elif revision is None:
        print("nothing changed")
    else:
        print(
            f"dead letter {letter.id} has revision {revision}: towpath dlq replay --id {letter.id} sends it"
        )


async def _open(session: Session, wanted: Any) -> Editable:
    rows = await Catalog(session.connection, session.schema).one(wanted)
    if not rows:
        raise Stop(FAILED, f"there is no dead letter {wanted}")
    if len(rows) > 1:
        ids = ", ".join(str(row["id"]) for row in rows)
        raise UsageError(f"{wanted} died in several groups: give the catalog id, one of {ids}")
    return await open_for_edit(session.connection, rows[0]["id"], schema=session.schema)


def _headers(given: Sequence[str] | None) -> dict[str, list[str]]:
    changed: dict[str, list[str]] = {}
    for pair in given or ():
        name, equals, value = text(pair, "--header", 16_384).partition("=")
        if not equals:
            raise UsageError(f"--header is name=value, not {pair[:40]!r}")
        changed.setdefault(name, []).append(value)
    return changed


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a name that no file system takes is a ValueError
        raise UsageError(f"--payload {str(path)[:200]!r} cannot be read: {reason_of(error)}") from error


def reason_of(error: OSError | ValueError) -> str:
    """Why a file cannot be opened."""
    return error.strerror or "" if isinstance(error, OSError) else "that is no name of a file"


def _in_editor(letter: Editable, app: str | None, *, is_forced: bool) -> bytes | None:
    """The body as a person leaves it; unchanged where the editor is left without saving."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to edit on: give --payload FILE, or --header name=value")
    _ensure_checkable(app, is_forced=is_forced)  # before somebody writes what nobody takes
    try:
        shown = (letter.payload or b"").decode()
    except UnicodeDecodeError as error:
        raise UsageError("the body is not text: give --payload FILE") from error
    suffix = ".json" if is_json(letter.content_type) else ".txt"
    editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with TemporaryDirectory(prefix="towpath-") as directory:
        file = Path(directory, f"body{suffix}")
        file.write_bytes(shown.encode())
        try:
            left = subprocess.run([*editor, str(file)], check=False).returncode
        except OSError as error:
            raise UsageError(
                f"the editor {editor[0]!r} cannot be run: set EDITOR, or give --payload"
            ) from error
        if left:
            raise Stop(FAILED, "the editor failed: nothing was changed")
        if not file.is_file():
            raise Stop(FAILED, "the editor left no file: nothing was changed")
        written = file.read_bytes()
    return written if shown.endswith("\n") else written.removesuffix(b"\n")  # editors end the last line


def _keep(body: bytes) -> str:
    """A file of its own for what a person typed and nothing took."""
    descriptor, name = mkstemp(prefix="towpath-", suffix=".txt")
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
    return name


def _ensure_checkable(app: str | None, *, is_forced: bool) -> None:
    if app is None and not is_forced:
        raise UsageError(
            "give --app module:app, whose type validates the body, or --force to take it as it is"
        )


def _check(letter: Editable, body: bytes, app: str | None, *, is_forced: bool) -> bool:
    """Whether the body was read as its type. Raises UsageError, Stop."""
    limit = settings.load().max_payload_bytes
    if len(body) > limit:
        raise PayloadTooLarge(letter.type or "", len(body), limit)
    _ensure_checkable(app, is_forced=is_forced)
    if is_forced or app is None:
        return False
    from towpath.consumer.service import load_app  # noqa: PLC0415  the engine is heavy

    try:
        validate(letter, body, load_app(app))
    except DecodeError as error:
        raise Stop(FAILED, f"the body is no {letter.type}: {error}; correct it, or --force it") from error
    return True
