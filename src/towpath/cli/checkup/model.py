"""A check, what it finds, and how all of them are carried out in bounded time."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import asyncpg

from towpath.cli.exits import OK, SAYS_NO, UNREACHABLE, Stop, explain
from towpath.cli.session import Session
from towpath.settings import Settings
from towpath.store.database import within

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.brokers.ports import BrokerAdmin

Status: TypeAlias = Literal["ok", "warning", "failure", "not checked"]

SECONDS: Final = 15.0
"""For one check; what takes longer is frozen."""


_SERVICES: Final = ("database", "broker")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `code` is the exit code it asks for."""

    status: Status
    text: str
    code: int = OK


def ok(text: str) -> list[Finding]:
    """All is well."""
    return [Finding("ok", text)]


def warning(text: str) -> list[Finding]:
    """It works, and a person should know."""
    return [Finding("warning", text)]


def failure(text: str, code: int = SAYS_NO) -> list[Finding]:
    """It does not work until a person does what the text says."""
    return [Finding("failure", text, code)]


def unchecked(why: str) -> list[Finding]:
    """Nothing is known."""
    return [Finding("not checked", why)]


@dataclass(slots=True)
class Site:
    """What the checks look at, and what the first of them opened for the others."""

    app_paths: Sequence[str]
    stack: AsyncExitStack
    settings: Settings = field(init=False)
    apps: "list[App]" = field(default_factory=list)
    session: Session = field(init=False)
    admin: "BrokerAdmin" = field(init=False)

    @property
    def connection(self) -> "asyncpg.Connection[Any]":
        """To the database of the settings."""
        return self.session.connection


@dataclass(frozen=True, slots=True)
class Check:
    """`run` is asked only where the checks named in `needs` found no failure."""

    name: str
    run: Callable[[Site], Coroutine[Any, Any, list[Finding]]]
    needs: tuple[str, ...] = ()


async def carry_out(checks: Sequence[Check], site: Site) -> AsyncIterator[tuple[str, Finding]]:
    """Every check in turn, whatever the ones before it found."""
    lost: dict[str, str] = {}
    for check in checks:
        missing = next((need for need in check.needs if need in lost), None)
        if missing is not None:
            lost.setdefault(check.name, lost[missing])
            yield check.name, Finding("not checked", lost[missing])
            continue
        findings = await _found_by(check, site)
        for finding in findings:
            yield check.name, finding
        code = max(finding.code for finding in findings)
        if code:
            lost[check.name] = f"it needs the check {check.name}, which failed"
        if code == UNREACHABLE:
            services = [need for need in check.needs if need in _SERVICES]
            lost |= dict.fromkeys(services, f"no answer any more since the check {check.name}")


async def _found_by(check: Check, site: Site) -> list[Finding]:
    try:
        return await within(SECONDS, check.run(site))
    except Stop as stop:
        return failure(stop.line, stop.code)
    except TimeoutError:
        return failure(f"no answer within {SECONDS:g} seconds: is the service frozen?", UNREACHABLE)
    except asyncpg.InsufficientPrivilegeError as error:
        return unchecked(f"this login may not look ({error})")
    except Exception as error:  # noqa: BLE001  whatever it is becomes the check's line
        return failure(*explain(error))
