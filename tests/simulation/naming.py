"""Which rule of a model stands for a statement."""

from collections.abc import Callable
from typing import Any

from tests.simulation.postgres import Postgres
from towpath.store import destinations
from towpath.store.installed import FACTS
from towpath.store.statements import DEFAULT_SCHEMA, in_schema, load

_FAMILIES = ("relay", "parking", "provenance", "work", "doubts", "groups", "pauses", "offsets")
_NAMES = {sql: name for family in _FAMILIES for name, sql in load(family).items()}
_NAMES[in_schema(FACTS, DEFAULT_SCHEMA)] = "facts"
_NAMES[in_schema(destinations._ADDRESSES, DEFAULT_SCHEMA)] = "addresses"
_NAMES[in_schema(destinations._INSTALLATION, DEFAULT_SCHEMA)] = "installation"
_NAMES["set local enable_bitmapscan = on"] = "set_local"


def statement_of(schema: Postgres, sql: str) -> Callable[..., Any]:
    """The model's method of the statement's name, which takes what that takes."""
    rule: Callable[..., Any] = getattr(schema, _NAMES[sql])
    return rule
