"""The settings file: TOML, with one table for each section."""

import tomllib
from pathlib import Path
from typing import Any

from towpath.errors import SettingsError


def values_of_file(path: str | None, variable: str) -> dict[str, Any]:
    """What the file says, empty where none is named. Raises SettingsError, which never shows its text."""
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not TOML: {_place(error)}"
        raise SettingsError(
            f"cannot read the settings file that {variable} names, {path!r}: {reason}"
        ) from None


def _place(error: ValueError) -> str:
    """Where, without what stands there: it may be a password."""
    text = str(error)
    return text[text.rfind("(at ") + 1 : -1] if "(at " in text else "its text is malformed"
