"""The tables of `docs/settings.md`, made from the settings.

`python -m towpath.cli.settings_reference docs/settings.md` rewrites them between their markers.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from towpath.settings import PREFIX, json_schema
from towpath.telemetry.reference import Tables, main, table


def _rows(properties: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in properties.items():
        if "$ref" not in field:
            default = "" if field.get("default") in ("", None) else f"`{_value(field['default'])}`"
            yield f"`{prefix}{name.upper()}`", _kind(field), default, field["description"]


def _value(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kind(field: Mapping[str, Any]) -> str:
    """The type in a word, out of its JSON Schema."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    options = field.get("anyOf", [field])
    pattern = "".join(option.get("pattern", "") for option in options)
    if pattern:
        return "duration" if "ms" in pattern else "size"
    kind: str = options[0].get("format") or options[0]["type"]
    return {"password": "secret", "object": "JSON object"}.get(kind, kind)


def _section(name: str | None) -> str:
    schema = json_schema()
    properties, prefix = schema["properties"], PREFIX
    if name is not None:
        definition = properties[name]["$ref"].rpartition("/")[2]
        properties, prefix = schema["$defs"][definition]["properties"], f"{PREFIX}{name.upper()}__"
    return table(("variable", "kind", "default", "meaning"), _rows(properties, prefix))


TABLES: Final[Tables] = {
    "general": partial(_section, None),
    **{
        name: partial(_section, name)
        for name, field in json_schema()["properties"].items()
        if "$ref" in field
    },
}


if __name__ == "__main__":
    main(sys.argv[1:], TABLES)
