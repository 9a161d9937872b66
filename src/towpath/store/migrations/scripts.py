"""Revisions as plain SQL files: parameters of the state machine filled in, schema name substituted."""

import re
from importlib.resources import files
from typing import Final

from alembic import context, op
from sqlalchemy import text

from towpath.states import FINAL, TaskState, WaitingFor, sql_in
from towpath.store.statements import in_schema

_TOKEN: Final = re.compile(
    r"""
    --[^\n]*                                  # a comment
    | '(?:[^']|'')*'                          # a string
    | "(?:[^"]|"")*"                          # a quoted identifier
    | \$(?P<tag>\w*)\$ .*? \$(?P=tag)\$       # a dollar-quoted body
    | (?P<end>;)
    """,
    re.VERBOSE | re.DOTALL,
)


def split(script: str) -> list[str]:
    """The statements of a script, without their semicolons and without comment-only remainders.

    Drivers prepare one statement at a time; semicolons inside strings, comments and dollar-quoted
    bodies do not count.
    """
    statements, start = [], 0
    for token in _TOKEN.finditer(script):
        if token["end"]:
            statements.append(script[start : token.start()].strip())
            start = token.end()
    statements.append(script[start:].strip())
    return [statement for statement in statements if _TOKEN.sub(_without_comment, statement).strip()]


def render(name: str, schema: str) -> str:
    """The text of `versions/<name>` for one schema, with the states of `towpath.states` filled in."""
    script = (files("towpath.store.migrations") / "versions" / name).read_text(encoding="utf-8")
    for parameter, states in (
        (":task_states", sql_in(TaskState)),
        (":final_states", sql_in(FINAL)),
        (":waiting_reasons", ", ".join(f"'{reason}'" for reason in sorted(WaitingFor))),
    ):
        script = script.replace(parameter, states)
    return in_schema(script, schema)


def execute_script(name: str) -> None:
    """Emit the statements of `versions/<name>` in the running revision."""
    schema: str = context.config.attributes["schema"]
    for statement in split(render(name, schema)):
        op.execute(text(statement.replace(":", r"\:")))  # nothing in a script is a bind parameter


def _without_comment(token: re.Match[str]) -> str:
    return "" if token[0].startswith("--") else token[0]
