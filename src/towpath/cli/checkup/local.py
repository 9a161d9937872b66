"""Checks of this side: settings, the apps, the processes on this machine."""

import os

from towpath import settings
from towpath.cli import health
from towpath.cli.checkup.model import Finding, Site, failure, ok, unchecked
from towpath.cli.exits import USAGE, Stop
from towpath.errors import SettingsError


async def settings_are_right(site: Site) -> list[Finding]:
    """They can be read. What needs a service is left to its check."""
    try:
        site.settings = settings.load()
    except SettingsError as error:
        return failure(str(error), USAGE)
    file = os.environ.get(settings.FILE_VARIABLE)
    return ok(f"read from the environment{f' and {file}' if file else ''}")


async def apps_are_right(site: Site) -> list[Finding]:
    """What `towpath worker validate` says."""
    if not site.app_paths:
        return unchecked("name the groups to look at: --app billing.consumer:app")
    from towpath.consumer import service, slots  # noqa: PLC0415  the engine is heavy

    site.apps = [service.load_app(path) for path in site.app_paths]
    problems = [
        f"{app.name}: {problem}"
        for app in site.apps
        for problem in (*app.problems(), *slots.setting_problems(app.handlers, site.settings.worker))
    ]
    names = [app.name for app in site.apps]
    if len(set(names)) < len(names):
        problems.append(f"two of these apps are the group {max(names, key=names.count)}: give each its name")
    return [finding for problem in problems for finding in failure(problem)] or ok(", ".join(names))


async def relay_is_ready(site: Site) -> list[Finding]:
    """What `towpath relay check` says."""
    return _endpoint("relay", site.settings.relay.health_host, site.settings.relay.health_port)


async def worker_is_ready(site: Site) -> list[Finding]:
    """What `towpath worker check` says."""
    return _endpoint("worker", site.settings.worker.health_host, site.settings.worker.health_port)


def _endpoint(noun: str, host: str, port: int) -> list[Finding]:
    if not port:
        return unchecked(f"TOWPATH_{noun.upper()}__HEALTH_PORT is not set here")
    try:
        facts = health.asked(noun, host, port)
    except Stop as stop:
        return unchecked(f"none runs here: {stop.line}")
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "ok")
    return (
        ok(f"ready ({told})")
        if facts["ok"]
        else failure(f"not ready: look at what it says of itself ({told})")
    )
