"""Options that several commands take together: a dataclass each, whose fields stand in their signatures."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints
from uuid import UUID

import typer

from towpath.cli.options import (
    Actor,
    Because,
    DryRun,
    Fingerprints,
    Groups,
    Ids,
    Json,
    Keys,
    Most,
    Rate,
    Reasons,
    Since,
    Stages,
    Types,
    Until,
    Yes,
    actor_name,
    instant,
    reference,
    text,
    texts,
)
from towpath.deadletters import Filter
from towpath.errors import UsageError


class OptionGroup:
    """A dataclass whose fields are options, in their order; each has a default."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: each parameter that is an OptionGroup stands for its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, list[str]] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if _is_group(hints[name]):
            options = _options_of(hints[name])
            groups[name] = [option.name for option in options]
            parameters += options
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def call(**given: Any) -> None:
        made = {
            name: hints[name](**{option: given.pop(option) for option in options})
            for name, options in groups.items()
        }
        command(**given, **made)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, OptionGroup)


def _options_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


@dataclass(frozen=True, slots=True)
class Consent(OptionGroup):
    """How an action is asked for: with a look first, a question, an entry in the audit table."""

    dry_run: DryRun = False
    yes: Yes = False
    reason: Because = ""
    actor: Actor = None
    json: Json = False

    def author(self, preview: str = "the plan") -> tuple[str, str]:
        """Actor and reason for the audit table. Raises UsageError, also where nobody can be asked."""
        author = actor_name(self.actor), text(self.reason, "--reason")
        if not self.dry_run and not self.yes and not sys.stdin.isatty():
            raise UsageError(f"there is no terminal to ask on: add --yes, or --dry-run to see {preview}")
        return author

    def ask(self, question: str) -> None:
        """End the command where the answer is no."""
        if not self.yes:
            typer.confirm(question, abort=True, err=True)


@dataclass(frozen=True, slots=True)
class Pace(OptionGroup):
    """How many a bulk action takes, and how quickly."""

    maximum: Most = None
    rate: Rate = None


@dataclass(frozen=True, slots=True)
class DeadLetters(OptionGroup):
    """Which dead letters are meant."""

    group: Groups = None
    type: Types = None
    reason_code: Reasons = None
    fingerprint: Fingerprints = None
    stage: Stages = None
    key: Keys = None
    id: Ids = None
    since: Since = None
    until: Until = None

    def at(self, now: datetime) -> Filter:
        """As a filter. Raises UsageError."""
        references = [reference(value, "--id") for value in self.id or ()]
        return Filter(
            groups=texts(self.group, "--group"),
            types=texts(self.type, "--type"),
            reasons=texts(self.reason_code, "--reason-code"),
            fingerprints=texts(self.fingerprint, "--fingerprint"),
            stages=texts(self.stage, "--stage"),
            keys=texts(self.key, "--key"),
            ids=tuple(item for item in references if isinstance(item, int)),
            message_ids=tuple(item for item in references if isinstance(item, UUID)),
            since=instant(self.since, "--since", now),
            until=instant(self.until, "--until", now),
        )
