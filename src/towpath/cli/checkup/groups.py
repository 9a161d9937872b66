"""Checks of consumer groups: whether the apps given are the groups that run under their names."""

from towpath.app import App
from towpath.cli.checkup.model import Finding, Site, failure, ok, unchecked, warning
from towpath.errors import GroupMismatch
from towpath.store.groups import GroupStore, Terms


async def agree_with_their_apps(site: Site) -> list[Finding]:
    """What a member that starts now would be told."""
    if not site.apps:
        return unchecked("name the groups to look at: --app billing.consumer:app")
    found = [finding for app in site.apps for finding in await _agrees(site, app)]
    return found or ok("the apps are what runs, or may take over")


async def _agrees(site: Site, app: App) -> list[Finding]:
    store, types = GroupStore(app.name, site.session.schema), tuple(sorted(app.handlers))
    trial = site.connection.transaction()
    await trial.start()
    try:
        await store.agree(site.connection, Terms(app.ordering, queues=None))
        others = await store.others(site.connection, types)
    except GroupMismatch as error:
        return failure(str(error))
    finally:
        await trial.rollback()
    return [finding for host, handled in others for finding in _differs(app, host, set(handled))]


def _differs(app: App, host: str, handled: set[str]) -> list[Finding]:
    types = ", ".join(sorted(handled.symmetric_difference(app.handlers)))
    return warning(
        f"{app.name} and a member of it on {host} do not both handle {types}: a deployment rolls, or another "
        "app has this name and needs one of its own"
    )
