"""What is stored and shown about an error: small, redacted, printable, valid UTF-8.

Messages of drivers and validators repeat what they were given: SQLAlchemy its parameters, Postgres
the failing row, pydantic the input. None of that is kept, since it is the payload.
"""

import hashlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from towpath.failures.sqlstate import sqlstate_of
from towpath.failures.walk import chain, heart

MESSAGE_LIMIT: Final = 1000
CLASS_LIMIT: Final = 200
MASK: Final = "[redacted]"

_SCANNED: Final = 8 * MESSAGE_LIMIT
_ELLIPSIS: Final = "…"
_BAD_VALUE: Final = re.compile(r""": ["'].*""", re.DOTALL)
"""Where a data exception (class 22) quotes the value it was given."""
_NOT_PRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

_SENSITIVE_NAME: Final = (
    r"[\w-]*(?:passw(?:or)?d|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"account[_-]?key|credentials?|authorization|signature|cookie|session[_-]?id)"
)
_SECRETS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL), MASK),
    # user:password@, where a password may itself hold a slash or an @
    (re.compile(r"(://)[^\s/?#@:]*:[^\s\"'<>]*@"), rf"\1{MASK}@"),
    (re.compile(r"(://)[^\s/?#@]+@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)\b(bearer)\s+[\w.~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"\b((?i:basic|digest))\s+(?=[\w.~+/=-]*[A-Z0-9=])[\w.~+/=-]{6,}"), rf"\1 {MASK}"),
    (
        re.compile(
            rf"(?i)(?<![\w-])({_SENSITIVE_NAME})([\"']?\s*(?:=>|[:=])\s*)"
            r"(?!(?:bearer|basic|digest) |\[redacted\])"
            r"(?:\"[^\"]*\"?|'[^']*'?|[^\s,;&)}\]]+)"
        ),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b(?:sk|pk|rk)[-_](?:[a-z]+[-_])*[A-Za-z0-9_-]{12,}"), MASK),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[a-z]-)[A-Za-z0-9_-]{10,}"), MASK),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), MASK),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"), MASK),
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?"), MASK),
)

_VARIABLE: Final = re.compile(
    r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b0x[0-9a-f]+\b"
    r"|\b[0-9a-f]{8,}\b"
    r"|[\w-]*\d[\w-]*(?:\.\d+)*"
)
_LIBRARY_ROOTS: Final = tuple(
    sorted(
        {str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    )
)


def redact(text: str, *, limit: int = MESSAGE_LIMIT) -> str:
    """Text fit to be stored, logged and shown: secrets masked, at most `limit` characters.

    Control characters (NUL, terminal escapes) and lone surrogates are replaced.
    """
    text = text[:_SCANNED].encode("utf-8", "backslashreplace").decode()
    text = _NOT_PRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text if len(text) <= limit else text[: limit - 1] + _ELLIPSIS


def class_name(error: BaseException) -> str:
    """The qualified class, without the module for built-in ones."""
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return redact(name, limit=CLASS_LIMIT)


def describe(error: BaseException) -> str:
    """The stored message of an error, redacted. Never raises, whatever the error's `__str__` does."""
    error = heart(error)
    for render in (_of_validation, _of_database, _of_group):
        text = render(error)
        if text is not None:
            return redact(text)
    return redact(_text(error))


def problem_of(error: BaseException) -> str:
    """The message of an error as a line that also says what to do."""
    advice = getattr(error, "advice", "")
    return f"{describe(error)}: {advice}" if advice else describe(error)


def traceback_of(error: BaseException) -> str:
    """Where it came from, causes first, for people: frames with their source lines, messages redacted."""
    parts = []
    for each in chain(error):
        frames = "".join(traceback.format_tb(each.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{class_name(each)}: {describe(each)}")
    return "\n\n".join(reversed(parts))


def fingerprint(error: BaseException) -> str:
    """16 hex digits, equal for errors of one class, place and wording that differ in ids and numbers."""
    error = heart(error)
    wording = _VARIABLE.sub("#", describe(error))
    identity = "\n".join((class_name(error), wording, _place(error)))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def is_validation_class(cls: type) -> bool:
    """Whether this is the validation error of pydantic or msgspec, without importing either."""
    return cls.__name__ == "ValidationError" and cls.__module__.partition(".")[0] in {
        "pydantic",
        "pydantic_core",
        "msgspec",
    }


def _text(error: BaseException) -> str:
    try:
        return str(error) or type(error).__qualname__
    except Exception as broken:  # noqa: BLE001 - foreign `__str__`; the error itself must still be stored
        return f"(the message cannot be shown: its __str__ raises {type(broken).__name__})"


def _of_validation(error: BaseException) -> str | None:
    """Locations and rules of a pydantic error, without the input it shows by default."""
    if not is_validation_class(type(error)) or not callable(list_errors := getattr(error, "errors", None)):
        return None
    problems = _listed(list_errors)
    if problems is None:
        return f"{type(error).__qualname__} (details withheld)"
    lines = [
        f"{'.'.join(str(part) for part in problem.get('loc', ()))}: {problem.get('msg', '')} "
        f"[{problem.get('type', '')}]"
        for problem in problems[:20]
    ]
    return "; ".join(lines)


def _listed(list_errors: Callable[..., object]) -> list[Mapping[str, Iterable[object]]] | None:
    try:
        found = list_errors(include_url=False, include_context=False, include_input=False)
    except TypeError:
        return None
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else None


def _of_database(error: BaseException) -> str | None:
    """The server's first line: SQL, parameters, DETAIL (the failing row) and bad values are left out."""
    wrapped = getattr(error, "orig", None)
    cause = wrapped if isinstance(wrapped, BaseException) else error
    state = sqlstate_of(error)
    if cause is error and state is None:
        return None
    line = _text(cause).strip().partition("\n")[0]
    return _BAD_VALUE.sub(f": {_ELLIPSIS}", line) if state and state.startswith("22") else line


def _of_group(error: BaseException) -> str | None:
    if not isinstance(error, BaseExceptionGroup):
        return None
    inner = "; ".join(f"{class_name(member)}: {describe(member)}" for member in error.exceptions[:5])
    return f"{error.message}: {inner}"


def _place(error: BaseException) -> str:
    """Module and function of the innermost frame that is not library code; no line number."""
    chosen = ""
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if not chosen or _is_own(frame):
            chosen = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"
        step = step.tb_next
    return chosen


def _is_own(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in {"towpath", *sys.stdlib_module_names} or filename.startswith("<"):
        return False
    return "site-packages" not in filename and not filename.startswith(_LIBRARY_ROOTS)
