"""`towpath config`: the settings in force, secrets masked, and their schema."""

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Final

import typer
from pydantic import BaseModel, Secret, SecretStr

from towpath import settings
from towpath.backoff import duration_text
from towpath.cli.options import Json
from towpath.cli.output import as_json, clean

app = typer.Typer(name="config", help="The settings in force.", no_args_is_help=True)

MASK: Final = "***"
_SHOWN_PARAMETERS: Final = frozenset(
    {"sslmode", "sslrootcert", "application_name", "connect_timeout", "target_session_attrs", "heartbeat"}
)


@app.command()
def show(json: Json = False) -> None:
    """Print every setting with the variable that sets it. Passwords never appear.

    towpath config show --json
    """
    rows = dict(shown(settings.load()))
    if json:
        as_json(rows)
        return
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {clean(_text(value))}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the settings file, for editors and checks.

    towpath config schema > towpath.schema.json
    """
    as_json(settings.json_schema())


def shown(model: BaseModel, prefix: str = settings.PREFIX) -> Iterator[tuple[str, object]]:
    """Each setting by variable name. Whatever could hold a secret is shown in part or not at all."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        variable = f"{prefix}{name.upper()}"
        if isinstance(value, BaseModel):
            yield from shown(value, f"{variable}__")
        elif isinstance(value, SecretStr):
            yield variable, masked_url(value.get_secret_value())
        elif isinstance(value, Mapping):
            yield variable, {key: MASK if isinstance(item, Secret) else item for key, item in value.items()}
        elif isinstance(value, timedelta):
            yield variable, duration_text(value)
        else:
            yield variable, value if isinstance(value, int | str | None) else str(value)


def masked_url(url: str) -> str:
    """A URL without passwords. One whose parts are ambiguous is masked whole."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return MASK
    credentials, at, address = rest.rpartition("@")
    if re.search(r"[/?#]", credentials):
        return f"{scheme}://{MASK}"  # a password that was not percent-encoded, or an @ in the query
    user, colon, _ = credentials.partition(":")
    path, question, query = address.partition("?")
    parameters = "&".join(map(_parameter, query.split("&"))) if question else ""
    return f"{scheme}://{user}{colon and ':' + MASK}{at}{path}{question}{parameters}"


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    return f"{name}{equals}{value if name in _SHOWN_PARAMETERS else MASK}" if equals else MASK


def _text(value: object) -> str:
    """As the setting may be written."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in (None, "") else str(value)
